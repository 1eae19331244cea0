"""Measurements of wall-clock seconds, each subject in turn with its peers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread

Measure = Callable[[], float]


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call; its result is freed after the clock has stopped."""
    start = time.perf_counter()
    result = function()
    stop = time.perf_counter()
    del result
    return stop - start


def in_turn(measures: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Take every measure once per round, so that neighbours can be compared although the machine's speed drifts.

    Figures with the same index are neighbours in time. Every other round goes backwards, because the order of measures
    can help or harm. The first round is discarded.
    """
    timings: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        order = list(measures.items())
        for name, measure in order if number % 2 else reversed(order):
            figure = measure()
            if number:
                timings[name].append(figure)
    return timings


def per_call(function: Callable[[], object], calls: int) -> Measure:
    """Return the seconds per call in a block of `calls` after an untimed one, including the loop's own cost."""

    def measure() -> float:
        function()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return measure


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0..1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@contextmanager
def calling(function: Callable[[], object], threads: int) -> Iterator[None]:
    """Let threads call `function` without pause during the block. Their first error is raised."""
    stop = Event()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                function()
        except BaseException as error:
            errors.append(error)

    pool = [Thread(target=loop) for _ in range(threads)]
    for thread in pool:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in pool:
            thread.join()
    if errors:
        raise errors[0]
