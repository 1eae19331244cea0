"""Goldens of published weights: recorded with the copied weights, and in place before them."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.goldens import goldens_at
from weightswap_exporter import export, goldens, publish
from weightswap_runtime import Artifact, CheckpointError, load

GOLDENS_SUFFIX = ".goldens.safetensors"
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)).eval()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(build(0), (X,), out=tmp_path_factory.mktemp("published") / "m.artifact")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_they_are_of_the_weights_that_were_published(artifact: Artifact, tmp_path: Path) -> None:
    model, out = build(1), tmp_path / "out"
    expected = model(X)
    publication = publish(model, out, artifact, step=7, goldens=[(X,)], tolerance=(0.0, 1e-6))
    with torch.no_grad():
        model[0].weight.add_(1)  # the training goes on
    packed = publication.wait(120)
    assert packed.goldens == 1
    assert names(out) == [packed.path.stem + GOLDENS_SUFFIX, packed.path.name]
    found = goldens_at(packed.path, artifact)
    assert (found.weights_id, found.record.tolerance) == (packed.weights_id, (0.0, 1e-6))
    served = load(artifact, packed.path)
    assert served.history[-1].verified == "goldens"
    assert torch.equal(served(X), expected)
    assert publish(build(1), out, artifact, step=7).wait(120).goldens == 0
    assert len(names(out)) == 2  # those of the same weights stay


def test_a_write_that_fails_leaves_no_goldens(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original, seen = tmp_path / "out", Path.replace, list[list[str]]()

    def replace(path: Path, target: Path) -> Path:
        if not str(target).endswith(GOLDENS_SUFFIX):
            seen.append([name for name in names(out) if not name.startswith(".")])
            raise OSError(28, "No space left on device")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(CheckpointError):
        publish(build(1), out, artifact, step=1, goldens=[(X,)]).wait(120)
    assert [name.endswith(GOLDENS_SUFFIX) for (name,) in seen] == [True]  # they are there before the weights
    assert names(out) == []


def test_the_model_is_not_kept(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is written, only copies are referenced."""
    held = threading.Event()
    original = goldens.Recording.encode

    def encode(recording: goldens.Recording, weights_id: str | None) -> bytes:
        assert held.wait(120)
        return original(recording, weights_id)

    monkeypatch.setattr(goldens.Recording, "encode", encode)
    model = build(1)
    kept = weakref.ref(model)
    publication = publish(model, tmp_path / "out", artifact, step=1, goldens=[(X,)])
    del model
    gc.collect()
    assert kept() is None
    held.set()
    assert publication.wait(120).goldens == 1
