"""Goldens beside packed weights: both files change together, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import saved
from tests.support.goldens import IMAGE, goldens_at, verified
from tests.support.models import Everything
from tests.support.setups import different
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, CheckpointError, ParityError, Unsupported, WeightFile, WeightsMismatch, load
from weightswap_runtime.format.goldens import goldens_beside


class Packing:
    """An artifact, its model, and weights with goldens that are there already."""

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        self.model, self.artifact = different(Everything, 1), artifact
        self.out = folder / "v1.safetensors"
        self.beside = folder / "v1.goldens.safetensors"
        self.pack(goldens=[(IMAGE,)])
        self.before = self.files()
        self.newer = different(Everything, 2)

    def pack(self, source: Any = None, **options: Any) -> Any:
        return pack(self.model if source is None else source, self.artifact, out=self.out, **options)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.parent.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(different(Everything, 1), (IMAGE,), out=tmp_path_factory.mktemp("goldens") / "m.artifact")


@pytest.fixture
def packing(artifact: Artifact, tmp_path: Path) -> Packing:
    return Packing(artifact, tmp_path)


def test_a_module_or_a_checkpoint_with_its_model(packing: Packing, tmp_path: Path) -> None:
    first = packing.files()
    assert sorted(first) == ["v1.goldens.safetensors", "v1.safetensors"]
    source = saved(tmp_path / "c.pt", packing.model.state_dict())
    packed = packing.pack(source, model=different(Everything, 2), goldens=[(IMAGE,)])
    assert packed.goldens == 1
    source.unlink()
    assert packing.files() == first
    assert verified(goldens_at(packed.path, packing.artifact), load(packing.artifact, packed.path)) == "goldens"


def test_a_pack_without_goldens_removes_those_of_the_file_before(packing: Packing) -> None:
    assert packing.pack().goldens == 0
    assert sorted(packing.files()) == ["v1.safetensors"]


def renames(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path, Path], None]) -> None:
    """Let `act(temporary, target)` see every rename, just before it."""
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        act(self, target)
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)


@pytest.mark.parametrize("calls", [[(IMAGE,)], None], ids=["goldens", "none"])
def test_goldens_are_in_place_before_their_weight_file(
    calls: Any, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[str] = []

    def act(temporary: Path, target: Path) -> None:
        renamed.append(target.name)
        if target == packing.out:
            with WeightFile(temporary) as file:
                assert file.stamp is not None
                found = goldens_beside(target, packing.artifact.manifest)
                assert (found and found.weights_id) == (file.stamp.weights_id if calls else None)

    renames(monkeypatch, act)
    packing.pack(different(Everything, 2), goldens=calls)
    assert renamed == (["v1.goldens.safetensors"] if calls else []) + ["v1.safetensors"]


def failing_rename(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make renaming a file to `name` fail once."""

    def act(temporary: Path, target: Path) -> None:
        if target.name == name:
            monkeypatch.undo()
            raise OSError(28, "No space left on device")

    renames(monkeypatch, act)


def full_disk(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*args: Any) -> Iterator[memoryview]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weightswap_exporter.packing.pieces", write)


CALLS = [(IMAGE,)]
Prepare = Callable[[Packing, pytest.MonkeyPatch], object]
FAILURES: dict[str, tuple[Prepare, Any, type[Exception]]] = {
    "recording": (lambda packing, patch: packing.newer.train(), CALLS, ParityError),
    "writing the weights": (full_disk, CALLS, CheckpointError),
    "writing the weights alone": (full_disk, None, CheckpointError),
    "renaming the goldens": (lambda packing, patch: failing_rename(patch, packing.beside.name), CALLS, CheckpointError),
    "renaming the weights": (lambda packing, patch: failing_rename(patch, packing.out.name), CALLS, CheckpointError),
    "renaming weights alone": (lambda packing, patch: failing_rename(patch, packing.out.name), None, CheckpointError),
}


@pytest.mark.parametrize(("prepare", "calls", "error"), FAILURES.values(), ids=FAILURES)
def test_a_pack_that_fails_leaves_both_files_as_they_were(
    prepare: Prepare, calls: Any, error: type[Exception], packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(packing, monkeypatch)
    with pytest.raises(error):
        packing.pack(packing.newer, goldens=calls)
    assert packing.files() == packing.before


def test_a_checkpoint_is_no_model(packing: Packing) -> None:
    for source in (packing.model.state_dict(), packing.out):
        with pytest.raises(CheckpointError, match="recorded with the eager model, and a checkpoint is not one"):
            packing.pack(source, goldens=[(IMAGE,)])
    with pytest.raises(Unsupported, match=r"\*.goldens.safetensors are for goldens"):
        pack(packing.model, packing.artifact, out=packing.beside)
    with pytest.raises(WeightsMismatch):
        packing.pack({"conv.weight": torch.zeros(1)}, goldens=None)
    assert packing.files() == packing.before


def refusal(packing: Packing, model: nn.Module, **options: Any) -> str:
    with pytest.raises(ParityError) as refused:
        packing.pack(model, goldens=[(IMAGE,)], **options)
    assert packing.files() == packing.before
    return str(refused.value)


def test_a_model_that_is_not_the_exported_one_is_refused(packing: Packing) -> None:
    says = "conv.weight: the artifact has F32[6, 1, 3, 3] on the CPU, the model has F64[6, 1, 3, 3] on cpu"
    assert says in refusal(packing, different(lambda: Everything().double(), 1), dtype="float32")
    assert "embed.weight: the artifact has F32[6, 6], the model has no such tensor" in refusal(packing, nn.Linear(3, 3))
    other = different(Everything, 1)
    other.get_buffer("table")[2] += 1
    assert "table is not the artifact's constant[2]: expected 0.4" in refusal(packing, other)


def test_a_call_that_changes_a_weight_is_refused_by_name(packing: Packing) -> None:
    def write(module: nn.Module, inputs: Any) -> None:
        module.get_parameter("weight").data.fill_(1)  # has no version that would tell

    packing.model.get_submodule("conv").register_forward_pre_hook(write)
    assert "a call changed conv.weight, which is not state" in refusal(packing, packing.model)


def test_a_model_of_inference_mode_can_be_recorded(packing: Packing) -> None:
    with torch.inference_mode():
        model = different(Everything, 1)
        packing.pack(model, goldens=[(IMAGE,)])
    assert packing.files() == packing.before
