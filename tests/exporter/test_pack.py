"""Packing: every kind of source gives the same weight file; everything else is refused with a reason."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.checkpoints import saved, saved_before_zip, saved_safetensors, tensors
from tests.support.models import Everything, Renamed
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, CheckpointError, WeightFileError, WeightsMismatch, load

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def renamed(tmp_path: Path) -> Artifact:
    return export(Renamed().eval(), (X,), out=tmp_path / "renamed.artifact")


SOURCES: dict[str, Callable[[Renamed, Path], object]] = {
    "module": lambda model, path: model,
    "state dict": lambda model, path: model.state_dict(),
    "named parameters": lambda model, path: dict(model.named_parameters()),
    ".pt": lambda model, path: saved(path / "c.pt", model.state_dict()),
    "torch's old examples' .pth.tar": lambda model, path: saved(path / "c.pth.tar", {"state_dict": model.state_dict()}),
    ".bin": lambda model, path: saved(path / "c.bin", tensors(model.state_dict())),
    "old .pth": lambda model, path: saved_before_zip(path / "c.pth", tensors(model.state_dict())),
    ".safetensors with checkpoint keys": lambda model, path: saved_safetensors(
        path / "c.safetensors", model.state_dict()
    ),
    ".safetensors with FQNs": lambda model, path: saved_safetensors(
        path / "f.safetensors", dict(model.named_parameters())
    ),
}


class Resized(nn.Module):
    """State, a constant, and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("none", torch.zeros(0))
        self.constant = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.linear(x) + self.constant + self.seen + self.none.sum()


def test_a_models_tensors_can_be_resized_afterwards(tmp_path: Path) -> None:
    model = Resized().eval()
    pack(model, export(model, (X,), out=tmp_path / "a", goldens=[((X,), {})]), out=tmp_path / "w.safetensors")
    for tensor in (X, model.constant, *model.state_dict().values()):
        assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_file(
    make: Callable[[Renamed, Path], Any], renamed: Artifact, tmp_path: Path
) -> None:
    model = Renamed().eval()
    pack(model, renamed, out=tmp_path / "expected.safetensors", labels={"step": "7"})
    done: list[tuple[int, int]] = []
    packed = pack(
        make(model, tmp_path),
        str(renamed.path),
        out=tmp_path / "v.safetensors",
        labels={"step": 7},
        progress=lambda *args: done.append(args),
    )
    assert (tmp_path / "v.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert (packed.graph_id, packed.labels, packed.nbytes) == (renamed.graph_id, {"step": "7"}, 96)
    assert done[-1] == (96, 96)
    served = load(renamed, packed.path)
    assert served.weights_id == packed.weights_id
    assert served.labels == {"step": "7"}
    assert torch.equal(served(X), model(X))


def test_a_packed_file_is_a_source_too(renamed: Artifact, tmp_path: Path) -> None:
    first = pack(Renamed(), renamed, out=tmp_path / "one.safetensors")
    assert pack(first.path, renamed, out=tmp_path / "two.safetensors").weights_id == first.weights_id


def test_a_checkpoint_with_its_own_keys_swaps_in_without_packing(renamed: Artifact, tmp_path: Path) -> None:
    model = Renamed().eval()
    path = saved_safetensors(tmp_path / "c.safetensors", model.state_dict())
    assert torch.equal(load(renamed, path)(X), model(X))


def test_ties_are_stored_once_and_may_come_under_any_name(tmp_path: Path) -> None:
    model = Everything().eval()
    artifact = export(model, (torch.zeros(2, 1, 5, 5),), out=tmp_path / "a.artifact")
    packed = pack(model.state_dict(), artifact, out=tmp_path / "v.safetensors")
    assert "head.weight" not in safetensors.torch.load_file(packed.path)
    state = model.state_dict()
    del state["embed.weight"]
    assert pack(state, artifact, out=tmp_path / "w.safetensors").weights_id == packed.weights_id
    state["embed.weight"] = state["head.weight"] + 1
    with pytest.raises(WeightsMismatch, match=r"embed.weight and head.weight are one tensor"):
        pack(state, artifact, out=tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


class Arbitrary:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def cut(path: Path) -> Path:
    whole = saved(path / "c.pt", Renamed().state_dict()).read_bytes()
    return written(path / "c.pt", whole[: len(whole) // 2])


def archived(path: Path, mode: Any) -> Path:
    with tarfile.open(path, mode) as archive:
        archive.add(saved(path.parent / "inside.pt", Renamed().state_dict()), "inside.pt")
    return path


def wide() -> dict[str, torch.Tensor]:
    return {**tensors(Renamed().state_dict()), "layers.0.bias": torch.zeros(4)}


BAD: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "nothing there": (lambda path: path / "nowhere.pt", CheckpointError, "no such file"),
    "another suffix": (lambda path: saved(path / "c.onnx", {}), CheckpointError, "unknown kind of checkpoint"),
    "arbitrary objects": (lambda path: saved(path / "c.pt", {"a": Arbitrary()}), CheckpointError, "could run any code"),
    "arbitrary objects, the way out": (
        lambda path: saved(path / "c.pt", {"a": Arbitrary()}),
        CheckpointError,
        "unpickle it yourself: pack(torch.load(path, weights_only=False), artifact, out=...)",
    ),
    "not a pickle": (
        lambda path: written(path / "c.pt", b"hello"),
        CheckpointError,
        "c.pt: not a checkpoint that torch.load can open",
    ),
    "an empty file": (lambda path: written(path / "c.pt", b""), CheckpointError, "c.pt: the file is empty. Save it"),
    "a cut off file": (cut, CheckpointError, "c.pt: cut off: the end of the zip file is missing. Save it again"),
    "an old file that is cut off": (
        lambda path: written(path / "d.pt", saved_before_zip(path / "c.pt", {"a": torch.ones(9)}).read_bytes()[:150]),
        CheckpointError,
        "d.pt: not a checkpoint that torch.load can open: cut off, damaged, or something else (",
    ),
    "a git-lfs pointer": (
        lambda path: written(path / "c.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        CheckpointError,
        "c.pt: a git-lfs pointer, not the file itself. Fetch the file: git lfs pull",
    ),
    "a web page": (
        lambda path: written(path / "c.pt", b"\n<!DOCTYPE html>\n<html>"),
        CheckpointError,
        "c.pt: a web page (HTML or XML), as a server answers instead of a file. Download the file itself",
    ),
    "a tar archive": (
        lambda path: archived(path / "c.pth.tar", "w"),
        CheckpointError,
        "c.pth.tar: a tar archive. Unpack it, and give the checkpoint that is in it",
    ),
    "a compressed file": (
        lambda path: archived(path / "c.pt", "w:gz"),
        CheckpointError,
        "c.pt: a compressed file. Unpack it, and give the checkpoint that is in it",
    ),
    "a safetensors file": (
        lambda path: saved_safetensors(path / "c.safetensors", Renamed().state_dict()).rename(path / "c.pt"),
        CheckpointError,
        "c.pt: a safetensors file, by its content. Give it a name that ends with .safetensors",
    ),
    "a nested tensor": (
        lambda path: saved(path / "c.pt", {"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)}),
        CheckpointError,
        "c.pt: w: a nested tensor (torch.nested) cannot be written as safetensors",
    ),
    "a jagged tensor": (
        lambda path: {"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)},
        CheckpointError,
        "w: a nested tensor (torch.nested) cannot be written as safetensors",
    ),
    "a file of a jagged tensor": (
        lambda path: saved(path / "c.pt", {"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}),
        CheckpointError,
        "c.pt: a nested tensor (torch.nested) cannot be written as safetensors",
    ),
    "a GGUF file": (
        lambda path: written(path / "c.pt", b"GGUF\3" + bytes(99)),
        CheckpointError,
        "c.pt: a GGUF file, as llama.cpp reads. Give the checkpoint that it was made of",
    ),
    "an HDF5 file": (
        lambda path: written(path / "c.bin", b"\x89HDF\r\n\x1a\n" + bytes(99)),
        CheckpointError,
        "c.bin: an HDF5 file, as Keras writes. Give a checkpoint of the PyTorch model",
    ),
    "an ONNX file": (
        lambda path: written(path / "c.pt", b"\x08\x0a\x12\x07pytorch\x1a\x03" + bytes(99)),
        CheckpointError,
        "c.pt: an ONNX file, a graph. Give a checkpoint of the PyTorch model that it was made of",
    ),
    "a torch file by the name of another": (
        lambda path: saved(path / "c.pt", Renamed().state_dict()).rename(path / "c.safetensors"),
        WeightFileError,
        "c.safetensors: a zip file, like those that torch.save writes, not a safetensors file. Give it a name that "
        "ends with .pt, and pack it",
    ),
    "an adapter of old": (
        lambda path: saved(path / "adapter_model.bin", {"w": torch.ones(1)}).parent,
        CheckpointError,
        "holds adapter_model.bin, a PEFT adapter and not a model's weights. Merge it into the model first",
    ),
    "a shard": (
        lambda path: saved_safetensors(path / "model-00001-of-00002.safetensors", {"layers.0.weight": torch.eye(3)}),
        WeightsMismatch,
        "It is one of 2 shards: give their index, or their folder.",
    ),
    "a model with the model in it": (
        lambda path: nn.ModuleDict({"net": Renamed()}),
        WeightsMismatch,
        "the names of the graph are those of its part 'net'\nGive that part of the model instead: model.net.",
    ),
    "a list": (lambda path: saved(path / "c.pt", [1]), CheckpointError, "holds a list, expected a state dict"),
    "nested": (
        lambda path: {"weights": Renamed().state_dict(), "epoch": 1},
        CheckpointError,
        "holds no tensors where a state dict is expected. It has 'weights' (4 tensors): pass level='weights'",
    ),
    "meta tensors": (lambda path: Renamed().to("meta").state_dict(), CheckpointError, "has no values"),
    "sparse": (lambda path: {"layers.0.weight": torch.eye(3).to_sparse()}, CheckpointError, "cannot be written"),
    "another model": (lambda path: nn.Linear(3, 3), WeightsMismatch, "weight: unexpected"),
    "another size": (lambda path: wide(), WeightsMismatch, "layers.0.bias: expected F32[3], found F32[4]"),
    "a broken safetensors file": (lambda path: written(path / "c.safetensors", b"123"), WeightFileError, "too few"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "error", "says"), BAD.values(), ids=BAD)
def test_bad_sources_are_refused_with_a_reason(
    make: Callable[[Path], Any], error: type[Exception], says: str, renamed: Artifact, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as refused:
        pack(make(tmp_path), renamed, out=tmp_path / "v.safetensors")
    assert says in str(refused.value)
    assert not (tmp_path / "v.safetensors").exists()
    assert not (tmp_path / "executed").exists()


def test_pickling_arbitrary_objects_would_have_run_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Arbitrary()))
    assert (tmp_path / "executed").exists()


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
