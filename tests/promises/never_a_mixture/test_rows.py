"""Row updates of large tables: memory is what a model kept beside it says, and no answer mixes two generations."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.accelerators import moved, on_every_device
from tests.support.damage import damaged
from tests.support.sessions import live_bytes
from tests.support.storm import storm
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Artifact,
    DigestMismatch,
    Model,
    NothingToRollBack,
    Unsupported,
    WeightsMismatch,
    load,
    native,
    write_delta,
)
from weightswap_runtime.shared.owner import Segment, own


class Tables(nn.Module):
    """Two tables, one of several blocks of 1 MiB and a part of one, one with rows of four bytes, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(70_000, 16)
        self.wide = nn.EmbeddingBag(400_000, 1, mode="sum")
        self.dense = nn.Linear(16, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self.users(users)
        return rows, self.wide(items[:, None]), self.dense(rows)


class Files(NamedTuple):
    """An artifact, and a folder for files."""

    artifact: Path
    folder: Path

    def full(self, values: dict[str, torch.Tensor], name: str) -> Path:
        pack(dict(values), self.artifact, out=self.folder / name)
        return self.folder / name


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "artifact"
    ids = torch.arange(4)
    batch = torch.export.Dim("batch", max=1000)
    export(Tables().eval(), (ids, ids), out=path, dynamic_shapes=({0: batch}, {0: batch}))
    return path


@pytest.fixture
def files(artifact: Path, tmp_path: Path) -> Files:
    return Files(artifact, tmp_path)


@pytest.fixture(params=["native", "numpy"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", None)
    return str(request.param)


def values_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Tables().state_dict().items()}


def changed(values: dict[str, torch.Tensor], random: np.random.Generator, count: int) -> dict[str, torch.Tensor]:
    """Return values with other rows, of both tables, and another dense part."""
    new = {name: value.clone() for name, value in values.items()}
    for name in ("users.weight", "wide.weight"):
        ids = torch.from_numpy(random.choice(len(new[name]), count, replace=False))
        new[name][ids] = torch.from_numpy(random.standard_normal((count, new[name].shape[1]), np.float32))
    new["dense.bias"] += 1
    return new


def serves(model: Model, values: dict[str, torch.Tensor]) -> bool:
    """Return whether every byte of the served weights is that of the values."""
    return live_bytes(model) == {name: value.numpy().tobytes() for name, value in values.items()}


class Beside:
    """A model, and the weights that it should serve and those before, kept beside it."""

    def __init__(self, files: Files, residency: str, device: str, seed: int) -> None:
        self.files, self.seed = files, seed
        self.random = np.random.default_rng(seed)
        self.now = values_of(seed)
        self.path = files.full(self.now, "0.safetensors")
        options: dict[str, Any] = {"residency": residency, "keep_previous": "host", "device": device}
        self.model = load(files.artifact, self.path, **options)
        self.before: tuple[dict[str, torch.Tensor], Path] | None = None
        self._numbers = count(1)

    def step(self, what: str) -> None:
        number = next(self._numbers)
        new = changed(self.now, self.random, int(self.random.integers(1, 3000)))
        path = self.files.full(new, f"{number}.safetensors")
        delta = write_delta(self.path, path, self.files.folder / f"d{number}.safetensors").path
        getattr(self, what)(new, path, delta)
        assert serves(self.model, self.now), what

    def committed(self, values: dict[str, torch.Tensor], path: Path) -> None:
        self.before, self.now, self.path = (self.now, self.path), values, path
        assert self.model.weights_id == load(self.files.artifact, path).weights_id

    def rows(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        self.model.swap(delta)
        self.committed(new, path)

    def given(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        rows = {name: (new[name] != self.now[name]).any(1).nonzero().flatten() for name in TABLES}
        receipt = self.model.swap(new, rows=rows, base=self.model.weights_id)
        assert receipt.kind == "delta"
        self.committed(new, path)

    def refuse_given(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        with pytest.raises(WeightsMismatch, match="row 70000: the table has 70000 rows"):
            self.model.swap(new, rows={"users.weight": [0, 70_000], "wide.weight": []})

    def full(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        self.model.swap(path)
        self.committed(new, path)

    def part(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        self.model.swap(path, only="users.*")
        new = self.now | {"users.weight": new["users.weight"]}
        self.committed(new, self.files.full(new, f"part-{path.name}"))

    def roll_back(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        if self.before is None:
            with pytest.raises(NothingToRollBack):
                self.model.rollback()
            return
        self.model.rollback()
        self.committed(*self.before)

    def discard(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        with self.model.stage(delta):
            pass

    def cancel(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        self.model.stage(delta, background=True).discard()

    def refuse(self, new: dict[str, torch.Tensor], path: Path, delta: Path) -> None:
        with pytest.raises(DigestMismatch):
            self.model.swap(damaged(delta))


TABLES = ("users.weight", "wide.weight")
STEPS = ("rows", "rows", "given", "given", "full", "part", "roll_back", "discard", "cancel", "refuse", "refuse_given")


@on_every_device
@pytest.mark.parametrize("residency", ["double", "single"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(2)
def test_memory_equals_a_model_kept_beside(files: Files, residency: str, device: str, seed: int, code: str) -> None:
    beside = Beside(files, residency, device, seed)
    for _ in range(15):
        beside.step(str(beside.random.choice(STEPS)))
    x = torch.arange(0, 70_000, 700)[:90], torch.arange(0, 400_000, 4000)[:90]
    eager = Tables().eval()
    eager.load_state_dict(beside.now)
    with torch.no_grad():
        rows, wide, dense = moved(beside.model(*moved(x, device)), "cpu")
        assert torch.equal(rows, eager(*x)[0])
        assert torch.equal(wide, eager(*x)[1])
        torch.testing.assert_close(dense, eager(*x)[2])


@pytest.mark.parametrize("most", [0, 2 << 16, None])
@pytest.mark.parametrize("shared", [False, True])
def test_hash_trees_take_no_more_than_they_may(files: Files, most: int | None, shared: bool) -> None:
    values, random = values_of(0), np.random.default_rng(0)
    first = files.full(values, "0.safetensors")
    new = changed(values, random, 100)
    delta = write_delta(first, files.full(new, "1.safetensors"), files.folder / "d.safetensors").path
    with ExitStack() as stack:
        if shared:  # one process has the trees of all workers
            segment = Segment.create(Artifact.open(files.artifact).manifest.weights, 1)
            stack.callback(segment.close)
            model = own(files.artifact, segment, max_hash_trees=most)
        else:
            model = load(files.artifact, max_hash_trees=most)
        model.swap(first)
        model.swap(delta)
        assert serves(model, new)
        full_blocks = sum(value.nbytes >> 20 for value in values.values())
        assert model._store.trees.nbytes == min(most, full_blocks << 16) if most is not None else full_blocks << 16
        model.close()
        assert model._store.trees.nbytes == 0


@pytest.mark.parametrize("value", [-1, 1.5, "1 GiB", True])
def test_what_hash_trees_may_take_is_a_number_of_bytes(files: Files, value: Any) -> None:
    with pytest.raises(Unsupported, match="max_hash_trees="):
        load(files.artifact, max_hash_trees=value)


MARKERS = (0, 16_383, 16_384, 69_999)  # rows on both sides of the borders between blocks


@pytest.mark.parametrize("residency", ["double", "single"])
@pytest.mark.parametrize("updates", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_answer_mixes_two_generations_of_rows(files: Files, residency: str, updates: int) -> None:
    """Every table, and the dense part, hold the number of the generation in some of their rows."""
    random = np.random.default_rng(0)

    def marked(number: int) -> dict[str, torch.Tensor]:
        new = changed(values, random, 500)
        new["users.weight"][list(MARKERS)] = number
        new["wide.weight"][list(MARKERS)] = number
        new["dense.weight"][:] = 0
        new["dense.bias"][:] = number
        return new

    values = values_of(0)
    values = marked(0)
    path = files.full(values, "0.safetensors")
    model = load(files.artifact, path, residency=residency)  # type: ignore[arg-type]
    deltas = []
    for number in range(1, updates + 1):
        values = marked(number)
        new = files.full(values, f"{number}.safetensors")
        deltas.append(write_delta(path, new, files.folder / f"d{number}.safetensors").path)
        path.unlink()
        path = new
    ids = torch.tensor(MARKERS)

    def call(_: int) -> frozenset[float]:
        """Return the generations that are found in one answer."""
        answer = model(ids, ids)
        time.sleep(0.0005)  # else the swaps would wait for the interpreter's lock most of the time
        return frozenset(torch.cat([part.reshape(-1) for part in answer]).tolist())

    with storm(call, 8) as answers:
        for number, delta in enumerate(deltas):
            model.swap(delta)
            if residency == "double" and number % 10 == 0:
                model.rollback()
                model.rollback()
    seen = set(chain(*answers))
    assert {len(found) for found in seen} == {1}  # each answer is of one generation
    assert len(seen) > 3
