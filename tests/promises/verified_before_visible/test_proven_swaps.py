"""Swaps that are verified with goldens before they serve."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from tests.support.setups import different
from weightswap_exporter import compile_engines, export, pack
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    GoldenMismatch,
    Model,
    Unsupported,
    WeightFileError,
    load,
    write_delta,
)

X = torch.linspace(-1, 1, 12).reshape(3, 4)
CASES = [((X,), {}), ((X[:1],), {})]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Shelf:
    """Artifact, and packed weights of models by seed, with goldens."""

    def __init__(self, folder: Path, artifact: Artifact) -> None:
        self.folder, self.artifact = folder, artifact

    def pack(self, seed: int, goldens: Any = CASES) -> Path:
        out = self.folder / f"v{seed}.safetensors"
        pack(different(build, seed), self.artifact, out=out, goldens=goldens)
        return out

    def falsify(self, seed: int, other: int) -> Path:
        """Put goldens of the model `other` beside the weights of `seed`."""
        path, wrong = self.pack(seed), self.pack(other)
        goldens = self.folder / f"v{seed}.goldens.safetensors"
        found = _stamp(goldens)["weights_id"]
        _restamp(self.folder / f"v{other}.goldens.safetensors", goldens, weights_id=found)
        wrong.unlink()
        return path


def _stamp(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        found: dict[str, Any] = msgspec.json.decode(file.metadata()["weightswap"])
    return found


def _restamp(source: Path, target: Path, **changes: Any) -> None:
    stamp = msgspec.json.encode(_stamp(source) | changes).decode()
    safetensors.torch.save_file(safetensors.torch.load_file(source), target, {"weightswap": stamp})


DYNAMIC: Any = {"dynamic_shapes": {"input": {0: torch.export.Dim("batch", max=16)}}}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(build().eval(), (X,), out=tmp_path_factory.mktemp("shelf") / "model.artifact", **DYNAMIC)


@pytest.fixture
def shelf(artifact: Artifact, tmp_path: Path) -> Shelf:
    return Shelf(tmp_path, artifact)


def serves(model: Model, seed: int) -> bool:
    with torch.no_grad():
        return torch.equal(model(X), different(build, seed)(X))


def test_goldens_are_reproduced_before_the_commit(shelf: Shelf, residency: str) -> None:
    model = load(shelf.artifact, shelf.pack(0), residency=residency)
    assert model.history[-1].verified == "goldens"
    receipt = model.swap(shelf.pack(1))
    assert (receipt.verified, serves(model, 1)) == ("goldens", True)
    assert model.swap(shelf.pack(2), verify="finite").verified == "finite"
    assert model.swap(shelf.pack(3), verify="off").verified == "none"
    assert model.swap(shelf.pack(4, goldens=None)).verified == "none"
    with pytest.raises(Unsupported, match="verify='some'"):
        model.swap(shelf.pack(1), verify="some")


def test_the_engine_onnx_reproduces_goldens_within_tolerances(shelf: Shelf, residency: str) -> None:
    compiled = shutil.copytree(shelf.artifact.path, shelf.folder / "onnx.artifact")
    compile_engines(compiled, ("onnx",))
    model = load(compiled, shelf.pack(0), engine="onnx", residency=residency)
    assert model.history[-1].verified == "goldens"
    assert model.swap(shelf.pack(1)).verified == "goldens"
    with pytest.raises(GoldenMismatch, match=r"output\[.*differ by more than rtol=1.3e-05, atol=0.0001"):
        model.swap(shelf.falsify(2, 3))
    wanted = different(build, 1)(X).detach().numpy()
    np.testing.assert_allclose(model(X.numpy()), wanted, rtol=1.3e-6, atol=1e-5)


def test_weights_that_do_not_reproduce_them_are_refused(shelf: Shelf, residency: str) -> None:
    model = load(shelf.artifact, shelf.pack(0), residency=residency, keep_previous="host")
    model.swap(shelf.pack(1))
    wrong = shelf.falsify(2, 3)
    for background in (False, True):
        with pytest.raises(GoldenMismatch, match="case 0, forward, output") as caught:
            model.stage(wrong, background=background).wait()
        assert len(caught.value.problems) == len(CASES)
    assert serves(model, 1)
    model.rollback()
    assert serves(model, 0)
    assert model.swap(wrong, verify="finite").verified == "finite"
    assert serves(model, 2)


def test_weights_that_give_no_finite_outputs_are_refused(shelf: Shelf, residency: str) -> None:
    model = load(shelf.artifact, shelf.pack(0), residency=residency)
    shelf.pack(1)
    broken = different(build, 1)
    with torch.no_grad():
        broken[2].bias[1] = torch.inf
    path = pack(broken, shelf.artifact, out=shelf.folder / "broken.safetensors").path
    goldens = shelf.folder / "broken.goldens.safetensors"
    (shelf.folder / "v1.goldens.safetensors").rename(goldens)
    with pytest.raises(WeightFileError, match=r"recorded for the weights .*, but those beside it are"):
        model.swap(path)
    with pytest.raises(GoldenMismatch, match="not finite"):
        model.swap(path, verify="finite")
    assert serves(model, 0)
    model.swap(path, verify="off")
    assert not model(X).isfinite().all()


def test_a_part_of_a_file_gives_other_weights_than_were_recorded(shelf: Shelf, residency: str) -> None:
    model = load(shelf.artifact, shelf.pack(0), residency=residency)
    assert model.swap(shelf.pack(1), only="0.*").verified == "finite"
    assert not serves(model, 1)
    model.swap(shelf.pack(1), only="2.*")
    assert serves(model, 1)


@pytest.mark.usefixtures("_places")
def test_a_delta_takes_the_goldens_along(shelf: Shelf, residency: str) -> None:
    first, second = shelf.pack(0), shelf.pack(1)
    delta = write_delta(first, second, shelf.folder / "d.safetensors").path
    model = load(shelf.artifact, first, residency=residency)
    assert model.swap(delta).verified == "goldens"
    assert serves(model, 1)
    plain = shelf.pack(2, goldens=None)
    write_delta(second, plain, delta)
    assert not (shelf.folder / "d.goldens.safetensors").exists()
    assert model.swap(delta).verified == "none"


@pytest.mark.usefixtures("_places")
def test_a_wrong_delta_is_refused_by_goldens(shelf: Shelf, residency: str) -> None:
    first = shelf.pack(0)
    delta = write_delta(first, shelf.falsify(1, 2), shelf.folder / "d.safetensors").path
    model = load(shelf.artifact, first, residency=residency)
    with pytest.raises(GoldenMismatch):
        model.swap(delta)
    assert serves(model, 0)


def test_an_artifact_s_own_goldens_try_every_set(shelf: Shelf, tmp_path: Path) -> None:
    artifact = export(different(build, 5), (X,), out=tmp_path / "own.artifact", goldens=[((X,), {})], **DYNAMIC)
    assert artifact.graph_id == shelf.artifact.graph_id
    model = load(artifact, shelf.pack(5, goldens=None))
    assert model.history[-1].verified == "goldens"
    assert model.swap(shelf.pack(6, goldens=None)).verified == "finite"
    damaged = (tmp_path / "own.artifact" / "goldens.safetensors").read_bytes()[:-1] + b"?"
    (tmp_path / "own.artifact" / "goldens.safetensors").write_bytes(damaged)
    with pytest.raises(ArtifactError):
        load(artifact)


def test_damaged_goldens_refuse_before_anything_is_read(shelf: Shelf) -> None:
    model = load(shelf.artifact, shelf.pack(0))
    model.swap(shelf.pack(1))
    path = shelf.pack(2)
    goldens = shelf.folder / "v2.goldens.safetensors"
    goldens.write_bytes(goldens.read_bytes()[:-1] + b"?")
    with pytest.raises(WeightFileError, match="its bytes have"):
        model.swap(path)
    model.rollback()
    assert serves(model, 0)


@pytest.mark.parametrize("size", [0, 1, 100])
def test_goldens_that_are_cut_off_are_not_none(size: int, shelf: Shelf) -> None:
    model = load(shelf.artifact, shelf.pack(0))
    path = shelf.pack(1)
    goldens = shelf.folder / "v1.goldens.safetensors"
    goldens.write_bytes(goldens.read_bytes()[:size])
    with pytest.raises(WeightFileError):
        model.swap(path)
    assert serves(model, 0)


def test_a_directory_of_one_weight_file_may_have_goldens(shelf: Shelf, tmp_path: Path) -> None:
    path = shelf.pack(0)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (path.name, "v0.goldens.safetensors"):
        (tmp_path / name).rename(folder / name)
    assert load(shelf.artifact, folder).history[-1].verified == "goldens"
