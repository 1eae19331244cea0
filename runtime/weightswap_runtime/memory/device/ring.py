"""Page-locked buffers for copies between files and a device, used in turns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import NamedTuple

from weightswap_runtime.memory.available import available
from weightswap_runtime.memory.device import Device, Event, LockedBuffer, Stream
from weightswap_runtime.threads.claims import POLL_SECONDS, Claim, ClaimReference

BUFFER_BYTES = 16 << 20
SHARE = 8  # at most 1/SHARE of the host's free memory is page-locked


class _Turn(NamedTuple):
    """A buffer, the event to wait for before it is filled again, and the claim of the thread that fills it."""

    buffer: LockedBuffer
    busy: Event | None
    holder: ClaimReference | None

    @property
    def is_held(self) -> bool:
        holder = self.holder() if self.holder else None
        return holder is not None and holder.holds


class Ring:
    """A few buffers of BUFFER_BYTES, allocated on first use at the latest. Any number of threads may take turns.

    A copy from pageable memory would stall the whole device; one from page-locked memory does not.
    """

    def __init__(self, device: Device, count: int, urgent: Ring | None = None) -> None:
        """urgent: a ring for copies that calls wait for, which must not wait for files."""
        self.urgent = urgent or self
        self._device = device
        self._count = count
        self._changed = Condition()
        self._turns: list[_Turn] = []  # the buffer that was returned first comes first

    def allocate(self) -> None:
        """Allocate all buffers, or as many as fit a share of the host's free memory and can be locked, at least one.

        Called in `load()`: each takes milliseconds, in which the driver serves no other thread. Raises MemoryError.
        """
        free = available()
        most = self._count if free is None else min(self._count, max(1, free // SHARE // BUFFER_BYTES))
        with self._changed:
            while len(self._turns) < most:
                try:
                    self._turns.insert(0, _Turn(self._device.lock(BUFFER_BYTES), None, None))
                except MemoryError:
                    if not self._turns:
                        raise
                    break
        if self.urgent is not self:
            self.urgent.allocate()

    @contextmanager
    def take(self, stream: Stream) -> Iterator[LockedBuffer]:
        """Yield a buffer. The block's copies in `stream` are done before the buffer is used again.

        Raises MemoryError if there is no buffer yet and no memory can be page-locked.
        """
        claim = Claim()
        is_free = False
        try:
            turn = self._take(claim)
            if turn.busy is not None:
                self._device.finish(turn.busy)
            is_free = True
            yield turn.buffer
        finally:
            self._give_back(claim, self._device.mark(stream) if is_free else None)

    def _take(self, claim: Claim) -> _Turn:
        with self._changed:
            if not self._turns:
                self.allocate()
            while (free := next((turn for turn in self._turns if not turn.is_held), None)) is None:
                self._changed.wait(POLL_SECONDS)  # an interrupted thread does not notify
            turn = free._replace(holder=weakref.ref(claim))
            self._turns = [other for other in self._turns if other.buffer is not turn.buffer] + [turn]
            return turn

    def _give_back(self, claim: Claim, busy: Event | None) -> None:
        """busy: the event after which the buffer is free; None: as before."""
        with self._changed:
            held = [turn for turn in self._turns if turn.holder is not None and turn.holder() is claim]
            self._turns = [turn for turn in self._turns if turn not in held] + [
                turn._replace(busy=busy or turn.busy, holder=None) for turn in held
            ]
            claim.end()  # not sooner, or another thread would miss the event that it has to wait for
            self._changed.notify()
