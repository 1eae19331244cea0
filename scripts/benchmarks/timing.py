"""Measuring: wall-clock seconds of single calls, alternated with a peer's."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import NamedTuple

Measure = Callable[[], float]


class Pairs(NamedTuple):
    """Figures of a subject and of its peer, taken in turn; the same index is the same moment."""

    subject: list[float]
    peer: list[float]

    def map(self, function: Callable[[float], float]) -> Pairs:
        return Pairs([function(x) for x in self.subject], [function(x) for x in self.peer])


def seconds(function: Callable[[], object]) -> float:
    """Seconds that one call takes; what it returns is freed after the clock has stopped."""
    start = time.perf_counter()
    result = function()
    stop = time.perf_counter()
    del result
    return stop - start


def alternate(subject: Measure, peer: Measure, rounds: int) -> Pairs:
    """Subject, peer, subject, peer, ...: machines drift, neighbours in time do not. The first round is thrown away."""
    subject(), peer()
    taken = [(subject(), peer()) for _ in range(rounds)]
    return Pairs([s for s, _ in taken], [p for _, p in taken])


def per_call(function: Callable[[], object], calls: int) -> Measure:
    """A measure of the seconds per call in a block of `calls`, the loop's own cost included."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return measure


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` (0..1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@contextmanager
def calling(function: Callable[[], object], threads: int) -> Iterator[None]:
    """Threads that call `function` without a pause for the length of the block. Their first error is raised."""
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


@contextmanager
def freed() -> Iterator[None]:
    """Collects garbage when the block ends, so that the next one has the memory."""
    try:
        yield
    finally:
        gc.collect()
