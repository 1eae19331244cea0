"""The work of one staging: how far it is, how to stop it, how fast it may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from weightswap_runtime.errors import StageCancelled, Unsupported
from weightswap_runtime.options import is_number

from .ending import is_lost
from .forks import renew_in_children

LONGEST_BURST = 0.05  # seconds' worth of bytes that a limited staging does at once
LONGEST_NAP = 0.02  # seconds; how soon a cancel is noticed


class Progress(NamedTuple):
    """How far a staging is. `phase`: waiting, opening, reading, copying, verifying, or how it ended. Sizes in bytes."""

    phase: str
    bytes_done: int
    bytes_total: int


class Job:
    """Shared by the threads that work on one staging. `rate_limit` in bytes per second; None: as fast as it goes.

    The threads do all their reading and copying in `steps`, and what else they do in pieces of a few milliseconds.
    """

    def __init__(self, rate_limit: float | None = None) -> None:
        if rate_limit is not None and not (is_number(rate_limit) and rate_limit > 0):
            raise Unsupported(f"rate_limit={rate_limit!r}: expected bytes per second, more than 0, or None")
        self.rate_limit = rate_limit
        self._renew()
        renew_in_children(self)
        self.cancelled = False
        self.abandoned = False  # by a listener, in the staging's own thread
        self.progress = Progress("waiting", 0, 0)
        self._free_at = 0.0  # when the next piece may begin

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def unit(self, wanted: int) -> int:
        """How many bytes to move at once where `wanted` suits the file: fewer, if those were too much of a burst."""
        return wanted if self.rate_limit is None else min(wanted, max(1, int(self.rate_limit * LONGEST_BURST)))

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
        """Bytes `begin` to `end` in small pieces, each as soon as the rate allows it, and then counted as done.

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
            # what was not used before is lost: a staging that was slow does not make up for it in a burst
            turn = max(self._free_at, time.monotonic())
            self._free_at = turn + nbytes / self.rate_limit
        while (left := turn - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_NAP))
            self.check()

    def check(self) -> None:
        """Raise StageCancelled if the staging was cancelled, or the interpreter ends without this thread."""
        if self.cancelled:
            raise StageCancelled("the staging was cancelled; nothing was changed")
        if is_lost():
            raise StageCancelled("the interpreter is ending")

    def cancel(self) -> None:
        self.cancelled = True
