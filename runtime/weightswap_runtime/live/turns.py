"""The order of changes to the weights: one staging at a time, and a queue for the swaps of threads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock, get_ident

from weightswap_runtime.errors import StagingBusy
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.threads.claims import POLL_SECONDS, Claim, ClaimReference
from weightswap_runtime.threads.forks import renew_in_children
from weightswap_runtime.threads.job import Job


class Turns:
    """The claim that keeps other stagings out until it ends, and the queue of whole swaps."""

    def __init__(self) -> None:
        self._renew()
        renew_in_children(self)
        self._staging: ClaimReference | None = None

    def _renew(self) -> None:
        """Make new locks: a forked child does not have the threads that held the old ones."""
        self._swap_lock = Lock()
        self._claim_lock = RLock()  # reentrant, for signal handlers
        self._swapper: int | None = None

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Wait for the swaps of other threads, then hold the queue. Raises StagingBusy within a swap of this thread."""
        if self._swapper == get_ident():
            raise StagingBusy(
                "a listener runs before its swap has ended, so it cannot swap itself: let another thread do it "
                "after the listener has returned"
            )
        with self._swap_lock:
            try:
                self._swapper = get_ident()
                yield
            finally:
                self._swapper = None

    @contextmanager
    def wait_for_turn(self, check: Check) -> Iterator[None]:
        """Wait as in `queue`, and call `check` meanwhile. For threads in which no signal handler runs."""
        while not self._swap_lock.acquire(timeout=POLL_SECONDS):
            check()
        try:
            self._swapper = get_ident()
            yield
        finally:
            self._swapper = None
            self._swap_lock.release()

    @contextmanager
    def claimed(self, wait: float | None) -> Iterator[Claim]:
        """Keep others from staging and committing within the block."""
        ticket = Claim()
        try:
            self.claim(ticket, wait, None)
            yield ticket
        finally:
            ticket.end()

    def claim(self, ticket: Claim, wait: float | None, job: Job | None) -> None:
        """Keep others from staging until `ticket` ends.

        wait: seconds to wait for an open staging; None: do not wait. Raises StagingBusy, and StageCancelled.
        """
        deadline = time.monotonic() + (wait or 0.0)
        while not self._try_claim(ticket):
            if job is not None:
                job.check()
            if time.monotonic() >= deadline:
                raise StagingBusy(
                    "another staging of this model is open; commit or discard it first"
                    + (f" (waited {wait} s)" if wait else ', or pass busy="wait"')
                )
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _try_claim(self, ticket: Claim) -> bool:
        with self._claim_lock:
            other = self._staging() if self._staging else None
            if other is not None and other is not ticket and other.holds:
                return False
            self._staging = weakref.ref(ticket)
            return True
