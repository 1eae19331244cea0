"""Page-locked buffers on the way between files and a device, in turns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import NamedTuple

from weightswap_runtime.memory.device import Device, Event, LockedBuffer, Stream
from weightswap_runtime.threads.claims import POLL_SECONDS, Claim, ClaimReference

BUFFER_BYTES = 16 << 20


class _Turn(NamedTuple):
    """A buffer, what must be done before it is filled again, and who fills it."""

    buffer: LockedBuffer
    busy: Event | None
    holder: ClaimReference | None

    @property
    def is_held(self) -> bool:
        holder = self.holder() if self.holder else None
        return holder is not None and holder.holds


class Ring:
    """A few buffers of BUFFER_BYTES, allocated on first use. Any number of threads may take turns.

    A copy from pageable memory would keep the whole device waiting; one from page-locked memory does not.
    """

    def __init__(self, device: Device, count: int, urgent: Ring | None = None) -> None:
        """urgent: a ring for what calls wait for, which must not wait for files."""
        self.urgent = urgent or self
        self._device = device
        self._count = count
        self._changed = Condition()
        self._turns: list[_Turn] = []  # the one that was given back first comes first

    @contextmanager
    def take(self, stream: Stream) -> Iterator[LockedBuffer]:
        """A buffer for the block. What `stream` is asked to copy in it is done before the next turn begins.

        Raises MemoryError where no memory can be page-locked.
        """
        claim = Claim()
        waited = False
        try:
            turn = self._take(claim)
            if turn.busy is not None:
                self._device.finish(turn.busy)
            waited = True
            yield turn.buffer
        finally:
            self._give_back(claim, self._device.mark(stream) if waited else None)

    def _take(self, claim: Claim) -> _Turn:
        with self._changed:
            while not (free := self._free()):
                self._changed.wait(POLL_SECONDS)  # an interrupted thread does not say that it has gone
            turn = free[0]._replace(holder=weakref.ref(claim))
            self._turns = [other for other in self._turns if other.buffer is not turn.buffer] + [turn]
            return turn

    def _free(self) -> list[_Turn]:
        while len(self._turns) < self._count:
            self._turns.insert(0, _Turn(self._device.lock(BUFFER_BYTES), None, None))
        return [turn for turn in self._turns if not turn.is_held]

    def _give_back(self, claim: Claim, busy: Event | None) -> None:
        """`busy`: after it the buffer is free; None: when it was free before."""
        with self._changed:
            mine = [turn for turn in self._turns if turn.holder is not None and turn.holder() is claim]
            self._turns = [turn for turn in self._turns if turn not in mine] + [
                turn._replace(busy=busy or turn.busy, holder=None) for turn in mine
            ]
            claim.end()  # not sooner, or another thread would not know what it has to wait for
            self._changed.notify()
