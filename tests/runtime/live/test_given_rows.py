"""Row updates from memory: which rows, of which tensors, since which weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.recommender import ITEMS, USERS, Recommender, sparse_optimizers, train
from tests.support.sessions import live
from tests.support.tiny import TinyArtifact
from weightswap_exporter import RowTracker, export, pack, publish
from weightswap_runtime import (
    Artifact,
    BaseMismatch,
    GoldenMismatch,
    Model,
    NonFiniteWeights,
    SourceChanged,
    UnexpectedWeights,
    Unsupported,
    WeightsMismatch,
    load,
)
from weightswap_runtime.sources.memory import MemorySource

X = torch.randint(0, USERS, (8, 4), generator=torch.Generator().manual_seed(1))
NAMES = ("users.weight", "items.weight")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(Recommender().eval(), (X,), out=tmp_path_factory.mktemp("rows") / "recommender.artifact")


def id_of(given: Any, artifact: Artifact, folder: Path) -> str:
    return pack(given, artifact, out=folder / "full.safetensors").weights_id


def changed(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Change some rows of both tables, and a dense weight; return their ids."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    rows = {}
    with torch.no_grad():
        for name in NAMES:
            rows[name] = torch.randperm(len(tensors[name]), generator=generator)[:40].sort().values
            tensors[name][rows[name]] += 1
        tensors["top.bias"] += 1
    return rows


class Listed(nn.DataParallel):
    """A wrapper that can be iterated, as a Sequential can."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self.module])


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "wrapped module": nn.DataParallel,
    "a module that can be iterated": Listed,
    "state dict": lambda model: model.state_dict(),
    "arrays": lambda model: {name: value.numpy() for name, value in model.state_dict().items()},
    "arrays in another order": lambda model: {
        name: np.asfortranarray(value.numpy()) for name, value in model.state_dict().items()
    },
    "tensors in another order": lambda model: {
        name: value.t().contiguous().t() for name, value in model.state_dict().items()
    },
}
IDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensors": lambda ids: ids,
    "arrays": lambda ids: ids.numpy().astype(np.uint32),
    "lists": lambda ids: ids.tolist(),
    "negated lazily": lambda ids: torch._neg_view(-ids),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("ids_in", IDS.values(), ids=IDS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_lead_to_the_weights_that_all_tensors_have(
    form: Callable[[nn.Module], Any],
    ids_in: Callable[[torch.Tensor], Any],
    artifact: Artifact,
    tmp_path: Path,
    residency: Any,
) -> None:
    model = Recommender()
    prefix = "module." if isinstance(form(model), nn.DataParallel) else ""
    with load(artifact, model, residency=residency) as served:
        for seed in range(3):
            rows = {name: ids_in(ids) for name, ids in changed(model, seed).items()}
            before = served.weights_id
            named = {prefix + name if seed == 2 else name: ids for name, ids in rows.items()}
            receipt = served.swap(form(model), rows=named, labels={"step": str(seed)})
            assert (receipt.kind, receipt.base, receipt.reloadable) == ("delta", before, False)
            assert receipt.source.startswith("memory")
            assert receipt.labels == {"step": str(seed)}
            assert receipt.weights_id == id_of(model, artifact, tmp_path)
            assert receipt.bytes_read == 2 * 40 * 64 + 8
            assert torch.equal(served(X), model(X).detach())


def test_every_way_to_swap_takes_rows(artifact: Artifact, tmp_path: Path) -> None:
    model = Recommender()

    async def staged(served: Model, rows: dict[str, torch.Tensor]) -> str:
        async with served.astage(model, rows=rows) as each:
            return (await each.acommit()).weights_id

    with load(artifact, model) as served:
        swaps: list[Callable[[dict[str, torch.Tensor]], str]] = [
            lambda rows: served.stage(model, rows=rows).commit().weights_id,
            lambda rows: served.stage(model, rows=rows, background=True).commit().weights_id,
            lambda rows: asyncio.run(served.aswap(model, rows=rows)).weights_id,
            lambda rows: asyncio.run(staged(served, rows)),
        ]
        for seed, swap in enumerate(swaps):
            assert swap(changed(model, seed)) == id_of(model, artifact, tmp_path)
            assert served.history[-1].kind == "delta"


def test_a_rollback_goes_back_over_rows(artifact: Artifact, tmp_path: Path, residency: Any) -> None:
    model = Recommender()
    with load(artifact, model, residency=residency, keep_previous="host") as served:
        before, answer = served.weights_id, served(X)
        served.swap(model, rows=changed(model, 1))
        served.rollback()
        assert served.weights_id == before
        assert torch.equal(served(X), answer)
        served.rollback()
        assert served.weights_id == id_of(model, artifact, tmp_path)


def test_only_named_rows_are_read_of_a_table(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recommender()
    read: list[str] = []
    for name in ("digests", "read_into"):
        plain = getattr(MemorySource, name)

        def noted(source: MemorySource, *args: Any, plain: Any = plain) -> Any:
            read.append(source.where)
            return plain(source, *args)

        monkeypatch.setattr(MemorySource, name, noted)
    with load(artifact, model) as served:
        read.clear()
        rows = changed(model, 1)
        served.swap(model, rows={**rows, "users.weight": []})  # which has changed, and is said not to have
        assert set(read) == {"top.weight", "top.bias"}
        receipt = served.swap(model, rows={"items.weight": []})
        assert receipt.bytes_read == model.users.weight.nbytes
        assert served.swap(model, rows={}).bytes_read == 0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not ascending": (
        {"items.weight": [5, 4]},
        r"items\.weight: row 4 comes after row 5: rows have to be in ascending[^$]*torch\.unique",
    ),
    "twice": ({"items.weight": [1, 7, 7]}, r"items\.weight: row 7 comes after row 7"),
    "negative": ({"items.weight": torch.tensor([-1, 3])}, r"items\.weight: row -1: the table has 40000 rows"),
    "beyond": ({"items.weight": np.array([3, ITEMS])}, r"items\.weight: row 40000: the table has 40000 rows"),
    "beyond all tables": ({"items.weight": np.array([2**63], np.uint64)}, r"items\.weight: row 9223372036854775808"),
    "no such table": ({"item": [1]}, "item: no such table"),
    "two names": ({"item": [1], "users.weight": [USERS]}, r"2 problems\n  - item: .*\n  - users\.weight: row 5000"),
    "a mask": (
        {"items.weight": torch.ones(ITEMS, dtype=torch.bool)},
        r"items\.weight: expected the ids of rows, got a mask; give mask\.nonzero\(\)\.flatten\(\)",
    ),
    "a mask of numpy": ({"items.weight": np.ones(ITEMS, bool)}, r"got a mask; give numpy\.flatnonzero\(mask\)"),
    "too large": ({"items.weight": [3, 2**63]}, r"items\.weight: row 9223372036854775808: is no row of a table"),
    "much too large": ({"items.weight": [-(2**70)]}, r"row -1180591620717411303424: is no row of a table"),
    "no values": (
        {"items.weight": torch.tensor([3], device="meta")},
        r"items\.weight: expected the ids of rows, as a plain tensor with values; got another one \(",
    ),
    "nested": (
        {"items.weight": torch.nested.nested_tensor([torch.tensor([3])], layout=torch.jagged)},
        r"items\.weight: expected the ids of rows, as a plain tensor with values; got another one \(",
    ),
    "sparse": ({"items.weight": torch.tensor([3]).to_sparse()}, r"items\.weight: expected the ids of rows \("),
    "fractions": ({"items.weight": [0.5]}, "expected the ids of rows, got float64"),
    "a table of ids": ({"items.weight": [[1], [2]]}, r"expected the ids of rows, got int64 of the shape \[2, 1\]"),
    "of several lengths": ({"items.weight": [[1], 2]}, r"expected the ids of rows \("),
    "one number": ({"items.weight": 3}, "expected the ids of rows"),
    "nothing": ({"items.weight": None}, "expected the ids of rows"),
    "no text": ({3: [1]}, "3: no such table"),
}


@pytest.mark.parametrize(("rows", "says"), WRONG.values(), ids=WRONG)
def test_wrong_rows_are_refused_by_name(rows: dict[Any, Any], says: str, artifact: Artifact) -> None:
    model = Recommender()
    with load(artifact, model) as served:
        before, answer = served.weights_id, served(X)
        changed(model, 1)
        with pytest.raises(WeightsMismatch, match=says):
            served.swap(model, rows=rows)
        assert (served.weights_id, served.generation) == (before, 0)
        assert torch.equal(served(X), answer)


REFUSED: dict[str, tuple[Callable[[Recommender], Any], dict[str, Any], type[Exception], str]] = {
    "a path": (lambda _: "x.safetensors", {}, Unsupported, "rows: of a module's tensors, or of a mapping's; got a str"),
    "an iterator": (lambda model: iter(model.state_dict().items()), {}, Unsupported, "got a odict_iterator"),
    "a part": (lambda model: model, {"only": "users.*"}, Unsupported, "only: rows of some tables"),
    "no rows": (
        lambda model: model,
        {"rows": [1, 2]},
        Unsupported,
        "rows: expected ids by name, or a RowTracker; got a list",
    ),
    "a base without rows": (lambda model: model, {"rows": None, "base": "0" * 64}, Unsupported, "base: the weights"),
    "half a base": (lambda model: model, {"base": "0" * 12}, Unsupported, "base='000000000000': a weights id has 64"),
    "another base": (lambda model: model, {"base": "0" * 64}, BaseMismatch, "since the weights 000000000000, but"),
    "another id": (lambda model: model, {"expect": "0" * 64}, UnexpectedWeights, "gives the weights"),
    "another table": (
        lambda model: model.state_dict() | {"items.weight": torch.zeros(ITEMS, 8)},
        {},
        WeightsMismatch,
        r"items\.weight: expected F32\[40000, 16\], found F32\[40000, 8\]",
    ),
    "no table": (
        lambda model: {name: value for name, value in model.state_dict().items() if name != "items.weight"},
        {},
        WeightsMismatch,
        r"items\.weight: missing",
    ),
    "NaN": (
        lambda model: model.state_dict() | {"items.weight": torch.full((ITEMS, 16), torch.nan)},
        {"allow_nonfinite": False},
        NonFiniteWeights,
        r"items\.weight: 48 NaN of 640000 values",
    ),
}


@pytest.mark.parametrize(("given", "options", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_rows_cannot_be_of_is_refused(
    given: Callable[[Recommender], Any],
    options: dict[str, Any],
    error: type[Exception],
    says: str,
    artifact: Artifact,
) -> None:
    model = Recommender()
    with load(artifact, model) as served:
        before, answer = served.weights_id, served(X)
        with pytest.raises(error, match=says):
            served.swap(given(model), **{"rows": {"items.weight": [1, 2, 3]}, **options})
        assert served.weights_id == before
        assert torch.equal(served(X), answer)


def test_rows_need_weights_that_are_served(artifact: Artifact) -> None:
    with load(artifact) as empty, pytest.raises(BaseMismatch):
        empty.swap(Recommender(), rows={})


def test_nonfinite_values_are_counted_from_the_rows(artifact: Artifact, residency: Any) -> None:
    model = Recommender()
    with load(artifact, model, residency=residency) as served, torch.no_grad():
        model.items.weight[[3, 9]] = torch.nan
        assert served.swap(model, rows={"items.weight": [3, 9]}).nonfinite["items.weight"].nan == 32
        model.items.weight[9] = 0
        assert served.swap(model, rows={"items.weight": [9]}).nonfinite == {}
        assert live(served).identity.nonfinite["items.weight"].nan == 16


def test_a_recorded_call_is_tried(tmp_path: Path) -> None:
    model = Recommender().eval()
    artifact = export(model, (X,), out=tmp_path / "a.artifact", goldens=[(X,)])
    with load(artifact, model) as served:
        assert served.swap(model, rows=changed(model, 1)).verified == "finite"
        with torch.no_grad():
            model.top.bias.fill_(torch.inf)
        with pytest.raises(GoldenMismatch):
            served.swap(model, rows=changed(model, 2))


# writes meanwhile


@pytest.mark.parametrize("when", ["before it is staged", "while it is read"])
@pytest.mark.parametrize("table", [True, False])
def test_a_write_meanwhile_is_noticed(
    when: str, table: bool, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Recommender()
    tensor = model.items.weight if table else model.top.bias
    with load(artifact, model) as served:
        rows, before = changed(model, 1), served.weights_id

        def write() -> None:
            with torch.no_grad():
                tensor[0] += 1

        if when == "while it is read":
            plain = MemorySource.rows
            monkeypatch.setattr(MemorySource, "rows", lambda *args: (plain(*args), write())[0])
            with pytest.raises(SourceChanged):
                served.swap(model, rows=rows)
        else:
            with served.stage(Recommender()):  # it waits for this
                staged = served.stage(model, rows=rows, background=True, busy="wait")
                write()
            with pytest.raises(SourceChanged):
                staged.commit()
        assert served.weights_id == before


def test_an_uncounted_write_beside_a_staging_in_the_background_is_noticed(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Recommender()
    with load(artifact, model) as served:
        rows, plain = changed(model, 1), MemorySource.rows

        def writing(source: MemorySource, ids: Any) -> memoryview:
            content = plain(source, ids)
            source.value.data[int(ids[0])] += 1  # torch does not count it
            return content

        monkeypatch.setattr(MemorySource, "rows", writing)
        with pytest.raises(SourceChanged):
            served.stage(model, rows=rows, background=True).wait()


# tensors that are tied, or computed


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(50, 4)
        self.outer = nn.Linear(4, 50, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(ids))


def test_rows_of_tied_tensors(tmp_path: Path) -> None:
    model, ids = Tied(), torch.arange(4)
    artifact = export(model.eval(), (ids,), out=tmp_path / "a.artifact")
    with load(artifact, model) as served, torch.no_grad():
        for name in ("inner.weight", "outer.weight"):
            model.inner.weight[[2, 7]] += 1
            assert served.swap(model, rows={name: [2, 7]}).weights_id == id_of(model, artifact, tmp_path)
        with pytest.raises(WeightsMismatch, match="whose rows are given by another name, too"):
            served.swap(model, rows={"inner.weight": [1], "outer.weight": [1]})
        apart = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(WeightsMismatch, match="held by several tensors, of which rows change apart"):
            served.swap(apart, rows={"inner.weight": [1]})
        apart["outer.weight"][3] += 1
        with pytest.raises(WeightsMismatch, match="are one tensor in the graph, but have different values"):
            served.swap(apart, rows={})


class Turned(nn.Module):
    """Keeps its table column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 300).t())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def test_rows_of_a_table_in_another_order(tmp_path: Path, residency: Any) -> None:
    model, ids = Turned(), torch.arange(4)
    artifact = export(model.eval(), (ids,), out=tmp_path / "a.artifact")
    assert artifact.manifest.weights[0].stride is not None
    with load(artifact, model, residency=residency) as served, torch.no_grad():
        for _ in range(2):
            model.table[[1, 299]] += 1
            assert served.swap(model, rows={"table": [1, 299]}).weights_id == id_of(model, artifact, tmp_path)
            assert torch.equal(served(ids), model(ids))


def test_a_single_number_has_no_rows(tiny: TinyArtifact) -> None:
    with load(tiny.path, tiny.values(0)) as served:
        with pytest.raises(WeightsMismatch):
            served.swap(tiny.values(0), rows={"steps": [0]})
        values = tiny.values(1)
        receipt = served.swap(values, rows={"weight": [0, 1, 2], "bias": range(5), "steps": []})
        assert receipt.weights_id == load(tiny.path, values | {"steps": torch.tensor(0)}).weights_id


class Joined(nn.Module):
    """Loads two tables as one."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(60, 4)
        self.other = nn.Embedding(50, 4)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _join(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, *__: Any) -> None:
        if "low" in state:
            state["items.weight"] = torch.cat([state.pop("low"), state.pop("high")])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.items(ids) + self.other(ids)


def test_weights_that_are_computed_have_no_rows_of_their_own(tmp_path: Path) -> None:
    ids = torch.arange(4)
    values = {"low": torch.randn(20, 4), "high": torch.randn(40, 4), "other.weight": torch.randn(50, 4)}
    artifact = export(Joined().eval(), (ids,), out=tmp_path / "a.artifact", checkpoint=values)
    with load(artifact, values) as served:
        values["other.weight"][4] += 1
        values["high"][7] += 1
        receipt = served.swap(values, rows={"other.weight": [4]})
        assert receipt.weights_id == id_of(values, artifact, tmp_path)
        assert receipt.bytes_read == 16 + 60 * 16
        values["other.weight"][5] += 1
        assert served.swap(values, rows={"other.weight": [5]}).bytes_read == 16
        for name, says in (("high", r"items\.weight is computed from it"), ("items.weight", "no such table")):
            with pytest.raises(WeightsMismatch, match=says):
                served.swap(values, rows={name: [1]})


class Layers(nn.Module):
    """Loads an older form, in which each layer has the number before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(50, 4) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(((number + 1) * layer(ids) for number, layer in enumerate(self.layers)), torch.zeros(1))


def load_shifted(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    shifted = {f"layers.{number + 1}.weight": values[f"layers.{number}.weight"] for number in range(2)}
    model.load_state_dict({"layers.0.weight": values["first"], **shifted}, assign=True)


@pytest.mark.parametrize("options", [{}, {"keys": "checkpoint"}], ids=str)
def test_names_of_rows_are_those_of_the_given_tensors(options: dict[str, Any], tmp_path: Path) -> None:
    names = ("first", "layers.0.weight", "layers.1.weight")
    values = {name: torch.randn(50, 4) for name in names}
    out = tmp_path / "a.artifact"
    artifact = export(Layers().eval(), (torch.arange(4),), out=out, load=load_shifted, checkpoint=values)
    with load(artifact, values) as served:
        for chosen in (names, names[1:], names[:2], names[1:2]):
            rows = {name: [number] for number, name in enumerate(chosen, 1)}
            for name, ids in rows.items():
                values[name][ids] += 1
            receipt = served.swap(values, rows=rows, **options)
            assert (receipt.kind, receipt.bytes_read) == ("delta", 16 * len(rows))
            assert receipt.weights_id == id_of(values, artifact, tmp_path)
        values["layers.1.weight"][7] += 1
        assert served.swap(values, rows={"layers.2.weight": [7]}, **options).bytes_read == 16  # no given tensor's name
        assert served.weights_id == id_of(values, artifact, tmp_path)
        with pytest.raises(
            WeightsMismatch, match=r"layers\.0\.weight: the name of a given tensor, and in the graph that"
        ):
            served.swap(values, rows={"layers.0.weight": [1], "layers.2.weight": [2]}, **options)


# trackers


class Training:
    def __init__(self) -> None:
        self.model = Recommender()
        self.optimizers = sparse_optimizers(self.model)
        self.tracker = RowTracker(self.model, *self.optimizers)

    def train(self) -> None:
        train(self.model, self.optimizers)

    @property
    def changed(self) -> int:
        return sum(map(len, self.tracker.changed().values()))


def test_a_tracker_begins_with_all_weights(artifact: Artifact, tmp_path: Path, residency: Any) -> None:
    training = Training()
    with load(artifact, Recommender(), residency=residency) as served:
        for kind in ("full", "delta", "delta"):
            training.train()
            receipt = served.swap(training.model, rows=training.tracker)
            assert receipt.kind == kind
            assert receipt.weights_id == id_of(training.model, artifact, tmp_path)
            assert training.changed == 0
        with pytest.raises(Unsupported, match="base: of ids by name; a tracker knows"):
            served.swap(training.model, rows=training.tracker, base=served.weights_id)


def test_a_refusal_keeps_the_rows_for_the_next_try(artifact: Artifact, tmp_path: Path) -> None:
    training = Training()
    with load(artifact, training.model) as served:
        served.swap(training.model, rows=training.tracker)
        training.train()
        rows = training.changed
        with pytest.raises(UnexpectedWeights):
            served.swap(training.model, rows=training.tracker, expect="0" * 64)
        served.stage(training.model, rows=training.tracker).discard()
        assert training.changed == rows > 0
        training.train()
        receipt = served.swap(training.model, rows=training.tracker)
        assert receipt.kind == "delta"
        assert receipt.weights_id == id_of(training.model, artifact, tmp_path)
        assert training.changed == 0


def test_what_steps_do_not_account_for_is_read_whole(
    artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with load(artifact, training.model) as served:
        served.swap(training.model, rows=training.tracker)
        with torch.no_grad():
            training.model.items.weight.mul_(2)
        with pytest.raises(UnexpectedWeights), caplog.at_level(logging.WARNING, "weightswap"):
            served.swap(training.model, rows=training.tracker, expect="0" * 64)
        assert "items.weight changed otherwise than by an optimizer's step" in caplog.text
        for kind in ("full", "delta"):  # of the refused swap, too
            receipt = served.swap(training.model, rows=training.tracker)
            assert receipt.kind == kind
            assert receipt.weights_id == id_of(training.model, artifact, tmp_path)


def test_a_tracker_is_of_the_model_that_is_given(artifact: Artifact) -> None:
    training = Training()
    with load(artifact, training.model) as served:
        for _ in range(2):  # all weights, and rows
            with pytest.raises(WeightsMismatch, match="give the model that it was made of"):
                served.swap(Recommender(), rows=training.tracker)
            training.train()
            served.swap(training.model, rows=training.tracker)
            assert torch.equal(served(X), training.model(X).detach())
        served.swap(nn.DataParallel(training.model), rows=training.tracker)
        arrays = {name: value.numpy() for name, value in training.model.state_dict().items()}
        for given in (training.model.state_dict(), arrays):
            training.train()
            assert served.swap(given, rows=training.tracker).kind == "delta"
            assert torch.equal(served(X), training.model(X).detach())


def test_a_model_that_has_got_another_table_needs_a_new_tracker(artifact: Artifact, tmp_path: Path) -> None:
    training = Training()
    with load(artifact, training.model) as served:
        training.model.items.weight = nn.Parameter(torch.zeros(ITEMS, 16))
        for _ in range(2):
            with pytest.raises(WeightsMismatch, match="has got another tensor since, make a new tracker"):
                served.swap(training.model, rows=training.tracker)
        receipt = served.swap(training.model, rows=RowTracker(training.model))
        assert receipt.weights_id == id_of(training.model, artifact, tmp_path)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(2)
def test_whatever_comes_between_a_tracker_leads_to_the_model(
    seed: int, artifact: Artifact, tmp_path: Path, residency: Any
) -> None:
    random, training = Random(seed), Training()
    model, tracker = training.model, training.tracker
    with (
        load(artifact, model, residency=residency, keep_previous="host") as served,
        load(artifact, model) as another,
    ):
        published = None

        def swap(target: Model) -> None:
            receipt = target.swap(model, rows=tracker)
            assert receipt.weights_id == id_of(model, artifact, tmp_path)
            assert torch.equal(target(X), model(X).detach())

        def refuse() -> None:
            with pytest.raises(UnexpectedWeights):
                served.swap(model, rows=tracker, expect="0" * 64)

        def publish_rows(number: int) -> None:
            nonlocal published
            published = publish(model, tmp_path / "out", artifact, step=number, rows=tracker)
            if random.random() < 0.5:
                packed = published.wait(120)
                assert packed.weights_id == id_of(model, artifact, tmp_path)
                if packed.base in ("", served.weights_id):
                    served.swap(packed.path)

        held: list[Any] = []
        steps: dict[str, Callable[[], Any]] = {
            "rows": lambda: swap(served),
            "rows of another": lambda: swap(another),
            "full": lambda: served.swap(model),
            "older": lambda: served.swap(Recommender()),
            "rollback": lambda: served.previous_weights_id and served.rollback(),
            "refused": refuse,
            "discarded": lambda: served.stage(model, rows=tracker).discard(),
            "published": lambda: publish_rows(len(held)),
        }
        kinds = []
        for _ in range(25):
            training.train()
            name = random.choice([*steps, "rows", "rows", "rows"])
            held.append(name)
            steps[name]()
            kinds.append(served.history[-1].kind)
        if published is not None:
            published.wait(120)
        swap(served)
        assert "delta" in kinds
