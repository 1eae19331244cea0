"""Remote objects as byte sources: ranges are requested in parallel, and written directly into the target buffers."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from itertools import accumulate
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from weightswap_runtime.errors import StageCancelled, WeightFileError
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.tensors.digests import digest_of
from weightswap_runtime.threads.claims import POLL_SECONDS

from .retries import persist
from .transport import ObjectPin, Opened, Transient, Transport, changed, too_many_bytes

T = TypeVar("T")
RANGE_BYTES = 8 << 20  # size of a request
MOST_REQUESTS = 10  # at the same time in this process: the size of aiobotocore's connection pool
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
Loop = Callable[[], asyncio.AbstractEventLoop]


def wait_for(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], check: Check) -> T:
    """Run a coroutine on another thread's event loop. It is cancelled if `check` raises, or on an interrupt."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        while not wait((future,), POLL_SECONDS).done:
            check()
        return future.result()
    finally:
        future.cancel()
        del future  # breaks a cycle: the future's error refers to this frame


class Landing:
    """Target memory of responses, which are written to it as they arrive, until it is closed."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self._buffers = buffers
        *self._starts, self.size = accumulate(map(len, buffers), initial=0)
        self._lock = Lock()
        self._closed = False

    def write(self, position: int, data: bytes) -> None:
        """Copy bytes to `position`, counted over all buffers. Raises StageCancelled if the landing is closed."""
        rest = memoryview(data)
        with self._lock:
            if self._closed:
                raise StageCancelled("nobody is waiting for these bytes any more")
            index = bisect_right(self._starts, position) - 1
            while rest:
                begin = position - self._starts[index]
                target = self._buffers[index][begin : begin + len(rest)]
                target[:] = rest[: len(target)]
                position, rest, index = position + len(target), rest[len(target) :], index + 1

    def close(self) -> None:
        """Release the memory. After the return nothing is written to it."""
        self._closed = True  # before the lock: an interrupt may end the wait for it
        with self._lock:
            self._buffers = []


class RemoteObject:
    """ByteSource over a Transport. Up to MOST_REQUESTS ranges of RANGE_BYTES are requested at the same time.

    Received pieces, of at most some hundred kilobytes, are copied to their target immediately.
    """

    unit = 32 << 20

    def __init__(self, where: str, transport: Transport, opened: Opened, loop: Loop, check: Check) -> None:
        self.where = where
        self._transport = transport
        self._pin, self._head, self._settles_in = opened
        self.size, self.tag, _ = self._pin  # the tag is empty if the store has none
        self._settled_at = time.monotonic() + self._settles_in
        # offset, size and digest of reads made while a write could still go undetected
        self._early_reads: list[tuple[int, int, str]] = []
        self._loop = loop
        self._check = check

    @property
    def pin(self) -> ObjectPin:
        """Version that was opened."""
        return self._pin

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        landing, early = Landing(buffers), time.monotonic() < self._settled_at
        try:
            if offset + landing.size <= len(self._head):
                landing.write(0, self._head[offset : offset + landing.size])
            else:
                wait_for(self._loop(), self._read(landing, offset), self._check)
                if early:
                    self._early_reads.append((offset, landing.size, digest_of(buffers)))
        finally:
            landing.close()

    async def _read(self, landing: Landing, offset: int) -> None:
        end = offset + landing.size
        starts = range(offset, end, RANGE_BYTES)
        requests = [
            asyncio.ensure_future(_RangeRequest(self, landing, offset, start, min(start + RANGE_BYTES, end)).run())
            for start in starts
        ]
        try:
            await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            requests.clear()  # breaks cycles: the requests' errors refer to this frame

    async def fetch(self, start: int, stop: int, write: Callable[[bytes], None]) -> None:
        async with _semaphore():
            await self._transport.fetch(self._pin, start, stop, write)

    def await_stable_mtime(self) -> None:
        """Wait until the server's clock has left the second in which the object was written.

        Raises WeightFileError if bytes that were read before are then no longer the same.
        """
        if self._is_whole:
            return
        if not (self._pin.exact_tag or self._pin.modified):
            raise WeightFileError(
                f"{self.where}: has neither digests nor anything that shows when it changes (a strong ETag, "
                "Last-Modified). Pack it with weightswap, or serve it with a strong ETag."
            )
        while (seconds := self._settled_at - time.monotonic()) > 0:
            self._check()
            time.sleep(min(seconds, POLL_SECONDS))
        if self._settles_in:
            self._compare_early_reads()

    def _compare_early_reads(self) -> None:
        """Raise WeightFileError unless early reads give the same bytes again."""
        work = persist(self._transport.open, lambda: f"{self.where}: cannot be read")
        opened = wait_for(self._loop(), work, self._check)
        if opened is None or self._pin.differs(opened.pin) or opened.head != self._head:
            raise changed(self.where)
        for start, size, digest in self._early_reads:
            again = memoryview(bytearray(size))
            self.read_into([again], start)
            if digest_of([again]) != digest:
                raise changed(self.where)
        self._early_reads.clear()

    @property
    def _is_whole(self) -> bool:
        """True if the first response held the whole object, so that no other request is made."""
        return len(self._head) == self.size

    def check_unchanged(self, *, proven: bool = False) -> None:
        if not self._is_whole:
            wait_for(self._loop(), self._probe(), self._check)

    async def _probe(self) -> None:
        pin = await persist(lambda: self._transport.probe(self._pin), lambda: f"{self.where}: cannot be read")
        if pin is None or self._pin.differs(pin):
            raise changed(self.where)

    def close(self) -> None:
        """Do nothing: connections belong to the file system."""


class _RangeRequest:
    """Request for bytes `start` to `stop`. A retry continues where the previous attempt ended."""

    def __init__(self, source: RemoteObject, landing: Landing, base: int, start: int, stop: int) -> None:
        self._source, self._landing = source, landing
        self._base, self._at, self._stop = base, start, stop

    async def run(self) -> None:
        await persist(self._attempt, lambda: f"{self._source.where}: cannot be read at byte {self._at}")

    async def _attempt(self) -> None:
        await self._source.fetch(self._at, self._stop, self._write)
        if self._at < self._stop:
            raise Transient(f"the response ends {self._stop - self._at} bytes early")

    def _write(self, data: bytes) -> None:
        if self._at + len(data) > self._stop:
            raise too_many_bytes(self._source.where)
        self._landing.write(self._at - self._base, data)
        self._at += len(data)


def _semaphore() -> asyncio.Semaphore:
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_REQUESTS))
