"""Saved contexts: they continue where they were, on any engine, but only with their own weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.refusals import because
from tests.support.remembering import ENGINES, Files, Served, X
from weightswap_exporter import export, pack
from weightswap_runtime import ContextError, Model, StaleState, Unsupported, load
from weightswap_runtime.format.safetensors import parse_file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("contexts"))


@pytest.fixture(params=ENGINES)
def served(request: pytest.FixtureRequest, files: Files) -> Served:
    return Served(files, request.param)


@pytest.fixture
def model(files: Files) -> Model:
    return load(files.artifact, files.weights[0])


def test_nothing_is_saved_to_a_url(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsupported, match=r"s3://bucket/c\.safetensors: only local files can be written"):
        model.new_context().save("s3://bucket/c.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ENGINES)
@torch.no_grad()
def test_a_saved_context_goes_on_where_it_was(served: Served, there: str, files: Files, tmp_path: Path) -> None:
    context, eager = served.model.new_context(), files.eager(0)
    for _ in range(2):
        served(X, context)
        eager(X)
    other = Served(files, there)
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    context.save(paths[0])
    other.model.load_context(paths[0]).save(paths[1])
    served.model.load_context(paths[1]).save(paths[2])
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    found = other.model.load_context(paths[2], on_swap="keep")
    assert found.weights_id == served.model.weights_id
    assert other.peek(found)[1] == 3
    assert torch.equal(other.peek(found)[0], served.peek(context)[0])
    assert torch.allclose(other(X, found), eager(X), atol=1e-5)
    assert set(safetensors.torch.load_file(paths[0])) == {"total", "calls"}  # and no weights


def test_a_context_of_other_weights_or_of_another_graph_is_refused_by_name(
    model: Model, files: Files, tmp_path: Path
) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    old = str(model.weights_id)
    model.swap(files.weights[1])
    with pytest.raises(
        ContextError, check=because("mismatch"), match=f"{old[:12]}.*{str(model.weights_id)[:12]}.*allow_other_weights"
    ):
        model.load_context(path)
    taken = model.load_context(path, allow_other_weights=True)
    assert int(model.peek(context=taken)[1]) == 2
    late = load(files.artifact)
    waiting = late.load_context(path)  # nothing is served yet
    late.swap(files.weights[1])
    with pytest.raises(StaleState):
        late(X, context=waiting)
    other = export(files.models[0], (X[:1],), out=tmp_path / "other.artifact")
    foreign = load(other, pack(files.models[0], other, out=tmp_path / "o.safetensors").path)
    with pytest.raises(ContextError, check=because("mismatch")):
        foreign.load_context(path)
    found = foreign.load_context(path, allow_other_graph=True)
    with torch.no_grad():
        eager = files.eager(0)
        eager(X)
        assert torch.equal(foreign(X[:1], context=found), eager(X[:1]))


class Larger(nn.Module):
    """A module with a state of another name and size, which gives another graph."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = getattr(self, self.name)
        buffer.add_(1)
        return x + buffer[0]


@pytest.mark.parametrize("which", [("other", 4), ("mem", 5), ("mem", 1 << 25)], ids=str)  # more bytes than a header has
def test_a_context_of_another_graph_says_so_whatever_its_state(which: tuple[str, int], tmp_path: Path) -> None:
    there = Larger(*which)
    models = []
    for number, eager in enumerate((Larger("mem", 4), there)):
        artifact = export(eager, (X,), out=tmp_path / f"{number}.artifact")
        models.append(load(artifact, pack(eager, artifact, out=tmp_path / f"{number}.safetensors").path))
    models[1].new_context().save(path := tmp_path / "c.safetensors")
    with pytest.raises(ContextError, check=because("mismatch")):
        models[0].load_context(path)
    with pytest.raises(ContextError, check=because("file")):
        models[0].load_context(path, allow_other_graph=True)


def test_a_damaged_file_is_refused_and_nothing_changes(model: Model, files: Files, tmp_path: Path) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    raw = path.read_bytes()
    tensors = safetensors.torch.load_file(path)
    renamed = {"totals": tensors["total"], "calls": tensors["calls"]}
    damages: dict[str, Callable[[], object]] = {
        "bytes differ from those": lambda: path.write_bytes(raw[:-1] + b"\x7f"),
        "it is truncated": lambda: path.write_bytes(raw[:-1]),
        "is not a context": lambda: safetensors.torch.save_file(tensors, path),
        "safetensors": lambda: path.write_bytes(b"nonsense"),
        "not a context that": lambda: path.write_bytes(files.weights[0].read_bytes()),
        "lacks 'total'; it has 'totals'": lambda: path.write_bytes(
            safetensors.torch.save(renamed, parse_file(raw, "c")[1])
        ),
    }
    for text, damage in damages.items():
        damage()
        with pytest.raises(ContextError, check=because("file"), match=text):
            model.load_context(path)
    with path.open("wb") as sparse:
        sparse.truncate(1 << 42)
    with pytest.raises(ContextError, check=because("file")):
        model.load_context(path)
    path.unlink()
    with pytest.raises(ContextError, check=because("file")):
        model.load_context(path)
    model(X, context=context)


def test_a_write_that_fails_leaves_what_was_there(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    before = path.read_bytes()
    model(X, context=context)

    def broken(self: Any, name: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(context._state), "content", broken)
    with pytest.raises(OSError, match="No space"):
        context.save(path)
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["c.safetensors"]
