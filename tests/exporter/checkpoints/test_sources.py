"""Trainers' files and folders, with the weights at the top or deeper: they pack to the same bytes, or are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import (
    flipped,
    saved,
    saved_distributed,
    saved_folder,
    saved_safetensors,
    saved_shards,
    tensors,
)
from tests.support.composed import Sum
from tests.support.file_queue_rig import in_place
from tests.support.models import Renamed
from weightswap_exporter import export, pack
from weightswap_exporter.checkpoints import torch_files
from weightswap_exporter.checkpoints.tensor import Files
from weightswap_runtime import Artifact, CheckpointError, WeightFileError, WeightsMismatch, WeightswapError

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
State = dict[str, Any]


@pytest.fixture
def renamed(tmp_path: Path) -> Artifact:
    return export(Renamed().eval(), (X,), out=tmp_path / "renamed.artifact")


def whole(state: State) -> State:
    """Return a state dict with other entries of a trainer beside it."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, 3)}}, "param_groups": [{"lr": 0.1}]}
    return {"model": state, "optimizer": optimizer, "epoch": 3, "loss": torch.tensor(0.5)}


def lightning(state: State) -> State:
    return {"epoch": 1, "state_dict": {f"model.{key}": value for key, value in tensors(state).items()}, "loops": {}}


def below(folder: Path, name: str) -> Path:
    (folder / "below").mkdir()
    return folder / "below" / name


SOURCES: dict[str, tuple[str, Callable[[State, Path], object]]] = {
    "a trainer's dict": ("model", lambda state, path: whole(state)),
    "a trainer's .pt": ("model", lambda state, path: saved(path / "c.pt", whole(state))),
    "Lightning's .ckpt": ("state_dict", lambda state, path: saved(path / "c.ckpt", lightning(state))),
    "below model_state_dict": ("model_state_dict", lambda state, path: {"model_state_dict": state}),
    "DeepSpeed's module": ("module", lambda state, path: {"module": state}),
    "two levels": ("state_dict.model", lambda state, path: {"state_dict": {"model": state, "lr": 1}}),
    "the same below two names": ("state_dict", lambda state, path: {"model": state, "state_dict": dict(state)}),
    "a transposed tensor": (
        "",
        lambda state, path: saved(
            path / "c.pt", {key: value.t().contiguous().t() for key, value in tensors(state).items()}
        ),
    ),
    "views of one storage": (
        "",
        lambda state, path: saved(path / "c.pt", one_storage(state)),
    ),
    "shards": ("", lambda state, path: saved_shards(path / "hf", state, ".safetensors")),
    "an index of shards": (
        "",
        lambda state, path: saved_shards(path / "hf", state, ".safetensors") / "model.safetensors.index.json",
    ),
    "a folder": ("", lambda state, path: saved_folder(path / "hf", state, ".safetensors")),
    "pickled shards": ("", lambda state, path: saved_shards(path / "hf", state, ".bin")),
    "an index of pickled shards": (
        "",
        lambda state, path: saved_shards(path / "hf", state, ".bin") / "pytorch_model.bin.index.json",
    ),
    "a folder with a pickle": ("", lambda state, path: saved_folder(path / "hf", state, ".bin")),
    "distributed": ("", lambda state, path: saved_distributed(path / "dcp", tensors(state))),
    "distributed, with an optimizer": ("model", lambda state, path: saved_distributed(path / "dcp", whole(state))),
    "distributed, its metadata": (
        "state_dict.model",
        lambda state, path: (
            saved_distributed(path / "dcp", {"state_dict": {"model": state, "ema": torch.zeros(1)}}) / ".metadata"
        ),
    ),
}


def one_storage(state: State) -> State:
    flat = torch.cat([value.flatten() for value in tensors(state).values()])
    sizes = [value.numel() for value in tensors(state).values()]
    parts = zip(tensors(state).items(), flat.split(sizes), strict=True)
    return {key: part.view(value.shape) for (key, value), part in parts}


@pytest.mark.parametrize(("level", "make"), SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_file(
    level: str, make: Callable[[State, Path], Any], renamed: Artifact, tmp_path: Path
) -> None:
    model = Renamed()
    expected = pack(model, renamed, out=tmp_path / "expected.safetensors")
    done: list[tuple[int, int]] = []
    source = make(model.state_dict(), tmp_path)
    packed = pack(source, renamed, out=tmp_path / "v.safetensors", progress=lambda *args: done.append(args))
    assert packed.path.read_bytes() == expected.path.read_bytes()
    assert packed.level == level
    assert done[-1] == (96, 96)


def escaping(folder: Path, suffix: str, target: str) -> Path:
    saved_shards(folder, Renamed().state_dict(), suffix)
    (index,) = folder.glob("*.index.json")
    document = json.loads(index.read_text())
    document["weight_map"]["layers.0.bias"] = target
    index.write_text(json.dumps(document))
    return index


def without_shard(folder: Path, suffix: str) -> Path:
    saved_shards(folder, Renamed().state_dict(), suffix)
    next(folder.glob("*-00002-*")).unlink()
    return folder


def cut_shard(folder: Path, suffix: str) -> Path:
    saved_shards(folder, Renamed().state_dict(), suffix)
    shard = next(folder.glob("*-00002-*"))
    shard.write_bytes(shard.read_bytes()[:-40])
    return folder


def without_index(folder: Path) -> Path:
    next(folder.glob("*.index.json")).unlink()
    return folder


def listing_more(folder: Path) -> Path:
    index = escaping(folder, ".bin", "pytorch_model-00002-of-00002.bin")
    return index.parent


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("?")
    return folder


def two(state: State) -> State:
    return {"model": state, "state_dict": {key: value + 1 for key, value in tensors(state).items()}}


def fighting(state: State) -> State:
    return tensors(state) | {"module.layers.0.weight": torch.ones(3, 3)}


def small(state: State) -> State:
    return {**tensors(state), "layers.0.bias": torch.zeros(4)}


BAD: dict[str, tuple[Callable[[State, Path], object], type[WeightswapError], str]] = {
    "two levels that fit": (
        lambda state, path: two(state),
        WeightsMismatch,
        "'state_dict' and 'model' both fit, with different values",
    ),
    "another size below model": (
        lambda state, path: saved(path / "c.pt", whole(small(state))),
        WeightsMismatch,
        "c.pt, model: refused, 1 problem\n  - layers.0.bias: expected F32[3], found F32[4]",
    ),
    "another architecture below model": (
        lambda state, path: whole({"linear.weight": torch.zeros(2, 2)}),
        WeightsMismatch,
        "linear.weight: unexpected",
    ),
    "more below model": (
        lambda state, path: whole({**tensors(state), "more": torch.zeros(1)}),
        WeightsMismatch,
        "model: refused, 1 problem\n  - more: unexpected",
    ),
    "sparse below model": (
        lambda state, path: whole({**tensors(state), "layers.0.weight": torch.eye(3).to_sparse()}),
        CheckpointError,
        "the state dict, model: layers.0.weight: torch.float32 torch.sparse_coo cannot be written as safetensors",
    ),
    "a tensor that is no plain one": (
        lambda state, path: {**state, "layers.0.weight": Sum(torch.zeros(3, 3), torch.zeros(3, 3))},
        WeightsMismatch,
        "layers.0.weight: the graph has a plain tensor, the checkpoint has Sum(note=None)",
    ),
    "two keys for one weight": (
        lambda state, path: saved_safetensors(path / "c.safetensors", fighting(state)),
        WeightsMismatch,
        "module.layers.0.weight: unexpected",
    ),
    "a number as a key": (lambda state, path: {1: torch.zeros(1)}, CheckpointError, "has the key 1"),
    "a folder of something else": (
        lambda state, path: filled(path / "f", "a.txt", "b.txt"),
        CheckpointError,
        "no checkpoint in this folder (it holds a.txt, b.txt); expected .metadata",
    ),
    "an empty folder": (lambda state, path: filled(path / "f"), CheckpointError, "(it is empty)"),
    "a missing shard": (
        lambda state, path: without_shard(path / "hf", ".safetensors"),
        WeightFileError,
        "names the shard model-00002-of-00002.safetensors, which is missing",
    ),
    "a missing pickled shard": (
        lambda state, path: without_shard(path / "hf", ".bin"),
        CheckpointError,
        "names the shard pytorch_model-00002-of-00002.bin, which is missing",
    ),
    "a shard that is cut off": (
        lambda state, path: cut_shard(path / "hf", ".safetensors"),
        WeightFileError,
        "it is truncated",
    ),
    "a pickled shard that is cut off": (
        lambda state, path: cut_shard(path / "hf", ".bin"),
        CheckpointError,
        "pytorch_model-00002-of-00002.bin: cut off: the end of the zip file is missing",
    ),
    "pickled shards whose index is lost": (
        lambda state, path: without_index(saved_shards(path / "hf", state, ".bin")),
        CheckpointError,
        "hf: holds 2 of 2 shards, but not their index, pytorch_model.bin.index.json",
    ),
    "shards whose index is lost": (
        lambda state, path: without_index(saved_shards(path / "hf", state, ".safetensors")),
        WeightFileError,
        "hf: holds 2 of 2 shards, but not their index, model.safetensors.index.json",
    ),
    "an index that leaves its folder": (
        lambda state, path: escaping(path / "hf", ".safetensors", "../v.safetensors"),
        WeightFileError,
        "names the shard '../v.safetensors'; expected the name of a .safetensors file in the index's folder",
    ),
    "a pickled index that leaves its folder": (
        lambda state, path: escaping(path / "hf", ".bin", "/etc/passwd.bin"),
        CheckpointError,
        "names the shard '/etc/passwd.bin'; expected the name of a .bin file",
    ),
    "a pickled index that names a safetensors shard": (
        lambda state, path: escaping(path / "hf", ".bin", "x.safetensors"),
        CheckpointError,
        "expected the name of a .bin file",
    ),
    "a pickled index that contradicts its shards": (
        lambda state, path: listing_more(path / "hf"),
        CheckpointError,
        "'layers.0.bias' is not in pytorch_model-00002-of-00002.bin; pytorch_model-00001-of-00002.bin has "
        "'layers.0.bias', which is listed in pytorch_model-00002-of-00002.bin",
    ),
    "a pickled index that is not JSON": (
        lambda state, path: filled(path / "f", "pytorch_model.bin.index.json"),
        CheckpointError,
        "not an index of bin shards",
    ),
}


@pytest.mark.parametrize(("make", "error", "says"), BAD.values(), ids=BAD)
def test_bad_sources_are_refused_with_a_reason(
    make: Callable[[State, Path], Any], error: type[WeightswapError], says: str, renamed: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(error) as refused:
        pack(make(Renamed().state_dict(), tmp_path), renamed, out=tmp_path / "out" / "v.safetensors")
    assert says in str(refused.value)
    assert not list((tmp_path / "out").iterdir())


def fill(model: torch.nn.Module, state: State) -> None:
    for name, parameter in model.named_parameters():
        key = name.replace(".layer.", ".")
        parameter.data.copy_(state[key] if key in state else state[f"model.{key}"])


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
@pytest.mark.parametrize("small", [False, True], ids=["whole", "in pieces"])
def test_a_bit_that_is_not_as_it_was_written_is_found_before_anything_is_written(
    make: Callable[[Path, State], Path],
    name: str,
    says: str,
    small: bool,
    renamed: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = Renamed().state_dict()
    source = make(tmp_path, state)
    if small:
        monkeypatch.setattr("weightswap_exporter.checkpoints.torch_files.PIECE", 5)
    (path,) = [source] if source.is_file() else source.glob(name)
    (tmp_path / "out").mkdir()
    assert pack(source, renamed, out=tmp_path / "good.safetensors").level in {"", "model"}
    flipped(path, state["layers.0.bias"])
    code: dict[str, Any] = {"model": Renamed(), "load": lambda model, saved: fill(model, saved.get("model", saved))}
    for arguments in ({}, code):
        with pytest.raises(CheckpointError, match="CRC-32") as refused:
            pack(source, renamed, out=tmp_path / "out" / "v.safetensors", **arguments)
        assert str(refused.value).count(says) == 1
    assert not list((tmp_path / "out").iterdir())


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
    packed = pack(source, renamed, out=tmp_path / "v.safetensors")
    assert packed.weights_id == pack(model, renamed, out=tmp_path / "w.safetensors").weights_id


def test_each_storage_is_checked_once(renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []

    def watch(fd: int, record: object, where: str, begin: int = 0) -> bool:
        checked.append(record)
        return False

    monkeypatch.setattr(torch_files, "is_damaged", watch)
    path = saved(tmp_path / "c.pt", {"model": one_storage(Renamed().state_dict()), "unused": torch.ones(9)})
    pack(path, renamed, out=tmp_path / "v.safetensors")
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
    with pytest.raises(CheckpointError, match=r"torch has read other tensors than it describes"):
        pack(path, renamed, out=tmp_path / "v.safetensors")


def test_damage_to_the_description_of_tensors_is_found(renamed: Artifact, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"HalfStorage\0"))
    with pytest.raises(CheckpointError, match=r"c\.pt: damaged: the CRC-32 of data\.pkl does not match"):
        pack(path, renamed, out=tmp_path / "v.safetensors")


def test_a_checkpoint_that_changes_while_it_is_packed_is_refused(renamed: Artifact, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())

    def overwrite(done: int, total: int) -> None:
        saved(path, {**Renamed().state_dict(), "longer": torch.zeros(100)})

    with pytest.raises(CheckpointError, match=r"c\.pt: was written to, replaced, renamed or linked while it was read"):
        pack(path, renamed, out=tmp_path / "v.safetensors", progress=overwrite)
    assert not list(tmp_path.glob("*v.safetensors*"))


def test_a_checkpoint_that_is_rewritten_in_disguise_while_it_is_packed_is_refused(
    renamed: Artifact, tmp_path: Path
) -> None:
    """Its size, inode and time of modification are as before."""
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    other = saved(tmp_path / "d.pt", Renamed().state_dict()).read_bytes().replace(b"d/", b"c/")

    def overwrite(done: int, total: int) -> None:
        in_place(path, other)

    with pytest.raises(CheckpointError, match="while it was read"):
        pack(path, renamed, out=tmp_path / "v.safetensors", progress=overwrite)


@pytest.mark.parametrize("form", ["file", "shard", "model"])
def test_a_weight_file_does_not_take_the_place_of_its_checkpoint(form: str, renamed: Artifact, tmp_path: Path) -> None:
    source = out = saved(tmp_path / "pytorch_model.bin", Renamed().state_dict())
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match="would replace the checkpoint"):
        pack(tmp_path if form == "shard" else source, renamed, out=out, model=Renamed() if form == "model" else None)
    assert out.read_bytes() == before


def test_ties_of_a_file_are_known_without_reading_it_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.models import Everything
    from weightswap_exporter import packing

    model = Everything().eval()
    artifact = export(model, (torch.zeros(2, 1, 5, 5),), out=tmp_path / "a.artifact")
    path = saved(tmp_path / "c.pt", model.state_dict())
    monkeypatch.setattr(packing, "digest_of", None)
    packed = pack(path, artifact, out=tmp_path / "v.safetensors")
    assert packed.weights_id == pack(model, artifact, out=tmp_path / "w.safetensors").weights_id


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


def test_a_pickle_of_another_byte_order_is_refused(renamed: Artifact, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        path = saved(tmp_path / "c.pt", Renamed().state_dict())
    with pytest.raises(CheckpointError, match="another byte order"):
        pack(path, renamed, out=tmp_path / "v.safetensors")


@pytest.mark.parametrize("kind", ["state dict", ".pt"])
def test_conjugate_and_negative_views_are_packed_by_value(kind: str, tmp_path: Path) -> None:
    values = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    views = {"conj": values.conj(), "adjoint": values.clone().adjoint(), "neg": values.clone().conj().imag}
    model = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in views.items()})
    artifact = export(Holder(model), (torch.ones(3),), out=tmp_path / "a.artifact")
    state: Any = {f"inner.{name}": value for name, value in views.items()}
    if kind == ".pt":
        torch.save(state, tmp_path / "c.pt")
    packed = pack(state if kind == "state dict" else tmp_path / "c.pt", artifact, out=tmp_path / "v.safetensors")
    assert packed.weights_id == pack(Holder(model), artifact, out=tmp_path / "w.safetensors").weights_id


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_file_that_is_open_for_writing_is_refused(renamed: Artifact, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Renamed().state_dict())
    with path.open("r+b"), pytest.raises(CheckpointError, match="is open for writing"):
        pack(path, renamed, out=tmp_path / "v.safetensors")
    pack(path, renamed, out=tmp_path / "v.safetensors")
