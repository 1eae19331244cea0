"""Updates of a few rows of a large table, against `index_copy_` of the same rows and against swaps of the full file."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import torch
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import equal
from timing import in_turn, percentile, seconds
from torch import nn

from weightswap_exporter import RowTracker, export, pack, publish
from weightswap_exporter.packing import Packed
from weightswap_runtime import Model, load, write_delta

WIDTHS = (64, 16)  # of a table, in float32
SHARES = (0.01, 0.001, 0.0001)  # of its rows; the first swap of the largest makes the hash trees of all blocks
AGAINST_COPY = {"double": Goal("ratio", "at most", 12), "single": Goal("ratio", "at most", 15)}
AGAINST_FULL = {0.01: Goal("ratio", "at most", 0.3), 0.0001: Goal("ratio", "at most", 0.02)}
PAUSE = Goal("ratio", "at most", 1.5)
AT_ONCE = Goal("p99", "at most", 1)
OF_FILES = {64: Goal("ratio", "at most", 1.1), 16: Goal("ratio", "at most", 1.2)}
OF_TREES = Goal("ratio", "at most", 0.07)
TEN_TIMES = Goal("ratio", "at most", 1.3)
OF_TRAINERS = Goal("ratio", "at most", 25)
SERVED = Goal("median", "at most", 500)
POLL = 0.1  # seconds
UNDISTURBED = Goal("ratio", "at most", 1.2)
WINDOW = 3.0  # seconds of calls for one figure
EVERY = 1.0  # seconds between two updates meanwhile


class Recommender(nn.Module):
    """A table that sums rows, and a small network."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, width, mode="sum")
        self.network = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """ids: int64 [n]. offsets: int64 [bags]. Returns float32 [bags, 1]."""
        return self.network(self.table(ids, offsets))


@dataclass(frozen=True)
class Change:
    """Other values of some rows, and the delta that brings them."""

    ids: torch.Tensor
    values: torch.Tensor
    delta: Path


class Subject:
    """A model, and files."""

    def __init__(self, folder: Path, nbytes: int, width: int) -> None:
        self.folder, self.width = folder, width
        self.rows = nbytes // (4 * width)
        torch.manual_seed(0)
        self.eager = Recommender(self.rows, width).eval()
        self.table = self.eager.table.weight.data
        self.inputs = torch.arange(0, self.rows, self.rows // 64)[:64], torch.arange(0, 64, 8)
        self.artifact = export(self.eager, self.inputs, out=folder / "artifact")
        self.first = pack(self.eager, self.artifact, out=folder / "first.safetensors").path
        self._last, self._numbers = self.first, count()

    @property
    def name(self) -> str:
        return f"{self.rows / 1e6:.2g}M x {self.width}"

    def change(self, rows: int) -> Change:
        """Change so many random rows of the table, and write the delta from the values before."""
        ids = torch.randperm(self.rows)[:rows].sort()[0]
        self.table[ids] = self.table[ids] * 1.01 + 0.01
        number = next(self._numbers)
        new = pack(self.eager, self.artifact, out=self.folder / f"full-{number}.safetensors").path
        delta = write_delta(self._last, new, self.folder / f"delta-{number}.safetensors").path
        if self._last != self.first:
            self._last.unlink()
        self._last = new
        return Change(ids, self.table[ids], delta)

    def load(self, residency: str) -> Model:
        keep = "host" if residency == "single" else None
        return load(self.artifact, self.first, residency=residency, keep_previous=keep)  # type: ignore[arg-type]

    def check(self, model: Model) -> None:
        """Raise WrongOutput unless a model with the last weights answers as eager does."""
        with torch.no_grad():
            equal(model(*self.inputs), self.eager(*self.inputs), f"generation {model.generation}")


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each part; it frees its memory before the next one starts."""
    nbytes = settings.megabytes * 1_000_000
    for width in WIDTHS:
        with TemporaryDirectory() as folder:
            subject = Subject(Path(folder), nbytes, width)
            yield from _swaps(subject, settings.rounds)
            if width == WIDTHS[0]:
                yield from _calls(subject, settings.rounds)
            yield from _from_memory(subject, settings.rounds)
            yield from _publications(subject, settings.rounds)
        del subject
        gc.collect()
    yield from _sizes(nbytes, settings.rounds)


def _swaps(subject: Subject, rounds: int) -> Iterator[Row]:
    before = subject.table.clone()
    changes = {share: [subject.change(int(subject.rows * share)) for _ in range(rounds + 1)] for share in SHARES}
    for share, [change, *_] in changes.items():
        size, data = change.delta.stat().st_size, change.ids.numel() * 4 * subject.width
        what = f"file of {share:.2%} of the rows, {subject.name}"
        yield compared(what, "MB", [size / 1e6], "their bytes", [data / 1e6], OF_FILES[subject.width])
    for residency in ("double", "single"):
        model = subject.load(residency)
        subject.table.copy_(before)
        measured = {share: _measure(subject.table, model, changes[share]) for share in SHARES}
        subject.check(model)
        size, table = model._store.trees.nbytes / 1e6, subject.table.nbytes / 1e6
        yield compared(f"hash trees, {subject.name}", "MB", [size], "the table", [table], OF_TREES)
        full = [seconds(partial(model.swap, subject.first)) * 1e3 for _ in range(rounds + 1)][1:]
        for share, figures in measured.items():
            yield from _report(f"{share:.2%} of the rows, {subject.name}, {residency} residency", figures, full, share)
        model.close()
        gc.collect()


@dataclass(frozen=True)
class Figures:
    """Milliseconds of each change."""

    copies: list[float]
    swaps: list[float]
    pauses: list[float]
    rollbacks: list[float]
    single: bool


def _measure(table: torch.Tensor, model: Model, changes: list[Change]) -> Figures:
    """Make each change in a table and in a model; the first one, which builds the trees, does not count."""
    figures = Figures([], [], [], [], model.residency == "single")
    for change in changes:
        figures.copies.append(seconds(partial(table.index_copy_, 0, change.ids, change.values)) * 1e3)
        start = time.perf_counter()
        receipt = model.swap(change.delta)
        figures.swaps.append((time.perf_counter() - start) * 1e3)
        figures.pauses.append(receipt.seconds_paused * 1e3)
        figures.rollbacks.append(seconds(model.rollback) * 1e3)
        model.rollback()
    for each in (figures.copies, figures.swaps, figures.pauses, figures.rollbacks):
        del each[0]
    return figures


def _report(what: str, figures: Figures, full: list[float], share: float) -> Iterator[Row]:
    against_copy = AGAINST_COPY["single" if figures.single else "double"]
    yield compared(f"swap of {what}", "ms", figures.swaps, "index_copy_", figures.copies, against_copy)
    yield compared(f"swap of {what}", "ms", figures.swaps, "swap of the full file", full, AGAINST_FULL.get(share))
    if figures.single:
        yield compared(f"pause for {what}", "ms", figures.pauses, "index_copy_", figures.copies, PAUSE)
        yield compared(f"rollback of {what}", "ms", figures.rollbacks, "index_copy_", figures.copies, PAUSE)
    else:
        yield spread(f"rollback of {what}", "ms", figures.rollbacks, AT_ONCE)


def _from_memory(subject: Subject, rounds: int) -> Iterator[Row]:
    """Measure swaps of a live table's rows; the first one, which builds the trees, does not count."""
    for residency in ("double", "single"):
        model = subject.load(residency)
        model.swap(subject.eager)
        for share in SHARES:
            count = int(subject.rows * share)
            copies, swaps = [], []
            for _ in range(rounds + 1):
                ids, values = torch.randperm(subject.rows)[:count].sort()[0], torch.rand(count, subject.width)
                copies.append(seconds(partial(subject.table.index_copy_, 0, ids, values)) * 1e3)
                swaps.append(seconds(partial(model.swap, subject.eager, rows={"table.weight": ids})) * 1e3)
            what = f"swap of {share:.2%} of the rows from memory, {subject.name}, {residency} residency"
            yield compared(what, "ms", swaps[1:], "index_copy_", copies[1:], AGAINST_COPY[residency])
        subject.check(model)
        model.close()
        gc.collect()


def _publications(subject: Subject, rounds: int) -> Iterator[Row]:
    """Measure from a step that has changed rows to the file, and to the first answer with them."""
    outbox = subject.folder / "outbox"
    tracker = RowTracker(subject.eager, tables=["table.weight"])
    steps = count()

    def changed(rows: int) -> float:
        """Do as a step that changes random rows; return the milliseconds of the change alone."""
        ids = torch.randperm(subject.rows)[:rows].sort()[0]
        values = torch.rand(rows, subject.width)  # not read from the table, which would have these rows in the cache
        taken = seconds(lambda: subject.table.index_copy_(0, ids, values)) * 1e3
        tracker.mark("table.weight", ids)
        return taken

    def published() -> Packed:
        return publish(subject.eager, outbox, subject.artifact, step=next(steps), rows=tracker, full_every=1000).wait()

    published()
    for share in SHARES[:2]:
        copies, files = [], []
        for _ in range(rounds + 1):
            copies.append(changed(int(subject.rows * share)))
            files.append(seconds(published) * 1e3)
        what = f"file of {share:.2%} of the rows, {subject.name}, from a trainer"
        yield compared(what, "ms", files[1:], "index_copy_", copies[1:], OF_TRAINERS)
    served = []
    with subject.load("double") as model:
        model.watch(outbox, POLL)
        for _ in range(rounds + 1):
            changed(int(subject.rows * 0.001))
            start = time.perf_counter()
            weights_id = published().weights_id
            while model.weights_id != weights_id:
                time.sleep(0.001)
            model(*subject.inputs)
            served.append((time.perf_counter() - start) * 1e3)
        subject.check(model)
    what = f"from a step with 0.1 % of the rows to an answer, {subject.name}, polled each {POLL} s"
    yield spread(what, "ms", served[1:], SERVED)


def _calls(subject: Subject, rounds: int) -> Iterator[Row]:
    """Measure the 99th percentile of one thread's calls in windows with an update each second, and without."""
    model = subject.load("double")
    model.swap(subject._last)
    deltas = iter([subject.change(int(subject.rows * 0.001)).delta for _ in range(2 + int(rounds * WINDOW / EVERY))])
    for _ in range(2):
        model.swap(next(deltas))
    quiet, busy = [], []
    for _ in range(rounds):
        quiet.append(_p99(model, subject) * 1e6)
        stop = Event()

        def update(stop: Event = stop) -> None:
            while not stop.wait(EVERY):
                model.swap(next(deltas))

        thread = Thread(target=update)
        thread.start()
        busy.append(_p99(model, subject) * 1e6)
        stop.set()
        thread.join()
    model.close()
    what = f"p99 of a call, 0.1 % of the rows swapped each second, {subject.name}"
    yield compared(what, "us", busy, "without swaps", quiet, UNDISTURBED)


def _swap(model: Model, files: Iterator[Path]) -> float:
    return seconds(lambda: model.swap(next(files))) * 1e3


def _p99(model: Model, subject: Subject) -> float:
    timings, end = [], time.perf_counter() + WINDOW
    while time.perf_counter() < end:
        timings.append(seconds(lambda: model(*subject.inputs)))
    return percentile(timings, 0.99)


def _sizes(nbytes: int, rounds: int) -> Iterator[Row]:
    """Measure swaps of the same number of rows in two tables, one ten times as large."""
    models, deltas, width = [], [], WIDTHS[0]
    with TemporaryDirectory() as folder:
        for name, size in (("large", nbytes), ("small", nbytes // 10)):
            path = Path(folder) / name
            path.mkdir()
            subject = Subject(path, size, width)
            deltas.append(iter([subject.change(nbytes // (4 * width) // 1000).delta for _ in range(rounds + 1)]))
            models.append(subject.load("double"))
        measures = {
            name: partial(_swap, model, files)
            for name, model, files in zip(("large", "small"), models, deltas, strict=True)
        }
        timings = in_turn(measures, rounds)
    what = f"swap of {nbytes // (4 * width) // 1000} rows"
    yield compared(what, "ms", timings["large"], "in a table of a tenth", timings["small"], TEN_TIMES)
