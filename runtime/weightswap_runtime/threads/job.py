"""Progress, cancellation and rate limit of one staging."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from weightswap_runtime.errors import StageCancelled, Unsupported
from weightswap_runtime.options import is_number

from .ending import is_lost
from .forks import renew_in_children

LONGEST_BURST = 0.05  # seconds' worth of bytes that a rate-limited staging moves at once
LONGEST_NAP = 0.02  # seconds within which a cancellation is noticed


class Progress(NamedTuple):
    """Progress of a staging. `phase`: waiting, opening, reading, copying, verifying, or its outcome. Sizes in bytes."""

    phase: str
    bytes_done: int
    bytes_total: int


class Job:
    """Shared state of the threads that work on one staging. `rate_limit` in bytes per second; None: unlimited.

    The threads do all their reading and copying in `steps`, and all other work in pieces of a few milliseconds.
    """

    def __init__(self, rate_limit: float | None = None) -> None:
        if rate_limit is not None and not (is_number(rate_limit) and rate_limit > 0):
            raise Unsupported(f"rate_limit={rate_limit!r}: expected bytes per second, more than 0, or None")
        self.rate_limit = rate_limit
        self._renew()
        renew_in_children(self)
        self.cancelled = False
        self.abandoned = False  # set by a listener, in the staging's own thread
        self.progress = Progress("waiting", 0, 0)
        self._free_at = 0.0  # time.monotonic() at which the next piece may begin

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def unit(self, most: int) -> int:
        """Return how many bytes to move at once: `most`, or fewer if that is too large a burst for the rate limit."""
        return most if self.rate_limit is None else min(most, max(1, int(self.rate_limit * LONGEST_BURST)))

    def begin(self, phase: str, total: int | None = None) -> None:
        """Enter a phase; with `total`, count from 0 again. Raises StageCancelled."""
        self.check()
        with self._lock:
            _, done, before = self.progress
            self.progress = Progress(phase, done, before) if total is None else Progress(phase, 0, total)

    def end(self, phase: str) -> None:
        with self._lock:
            self.progress = self.progress._replace(phase=phase)

    def steps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of pieces of bytes `begin` to `end`, each once the rate allows it; then count it as done.

        Raises StageCancelled.
        """
        step = self.unit(max(1, end - begin))
        for start in range(begin, end, step):
            stop = min(start + step, end)
            self._wait_for_turn(stop - start)
            yield start, stop
            with self._lock:
                phase, done, total = self.progress
                self.progress = Progress(phase, done + stop - start, total)
        self.check()

    def _wait_for_turn(self, nbytes: int) -> None:
        self.check()
        if self.rate_limit is None:
            return
        with self._lock:
            # unused time is lost: a staging that was slow does not catch up in a burst
            turn = max(self._free_at, time.monotonic())
            self._free_at = turn + nbytes / self.rate_limit
        while (remaining := turn - time.monotonic()) > 0:
            time.sleep(min(remaining, LONGEST_NAP))
            self.check()

    def check(self) -> None:
        """Raise StageCancelled if the staging was cancelled, or the interpreter is ending without this thread."""
        if self.cancelled:
            raise StageCancelled("the staging was cancelled; nothing was changed")
        if is_lost():
            raise StageCancelled("the interpreter is shutting down")

    def cancel(self) -> None:
        self.cancelled = True
