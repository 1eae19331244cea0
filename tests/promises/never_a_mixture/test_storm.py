"""Calls from many threads while weights change in every way: each output comes from exactly one generation."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.accelerators import ACCELERATOR, moved, on_accelerator, use_own_stream
from tests.support.compiled import needs_compiler
from tests.support.damage import damaged
from tests.support.rows import deltas_between
from tests.support.slow_streams import keep_busy, slow_copies
from tests.support.storm import Ledger, Seen, content, found_in, storm
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Artifact,
    BaseMismatch,
    DigestMismatch,
    Model,
    StageCancelled,
    SwapReceipt,
    WeightFileError,
    load,
)

SETS, THREADS = 4, 8
STEPS, LONG = 40, 1000
MOST_SECONDS = 10.0  # on an accelerator, after each change once
Served = tuple[int, int]  # the sets that `front` and `back` come from


class Deep(nn.Module):
    """Model with enough layers that a mixture of two sets of weights would show."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])
        self.back = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(x))


class Files:
    """Artifact for an engine, its sets of weights, deltas between any two of them, and a damaged file."""

    def __init__(self, folder: Path, engine: str) -> None:
        torch.manual_seed(0)
        self.models = [Deep().eval() for _ in range(SETS)]
        shapes = {"x": {0: Dim("batch", max=32)}}
        x, out = torch.zeros(2, 24), folder / "a.artifact"
        self.artifact: Artifact = export(self.models[0], (x,), out=out, dynamic_shapes=shapes, engines=[engine])
        self.full = [
            pack(model, self.artifact, out=folder / f"v{index}.safetensors").path
            for index, model in enumerate(self.models)
        ]
        self.deltas = deltas_between(self.full, folder)
        self.damaged = damaged(self.full[1], folder / "damaged.safetensors")


FilesOf = Callable[[str], Files]


@pytest.fixture(scope="module")
def files_of(tmp_path_factory: pytest.TempPathFactory) -> FilesOf:
    """Cached function `files_of(engine)`."""
    return cache(lambda engine: Files(tmp_path_factory.mktemp("storm"), engine))


class Mixed:
    """The model, its files, every possible answer, and what each generation serves.

    `answers` has the expected outputs for each input, `tried` those of staged weights for the first input: weights that
    wait on the host are tried on the CPU. `before_call` is called before each call.
    """

    def __init__(
        self, files: Files, residency: str, engine: str = "torch", device: str = "cpu", **options: Any
    ) -> None:
        self.files, self.deltas, self.damaged = files.full, files.deltas, files.damaged
        self.given = [deepcopy(model).to(device) for model in files.models]
        inputs = [torch.randn(batch, 24) for batch in (1, 2, 7, 32)]
        opened = partial(load, files.artifact, self.files[0], engine=engine, device=device, **options)
        if engine == "torch":
            self.inputs: list[Any] = moved(inputs, device)
            self.answers = [self._answers(self.given, x) for x in self.inputs]
            on_host = residency == "single" and options.get("staging") == "host"
            self.tried = self._answers(files.models, inputs[0]) if on_host else self.answers[0]
        else:
            self.inputs = [x.numpy() for x in inputs] if engine == "onnx" else inputs
            self.answers = self._own_answers(opened())
            self.tried = self.answers[0]
        self.model: Model = opened(residency=residency, keep_previous="host")
        self.ledger = Ledger(self.model, (0, 0))
        self.before_call: Callable[[random.Random], None] = lambda choose: None
        self._dice = [random.Random(thread) for thread in range(THREADS)]

    @staticmethod
    @torch.no_grad()
    def _answers(models: list[Deep], x: torch.Tensor) -> dict[bytes, Served]:
        pairs = itertools.product(range(SETS), repeat=2)
        answers = {content(models[back].back(models[front].front(x))): (front, back) for front, back in pairs}
        assert len(answers) == SETS**2
        return answers

    def _own_answers(self, model: Model) -> list[dict[bytes, Served]]:
        """Compute the engine's outputs while nothing else runs."""
        answers: list[dict[bytes, Served]] = [{} for _ in self.inputs]
        for front, back in itertools.product(range(SETS), repeat=2):
            model.swap(self.files[front])
            model.swap(self.files[back], only="back.*")
            for found, x in zip(answers, self.inputs, strict=True):
                found[content(model(x))] = (front, back)
        assert all(len(found) == SETS**2 for found in answers)
        return answers

    def calls(self) -> AbstractContextManager[list[list[list[Seen]]]]:
        """Let threads call without pause during the block."""
        return storm(self._call, THREADS, lambda thread: use_own_stream(self.model.device) if thread % 2 else None)

    def _call(self, thread: int) -> list[Seen]:
        choose = self._dice[thread]
        index = choose.randrange(len(self.inputs))
        x, answers = self.inputs[index], self.answers[index]
        self.before_call(choose)
        if choose.random() < 0.5:
            return [self.ledger.watch(lambda: self.model(x), answers)]
        with self.model.pin() as pinned:
            return [Seen(found_in(answers, pinned(x)), pinned.generation, pinned.generation) for _ in range(2)]

    def check(self, seen: list[list[list[Seen]]]) -> list[set[int | None]]:
        """Check all answers; return the generations in which each thread got one."""
        flat = [[*chain(*thread)] for thread in seen]
        self.ledger.check(flat)
        return [{each.last for each in thread} for thread in flat]


class Changes:
    """Changes of the weights."""

    def __init__(self, mixed: Mixed, choose: random.Random) -> None:
        self._mixed, self._model, self._files, self._choose = mixed, mixed.model, mixed.files, choose
        self._ledger, self._previous = mixed.ledger, mixed.ledger.now
        self.swap()  # for a rollback

    def any(self) -> None:
        self._choose.choice(self.all)()

    @property
    def all(self) -> list[Callable[[], None]]:
        commits = [self.swap, self.part, self.delta, self.rollback, self.background, self.memory]
        return [*commits, self.cancel, self.discard, self.refused, self.missing]

    def _committed(self, receipt: SwapReceipt, served: Served) -> None:
        self._previous = self._ledger.now
        self._ledger.committed(receipt, served)

    def swap(self) -> None:
        new = self._choose.randrange(SETS)
        self._committed(self._model.swap(self._files[new]), (new, new))

    def part(self) -> None:
        new, front, back = self._choose.randrange(SETS), *self._ledger.now
        if self._choose.random() < 0.5:
            self._committed(self._model.swap(self._files[new], only="front.*"), (new, back))
        else:
            self._committed(self._model.swap(self._files[new], only=["back.*"]), (front, new))

    def delta(self) -> None:
        base, new = self._ledger.now[0], self._choose.randrange(SETS - 1)
        new += new >= base
        if self._ledger.now == (base, base):
            self._committed(self._model.swap(self._mixed.deltas[base, new]), (new, new))
        else:
            with pytest.raises(BaseMismatch):
                self._model.swap(self._mixed.deltas[base, new])

    def rollback(self) -> None:
        self._committed(self._model.rollback(), self._previous)

    def background(self) -> None:
        new = self._choose.randrange(SETS)
        self._committed(self._model.stage(self._files[new], background=True, rate_limit=1e8).commit(), (new, new))

    def memory(self) -> None:
        new, module = self._choose.randrange(SETS), self._mixed.given
        given: Any = self._choose.choice(
            [module[new], module[new].state_dict(), iter(module[new].state_dict().items())]
        )
        self._committed(self._model.stage(given, background=self._choose.random() < 0.3).commit(), (new, new))

    def cancel(self) -> None:
        only = self._choose.choice([None, "front.*"])
        staged = self._model.stage(self._files[0], only=only, background=True, rate_limit=1e4)
        time.sleep(self._choose.random() * 0.004)
        staged.cancel()
        with pytest.raises(StageCancelled):
            staged.wait()

    def discard(self) -> None:
        with self._model.stage(self._files[self._choose.randrange(SETS)]) as staged:
            assert content(staged(self._mixed.inputs[0])) in self._mixed.tried

    def refused(self) -> None:
        with pytest.raises(DigestMismatch):
            self._model.swap(self._mixed.damaged, only=self._choose.choice([None, "*"]))

    def missing(self) -> None:
        with pytest.raises(WeightFileError):
            self._model.swap(self._files[0].with_name("nowhere.safetensors"))


@pytest.mark.parametrize("engine", ["torch", pytest.param("aoti", marks=[needs_compiler, pytest.mark.slow]), "onnx"])
@pytest.mark.parametrize("steps", [STEPS, pytest.param(LONG, marks=pytest.mark.slow)])
def test_eight_threads_call_while_weights_change_in_every_way(
    engine: str, steps: int, files_of: FilesOf, residency: str
) -> None:
    mixed = Mixed(files_of(engine), residency, engine)
    changes = Changes(mixed, random.Random(99))
    with mixed.calls() as seen:
        for change in changes.all:
            change()
        for _ in range(steps):
            changes.any()
    assert len(set().union(*mixed.check(seen))) > steps // 20  # calls and commits were mixed


@on_accelerator
@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("late", [0.002, 0.0], ids=["late", ""])  # the first one shows more
def test_the_storm_on_an_accelerator(
    device: str, staging: str, late: float, files_of: FilesOf, residency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = Mixed(files_of("torch"), residency, device=device, staging=staging)
    if late and ACCELERATOR == "cuda":  # otherwise they end too soon for a missing wait to show
        slow_copies(monkeypatch, late)
        mixed.before_call = lambda choose: keep_busy(choose.random() * late)
    changes = Changes(mixed, random.Random(5))
    with mixed.calls() as seen:
        for change in changes.all:
            change()
        end = time.monotonic() + MOST_SECONDS
        for _ in range(100 if late else 500):
            if time.monotonic() < end:
                changes.any()
    mixed.check(seen)
    assert len(mixed.ledger) > 10


def test_swaps_from_several_threads_run_one_after_another(files_of: FilesOf, residency: str) -> None:
    files = files_of("torch")
    model = load(files.artifact, files.full[0], residency=residency)  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as pool:
        receipts = list(pool.map(model.swap, files.full * 3))
    assert sorted(receipt.generation for receipt in receipts) == list(range(1, 3 * SETS + 1))
