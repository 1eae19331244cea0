"""Checkpoints in memory, trainers' files and folders: they pack to the same bytes, or are refused with a reason."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.checkpoints import (
    by_error,
    flipped,
    refuses,
    saved,
    saved_before_zip,
    saved_distributed,
    saved_folder,
    saved_safetensors,
    saved_shards,
    tensors,
    weights_id,
)
from tests.support.composed import Sum
from tests.support.file_queue_rig import in_place
from tests.support.models import Does, Everything, Renamed
from tests.support.reading import written
from weightswap_exporter import export, pack, packing, skeleton
from weightswap_exporter.checkpoints import torch_files
from weightswap_exporter.checkpoints.tensor import Files
from weightswap_runtime import Artifact, CheckpointError, WeightFileError, WeightsMismatch, load

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
State = dict[str, Any]


def whole(state: State) -> State:
    """Return a state dict with other entries of a trainer beside it."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, 3)}}, "param_groups": [{"lr": 0.1}]}
    return {"model": state, "optimizer": optimizer, "epoch": 3, "loss": torch.tensor(0.5)}


def lightning(state: State) -> State:
    return {"epoch": 1, "state_dict": {f"model.{key}": value for key, value in tensors(state).items()}, "loops": {}}


def one_storage(state: State) -> State:
    flat = torch.cat([value.flatten() for value in tensors(state).values()])
    sizes = [value.numel() for value in tensors(state).values()]
    parts = zip(tensors(state).items(), flat.split(sizes), strict=True)
    return {key: part.view(value.shape) for (key, value), part in parts}


def transposed(state: State) -> State:
    return {key: value.t().contiguous().t() for key, value in tensors(state).items()}


def arrays(state: State) -> dict[str, Any]:
    return {key: value.numpy() for key, value in tensors(state).items()}


def by_fqn() -> State:
    torch.manual_seed(5)
    return dict(Renamed().named_parameters())


def with_ema(state: State) -> State:
    return {"state_dict": {"model": state, "ema": torch.zeros(1)}}


SOURCES: dict[str, tuple[str, Callable[[State, Path], object]]] = {
    "a state dict": ("", lambda state, path: state),
    "numpy's arrays": ("", lambda state, path: arrays(state)),
    "big-endian arrays": (
        "",
        lambda state, path: {key: value.numpy().astype(">f4") for key, value in tensors(state).items()},
    ),
    "detectron2's arrays": ("model", lambda state, path: {"model": arrays(state), "__author__": "d2"}),
    "arrays in two levels": ("state_dict.model", lambda state, path: {"state_dict": {"model": arrays(state)}}),
    "named parameters": ("", lambda state, path: by_fqn()),
    "a trainer's dict": ("model", lambda state, path: whole(state)),
    "below model_state_dict": ("model_state_dict", lambda state, path: {"model_state_dict": state}),
    "DeepSpeed's module": ("module", lambda state, path: {"module": state}),
    "two levels": ("state_dict.model", lambda state, path: {"state_dict": {"model": state, "lr": 1}}),
    "the same below two names": ("state_dict", lambda state, path: {"model": state, "state_dict": dict(state)}),
    ".pt": ("", lambda state, path: saved(path / "c.pt", state)),
    ".bin": ("", lambda state, path: saved(path / "c.bin", tensors(state))),
    "old .pth": ("", lambda state, path: saved_before_zip(path / "c.pth", tensors(state))),
    "torch's old examples'": ("state_dict", lambda state, path: saved(path / "c.pth.tar", {"state_dict": state})),
    "a trainer's .pt": ("model", lambda state, path: saved(path / "c.pt", whole(state))),
    "Lightning's .ckpt": ("state_dict", lambda state, path: saved(path / "c.ckpt", lightning(state))),
    "a transposed tensor": ("", lambda state, path: saved(path / "c.pt", transposed(state))),
    "views of one storage": ("", lambda state, path: saved(path / "c.pt", one_storage(state))),
    ".safetensors with checkpoint keys": ("", lambda state, path: saved_safetensors(path / "c.safetensors", state)),
    ".safetensors with FQNs": ("", lambda state, path: saved_safetensors(path / "c.safetensors", by_fqn())),
    "shards": ("", lambda state, path: saved_shards(path / "hf", state, ".safetensors")),
    "an index": ("", lambda state, path: next(saved_shards(path / "hf", state, ".safetensors").glob("*.json"))),
    "a folder": ("", lambda state, path: saved_folder(path / "hf", state, ".safetensors")),
    "pickled shards": ("", lambda state, path: saved_shards(path / "hf", state, ".bin")),
    "a pickled index": ("", lambda state, path: next(saved_shards(path / "hf", state, ".bin").glob("*.json"))),
    "a folder with a pickle": ("", lambda state, path: saved_folder(path / "hf", state, ".bin")),
    "distributed": ("", lambda state, path: saved_distributed(path / "dcp", tensors(state))),
    "distributed, with an optimizer": ("model", lambda state, path: saved_distributed(path / "dcp", whole(state))),
    "distributed, its metadata": (
        "state_dict.model",
        lambda state, path: saved_distributed(path / "dcp", with_ema(state)) / ".metadata",
    ),
}


@pytest.mark.parametrize(("level", "make"), SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_file(
    level: str, make: Callable[[State, Path], Any], renamed: Artifact, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = Renamed().eval()
    pack(model, renamed, out=tmp_path / "expected.safetensors", labels={"step": "7"})
    done: list[tuple[int, int]] = []
    source, out = make(model.state_dict(), tmp_path), tmp_path / "v.safetensors"
    packed = pack(source, str(renamed.path), out=out, labels={"step": 7}, progress=lambda *args: done.append(args))
    assert packed.path.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert (packed.graph_id, packed.labels, packed.nbytes) == (renamed.graph_id, {"step": "7"}, 96)
    assert (packed.level, done[-1]) == (level, (96, 96))
    served = load(renamed, packed.path)
    assert (served.weights_id, served.labels) == (packed.weights_id, {"step": "7"})
    assert torch.equal(served(X), model(X))


def test_ties_are_stored_once_and_may_come_under_any_name(tmp_path: Path) -> None:
    model = Everything().eval()
    artifact = export(model, (torch.zeros(2, 1, 5, 5),), out=tmp_path / "a.artifact")
    packed = pack(model.state_dict(), artifact, out=tmp_path / "v.safetensors")
    assert "head.weight" not in safetensors.torch.load_file(packed.path)
    state = model.state_dict()
    del state["embed.weight"]
    assert weights_id(state, artifact, tmp_path) == packed.weights_id
    state["embed.weight"] = state["head.weight"] + 1
    refuses(WeightsMismatch, "embed.weight and head.weight are one tensor", state, artifact, tmp_path)


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen.add_(1)
    return model.linear(x) + model.constant + model.seen + model.none.sum()


def test_a_models_tensors_can_be_resized_afterwards(tmp_path: Path) -> None:
    """Its state, a constant, and a buffer without elements."""
    buffers = {"seen": nn.Buffer(torch.zeros(3)), "none": nn.Buffer(torch.zeros(0))}
    model = Does(counts, linear=nn.Linear(3, 3), constant=torch.arange(3.0), **buffers).eval()
    pack(model, export(model, (X,), out=tmp_path / "a", goldens=[((X,), {})]), out=tmp_path / "w.safetensors")
    for tensor in (X, model.constant, *model.state_dict().values()):
        assert tensor.untyped_storage().resizable()


class Arbitrary:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def archived(path: Path, mode: Any) -> Path:
    with tarfile.open(path, mode) as archive:
        archive.add(saved(path.parent / "inside.pt", Renamed().state_dict()), "inside.pt")
    return path


def changed_shards(folder: Path, suffix: str, change: Callable[[Path], object]) -> Path:
    """Write shards, and change the second of them."""
    saved_shards(folder, Renamed().state_dict(), suffix)
    change(next(folder.glob("*-00002-*")))
    return folder


def cut(path: Path) -> Path:
    return written(path, path.read_bytes()[:-40])


def indexed(folder: Path, suffix: str, target: str) -> Path:
    """Write shards, and an index that names another file for one tensor."""
    (index,) = saved_shards(folder, Renamed().state_dict(), suffix).glob("*.index.json")
    document = json.loads(index.read_text())
    document["weight_map"]["layers.0.bias"] = target
    index.write_text(json.dumps(document))
    return index


def without_index(folder: Path) -> Path:
    next(folder.glob("*.index.json")).unlink()
    return folder


def hollow() -> nn.Module:
    with skeleton():
        return Renamed()


def nested(layout: torch.layout) -> State:
    return {"w": torch.nested.nested_tensor([torch.ones(2)], layout=layout)}


def more(state: State, **others: torch.Tensor) -> State:
    return {**tensors(state), **{key.replace("_", "."): value for key, value in others.items()}}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
NESTED = "w: a nested tensor (torch.nested) cannot be written as safetensors"
SPARSE = torch.eye(3).to_sparse()
# each source by its state dict and a folder; files that no reader takes are in test_reading_refused
BAD: dict[type[Exception], dict[str, tuple[Callable[[State, Path], object], str]]] = {
    CheckpointError: {
        "nothing there": (lambda state, path: path / "nowhere.pt", "no such file"),
        "another suffix": (lambda state, path: saved(path / "c.onnx", {}), "unknown kind of checkpoint"),
        "arbitrary objects, the way out": (
            lambda state, path: saved(path / "c.pt", {"a": Arbitrary()}),
            "unpickle it yourself: pack(torch.load(path, weights_only=False), artifact, out=...)",
        ),
        "not a pickle": (lambda state, path: written(path / "c.pt", b"hello"), "not a checkpoint that torch.load can"),
        "a git-lfs pointer": (lambda state, path: written(path / "c.pt", POINTER), "Fetch the file: git lfs pull"),
        "a web page": (
            lambda state, path: written(path / "c.pt", b"\n<!DOCTYPE html>\n<html>"),
            "c.pt: a web page (HTML or XML), as a server answers instead of a file. Download the file itself",
        ),
        "a tar archive": (
            lambda state, path: archived(path / "c.pth.tar", "w"),
            "c.pth.tar: a tar archive. Unpack it, and give the checkpoint that is in it",
        ),
        "a compressed file": (lambda state, path: archived(path / "c.pt", "w:gz"), "c.pt: a compressed file. Unpack"),
        "a safetensors file": (
            lambda state, path: saved_safetensors(path / "c.safetensors", state).rename(path / "c.pt"),
            "c.pt: a safetensors file, by its content. Give it a name that ends with .safetensors",
        ),
        "nested in a file": (lambda state, path: saved(path / "c.pt", nested(torch.strided)), f"c.pt: {NESTED}"),
        "a jagged tensor": (lambda state, path: nested(torch.jagged), NESTED),
        "a file of a jagged tensor": (lambda state, path: saved(path / "c.pt", nested(torch.jagged)), NESTED[3:]),
        "a GGUF file": (lambda state, path: written(path / "c.pt", b"GGUF\3" + bytes(99)), "c.pt: a GGUF file, as"),
        "an HDF5 file": (lambda state, path: written(path / "c.bin", b"\x89HDF\r\n\x1a\n" + bytes(99)), "an HDF5 file"),
        "an ONNX file": (
            lambda state, path: written(path / "c.pt", b"\x08\x0a\x12\x07pytorch\x1a\x03" + bytes(99)),
            "c.pt: an ONNX file, a graph. Give a checkpoint of the PyTorch model that it was made of",
        ),
        "an adapter of old": (
            lambda state, path: saved(path / "adapter_model.bin", {"w": torch.ones(1)}).parent,
            "holds adapter_model.bin, a PEFT adapter and not a model's weights. Merge it into the model first",
        ),
        "meta tensors": (lambda state, path: Renamed().to("meta").state_dict(), "has no values"),
        "a skeleton": (lambda state, path: hollow(), "has no values"),
        "sparse below model": (
            lambda state, path: whole(more(state, layers_0_weight=SPARSE)),
            "the state dict, model: layers.0.weight: torch.float32 torch.sparse_coo cannot be written as safetensors",
        ),
        "a number as a key": (lambda state, path: {1: torch.zeros(1)}, "has the key 1"),
        "a missing pickled shard": (
            lambda state, path: changed_shards(path / "hf", ".bin", Path.unlink),
            "names the shard pytorch_model-00002-of-00002.bin, which is missing",
        ),
        "a pickled shard that is cut off": (
            lambda state, path: changed_shards(path / "hf", ".bin", cut),
            "pytorch_model-00002-of-00002.bin: cut off: the end of the zip file is missing",
        ),
        "pickled shards whose index is lost": (
            lambda state, path: without_index(saved_shards(path / "hf", state, ".bin")),
            "hf: holds 2 of 2 shards, but not their index, pytorch_model.bin.index.json",
        ),
        "a pickled index that leaves its folder": (
            lambda state, path: indexed(path / "hf", ".bin", "/etc/passwd.bin"),
            "names the shard '/etc/passwd.bin'; expected the name of a .bin file",
        ),
        "a pickled index that names a safetensors shard": (
            lambda state, path: indexed(path / "hf", ".bin", "x.safetensors"),
            "expected the name of a .bin file",
        ),
        "a pickled index that contradicts its shards": (
            lambda state, path: indexed(path / "hf", ".bin", "pytorch_model-00002-of-00002.bin").parent,
            "'layers.0.bias' is not in pytorch_model-00002-of-00002.bin; pytorch_model-00001-of-00002.bin has "
            "'layers.0.bias', which is listed in pytorch_model-00002-of-00002.bin",
        ),
        "a pickled index that is not JSON": (
            lambda state, path: written(path / "pytorch_model.bin.index.json", b"?").parent,
            "not an index of bin shards",
        ),
    },
    WeightFileError: {
        "a torch file by the name of another": (
            lambda state, path: saved(path / "c.pt", state).rename(path / "c.safetensors"),
            "c.safetensors: a zip file, like those that torch.save writes, not a safetensors file. Give it a name that",
        ),
        "an adapter beside a pickled model": (
            lambda state, path: (
                written(saved(path / "pytorch_model.bin", state).with_name("adapter_config.json"), b"").parent
            ),
            "holds a PEFT adapter (adapter_config.json) beside pytorch_model.bin, and transformers would load both",
        ),
        "a broken safetensors file": (lambda state, path: written(path / "c.safetensors", b"123"), "too few"),
        "a missing shard": (
            lambda state, path: changed_shards(path / "hf", ".safetensors", Path.unlink),
            "names the shard model-00002-of-00002.safetensors, which is missing",
        ),
        "a shard that is cut off": (
            lambda state, path: changed_shards(path / "hf", ".safetensors", cut),
            "it is truncated",
        ),
        "shards whose index is lost": (
            lambda state, path: without_index(saved_shards(path / "hf", state, ".safetensors")),
            "hf: holds 2 of 2 shards, but not their index, model.safetensors.index.json",
        ),
        "an index that leaves its folder": (
            lambda state, path: indexed(path / "hf", ".safetensors", "../v.safetensors"),
            "names the shard '../v.safetensors'; expected the name of a .safetensors file in the index's folder",
        ),
    },
    WeightsMismatch: {
        "a shard": (
            lambda state, path: saved_safetensors(path / "model-00001-of-00002.safetensors", {"layers.0.weight": X}),
            "It is one of 2 shards: give their index, or their folder.",
        ),
        "a model with the model in it": (
            lambda state, path: nn.ModuleDict({"net": Renamed()}),
            "the names of the graph are those of its part 'net'\nGive that part of the model instead: model.net.",
        ),
        "another model": (lambda state, path: nn.Linear(3, 3), "weight: unexpected"),
        "another size": (
            lambda state, path: more(state, layers_0_bias=torch.zeros(4)),
            "layers.0.bias: expected F32[3], found F32[4]",
        ),
        "another size below model": (
            lambda state, path: saved(path / "c.pt", whole(more(state, layers_0_bias=torch.zeros(4)))),
            "c.pt, model: refused, 1 problem\n  - layers.0.bias: expected F32[3], found F32[4]",
        ),
        "more below model": (
            lambda state, path: whole(more(state, more=torch.zeros(1))),
            "model: refused, 1 problem\n  - more: unexpected",
        ),
        "a tensor that is no plain one": (
            lambda state, path: {**state, "layers.0.weight": Sum(torch.zeros(3, 3), torch.zeros(3, 3))},
            "layers.0.weight: the graph has a plain tensor, the checkpoint has Sum(note=None)",
        ),
        "two keys for one weight": (
            lambda state, path: saved_safetensors(path / "c.safetensors", more(state, module_layers_0_weight=X)),
            "module.layers.0.weight: unexpected",
        ),
    },
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("error", "make", "says"), by_error(BAD))
def test_bad_sources_are_refused_with_a_reason(
    error: type[Exception],
    make: Callable[[State, Path], Any],
    says: str,
    renamed: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(error, says, make(Renamed().state_dict(), tmp_path), renamed, tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_weight_that_no_checkpoint_key_provides_is_said_by_servers_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    old = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    with pytest.warns(UserWarning, match="no checkpoint key provides"):
        artifact = export(model, (X,), out=tmp_path / "a", checkpoint=old)
    file = saved_safetensors(tmp_path / "old.safetensors", old)
    with pytest.raises(WeightsMismatch, match=r"No checkpoint key provides 1\.num_batches_tracked: .*pack the model"):
        load(artifact, file)
    pack(old, artifact, out=tmp_path / "v.safetensors", model=model)  # the advice
    assert torch.equal(load(artifact, tmp_path / "v.safetensors")(X), model(X))


def fill(model: nn.Module, saved: State) -> None:
    state = saved.get("model", saved)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name.replace(".layer.", ".")])


DAMAGED: dict[str, tuple[Callable[[Path, State], Path], str, str]] = {
    "a .pt": (lambda path, state: saved(path / "c.pt", whole(state)), "c.pt", "c.pt: damaged: the CRC-32 of data/"),
    "pickled shards": (
        lambda path, state: saved_shards(path / "hf", state, ".bin"),
        "*-00001-*",
        "pytorch_model-00001-of-00002.bin: damaged: the CRC-32 of data/",
    ),
    "distributed": (
        lambda path, state: saved_distributed(path / "dcp", whole(state)),
        "*.distcp",
        "__0_0.distcp: the chunk of model.layers.0.bias at byte",
    ),
}


@pytest.mark.parametrize(("make", "name", "says"), DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("piece", [1 << 20, 5], ids=["whole", "in pieces"])
def test_a_bit_that_is_not_as_it_was_written_is_found_before_anything_is_written(
    make: Callable[[Path, State], Path],
    name: str,
    says: str,
    piece: int,
    renamed: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = Renamed().state_dict()
    source = make(tmp_path, state)
    monkeypatch.setattr(torch_files, "PIECE", piece)
    (path,) = [source] if source.is_file() else source.glob(name)
    assert pack(source, renamed, out=tmp_path / "good.safetensors").level in {"", "model"}
    flipped(path, state["layers.0.bias"])
    for code in ({}, {"model": Renamed(), "load": fill}):
        message = refuses(CheckpointError, "CRC-32", source, renamed, tmp_path, **code)
        assert message.count(says) == 1


@pytest.mark.parametrize("make", [*[row[0] for row in DAMAGED.values()]], ids=DAMAGED)
def test_files_without_check_sums_are_taken(
    make: Callable[[Path, State], Path], renamed: Artifact, tmp_path: Path
) -> None:
    model = Renamed()
    torch.serialization.set_crc32_options(False)
    try:
        source = make(tmp_path, model.state_dict())
    finally:
        torch.serialization.set_crc32_options(True)
    assert weights_id(source, renamed, tmp_path) == weights_id(model, renamed, tmp_path)


def test_each_storage_is_checked_once(renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []

    def watch(fd: int, record: object, where: str, begin: int = 0) -> bool:
        checked.append(record)
        return False

    monkeypatch.setattr(torch_files, "is_damaged", watch)
    path = saved(tmp_path / "c.pt", {"model": one_storage(Renamed().state_dict()), "unused": torch.ones(9)})
    weights_id(path, renamed, tmp_path)
    assert len(checked) == len(set(checked)) == 2  # the description of the tensors, and what they share


def test_storages_in_another_order_than_described_are_noticed(
    renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted_storages = torch_files._noted_storages

    @contextmanager
    def backwards() -> Iterator[list[torch.UntypedStorage]]:
        with noted_storages() as noted:
            yield noted
            noted.reverse()

    monkeypatch.setattr(torch_files, "_noted_storages", backwards)
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    refuses(CheckpointError, "torch has read other tensors than it describes", path, renamed, tmp_path)


def test_damage_to_the_description_of_tensors_is_found(renamed: Artifact, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"HalfStorage\0"))
    refuses(CheckpointError, "c.pt: damaged: the CRC-32 of data.pkl does not match", path, renamed, tmp_path)


def rewritten_in_disguise(path: Path) -> None:
    """Its size, inode and time of modification are as before."""
    in_place(path, saved(path.with_name("d.pt"), Renamed().state_dict()).read_bytes().replace(b"d/", b"c/"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: saved(path, {**Renamed().state_dict(), "longer": torch.zeros(100)}),
    "rewritten in disguise": rewritten_in_disguise,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_checkpoint_that_changes_while_it_is_packed_is_refused(
    change: Callable[[Path], object], renamed: Artifact, tmp_path: Path
) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    says = "c.pt: was written to, replaced, renamed or linked while it was read"
    refuses(CheckpointError, says, path, renamed, tmp_path, progress=lambda *_: change(path))


@pytest.mark.parametrize("form", ["file", "shard", "model"])
def test_a_weight_file_does_not_take_the_place_of_its_checkpoint(form: str, renamed: Artifact, tmp_path: Path) -> None:
    source = out = saved(tmp_path / "pytorch_model.bin", Renamed().state_dict())
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match="would replace the checkpoint"):
        pack(tmp_path if form == "shard" else source, renamed, out=out, model=Renamed() if form == "model" else None)
    assert out.read_bytes() == before


def test_a_weight_file_does_not_take_the_place_of_a_file_of_its_artifact(renamed: Artifact, tmp_path: Path) -> None:
    copied = Artifact.open(shutil.copytree(renamed.folder, tmp_path / "a"))
    for name in ("manifest.json", *renamed.manifest.files):
        with pytest.raises(CheckpointError, match="would replace a file of the artifact"):
            pack(Renamed(), copied, out=copied.folder / name)
    copied.verify()
    pack(Renamed(), copied, out=copied.folder / "weights.safetensors")


def test_ties_of_a_file_are_known_without_reading_it_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Everything().eval()
    artifact = export(model, (torch.zeros(2, 1, 5, 5),), out=tmp_path / "a.artifact")
    expected = weights_id(model, artifact, tmp_path)
    monkeypatch.setattr(packing, "digest_of", None)
    assert weights_id(saved(tmp_path / "c.pt", model.state_dict()), artifact, tmp_path) == expected


def test_tensors_are_located_in_their_file(tmp_path: Path) -> None:
    """By the order in which torch asks for their storages, of which it asks for empty ones again and again."""
    none, both = torch.zeros(0), torch.arange(6.0)
    state = {"none": none, "half": both[3:], "none again": none[:0], "both": both, "seven": torch.full((7,), 7)}
    path = saved(tmp_path / "c.pt", state)
    with torch_files.open_pickled(path, Files()) as opened:
        found = {name: opened.values_of(tensor) for name, tensor in opened.tree.items()}
    assert found["none"].offset is None
    for name in ("half", "both", "seven"):
        offset, content = found[name].offset, state[name].numpy().tobytes()
        assert offset
        assert path.read_bytes()[offset : offset + len(content)] == content


@pytest.mark.parametrize("kind", ["state dict", ".pt"])
def test_conjugate_and_negative_views_are_packed_by_value(kind: str, tmp_path: Path) -> None:
    values = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    views = {"conj": values.conj(), "adjoint": values.clone().adjoint(), "neg": values.clone().conj().imag}
    model = Does(lambda m, x: x * 2, **{name: nn.Parameter(value.clone()) for name, value in views.items()})
    artifact = export(model, (torch.ones(3),), out=tmp_path / "a.artifact")
    source = views if kind == "state dict" else saved(tmp_path / "c.pt", views)
    assert weights_id(source, artifact, tmp_path) == weights_id(model, artifact, tmp_path)


def test_a_file_that_is_open_for_writing_is_refused(renamed: Artifact, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    with path.open("r+b"):
        refuses(CheckpointError, "is open for writing", path, renamed, tmp_path)
    weights_id(path, renamed, tmp_path)
