"""Updates of a serving model: calls during a staging, cancels, deltas."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Event, Thread

from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Stored, equal, stored, tabled
from timing import in_turn, percentile, seconds

from weightswap_runtime import Model, load, write_delta

WINDOW = 0.1  # seconds of calls for one figure, times the number of rounds
RATE = 200e6  # bytes per second
UNDISTURBED = Goal("ratio", "at most", 1.25)
AT_ONCE = Goal("p99", "at most", 50)
TWENTIETH = Goal("ratio", "at most", 0.05)
CANCELS = 10  # for each round


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each part; it frees its memory before the next one starts."""
    with tabled(settings.megabytes * 1_000_000) as table:
        yield from _calls(table, settings.rounds)
        gc.collect()
    with stored(settings.megabytes * 1_000_000) as large:
        yield from _cancels(large, settings.rounds)
        for residency in ("double", "single"):
            gc.collect()
            yield from _deltas(large, settings.rounds, residency)


def _calls(table: Stored, rounds: int) -> Iterator[Row]:
    """Measure the 99th percentile of one thread's calls in windows with and without continuous staging."""
    model = load(table.artifact, table.versions[0].path)
    for limit in (RATE, None):
        idle, busy = [], []
        for number in range(rounds + 1):
            before = _p99(model, table, WINDOW * rounds)
            during = _p99_while_staging(model, table, WINDOW * rounds, limit)
            if number:
                idle.append(before * 1e6)
                busy.append(during * 1e6)
        table.check(model)
        rate = f"staging {table.size} at {limit / 1e6:.0f} MB/s" if limit else f"staging {table.size}, unlimited"
        goal = UNDISTURBED if limit else None
        yield compared(f"p99 of a call, {rate}", "us", busy, "p99 without staging", idle, goal)
    for callers in (1, 4):
        measures = {"beside": partial(_stage_beside, model, table, callers), "alone": partial(_stage, model, table)}
        timings = in_turn(measures, rounds)
        ms = {name: [1e3 * second for second in values] for name, values in timings.items()}
        table.check(model)
        calling = "1 thread calls" if callers == 1 else f"{callers} threads call"
        what = f"stage {table.size} in the background while {calling}"
        yield compared(what, "ms", ms["beside"], "while none calls", ms["alone"])


def _stage(model: Model, table: Stored) -> float:
    def stage() -> None:
        model.stage(table.versions[1].path, background=True).wait().discard()

    return seconds(stage)


def _stage_beside(model: Model, table: Stored, callers: int) -> float:
    ended = Event()

    def call() -> None:
        while not ended.is_set():
            model(table.tokens)

    threads = [Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        return _stage(model, table)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _p99(model: Model, table: Stored, window: float) -> float:
    timings, end = [], time.perf_counter() + window
    while time.perf_counter() < end:
        timings.append(seconds(lambda: model(table.tokens)))
    return percentile(timings, 0.99)


def _p99_while_staging(model: Model, table: Stored, window: float, limit: float | None) -> float:
    paths, timings = cycle(version.path for version in table.versions), []
    end = time.perf_counter() + window
    staged = model.stage(next(paths), background=True, rate_limit=limit)
    while time.perf_counter() < end:
        if staged.done:
            staged.discard()
            staged = model.stage(next(paths), background=True, rate_limit=limit)
        timings.append(seconds(lambda: model(table.tokens)))
    staged.cancel()
    return percentile(timings, 0.99)


def _cancels(large: Stored, rounds: int) -> Iterator[Row]:
    """Measure from the call of `cancel()` to its return, during a staging at full speed."""
    model = load(large.artifact, large.versions[0].path)
    timings = []
    for number in range(CANCELS * rounds):
        staged = model.stage(large.versions[1].path, background=True)
        time.sleep(0.002 * (number % 10))
        timings.append(seconds(staged.cancel) * 1e3)
    large.check(model)
    yield spread(f"cancel of a staging, {large.size}", "ms", timings, AT_ONCE)


def _deltas(large: Stored, rounds: int, residency: str) -> Iterator[Row]:
    """Measure deltas there and back, against full swaps of the same two sets by another model."""
    for what, scattered in (("1 % of it in blocks", False), ("1 % of its rows, scattered", True)):
        timings = _there_and_back(large, large.changed(0.01, scattered=scattered), rounds, residency)
        millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
        name = f"swap of a delta, {large.size}, {what}, {residency} residency"
        goal = None if scattered else TWENTIETH
        yield compared(name, "ms", millis["delta"], "swap of the full file", millis["full"], goal)
        gc.collect()


def _there_and_back(large: Stored, changed: Path, rounds: int, residency: str) -> dict[str, list[float]]:
    base = large.versions[0].path
    there = write_delta(base, changed, base.with_name("there.safetensors"))
    back = write_delta(changed, base, base.with_name("back.safetensors"))
    delta, full = (load(large.artifact, base, residency=residency) for _ in range(2))  # type: ignore[arg-type]
    deltas, files = cycle((there.path, back.path)), cycle((changed, base))
    delta.swap(next(deltas))  # in double residency the first delta copies a whole set
    full.swap(next(files))
    timings = in_turn({"delta": lambda: _swap(delta, deltas), "full": lambda: _swap(full, files)}, rounds)
    equal(delta(large.tokens), full(large.tokens), f"generation {delta.generation}, by deltas")
    return timings


def _swap(model: Model, paths: Iterator[Path]) -> float:
    return seconds(lambda: model.swap(next(paths)))
