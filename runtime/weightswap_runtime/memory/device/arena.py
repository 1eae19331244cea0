"""Memory of a device at addresses that never change, holding one full set of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from blake3 import blake3

from weightswap_runtime.errors import lacks_memory
from weightswap_runtime.format.weight_file import ALIGNMENT
from weightswap_runtime.memory.arena import Arena, ArenaLayout, ByteRange, allocate, copy_bytes
from weightswap_runtime.memory.device import Buffer, Device, Event, LockedBuffer, Stream
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .capturing import check_not_capturing
from .ring import BUFFER_BYTES, Ring

LEAST = 64 << 20  # bytes of a set whose digests the device computes


class Copy(NamedTuple):
    """Bytes of a buffer, from `begin` on, that belong at an offset of an arena."""

    offset: int
    begin: int
    nbytes: int


def plan_runs(slots: Sequence[ByteRange]) -> tuple[list[int], list[Copy]]:
    """Where each slot lies in a buffer, so that neighbours in the arena move in one copy, with the gaps between them.

    A gap that is smaller than ALIGNMENT belongs to no weight.
    """
    begins: list[int] = []
    runs: list[Copy] = []
    for offset, size in slots:
        last = runs[-1] if runs else None
        if last and 0 <= (gap := offset - last.offset - last.nbytes) < ALIGNMENT:
            begins.append(last.begin + last.nbytes + gap)
            runs[-1] = last._replace(nbytes=last.nbytes + gap + size)
        else:
            begin = -(-(last.begin + last.nbytes) // ALIGNMENT) * ALIGNMENT if last else 0
            begins.append(begin)
            runs.append(Copy(offset, begin, size))
    return begins, runs


class Region:
    """One allocation on a device. Who uses it and who writes to it is in order by streams; the host waits for nobody.

    A call says `use()` first: its stream then waits for the last `writing()`. That waits for all streams in which calls
    were, from the moment it begins on; that no call begins meanwhile is the gate's affair. A stream that is not torch's
    own may be gone by then: what writes waits for the end of each call in it, which says `leave()`.
    """

    most = BUFFER_BYTES - (1 << 20)  # room for the gaps between slots

    def __init__(self, device: Device, nbytes: int, ring: Ring) -> None:
        """Raises MemoryError."""
        self.device = device
        self.buffer: Buffer = device.allocate(max(1, nbytes))
        self.address = self.buffer.address
        self._ring = ring
        self._written: Event = device.mark(device.staging)  # what had the memory before may not be done yet
        self._users: dict[int, tuple[Stream, Event]] = {}
        self._writer: Stream | None = None

    def use(self) -> bool:
        """Let the thread's current stream read the memory, from now on until something is written.

        Returns whether `leave` must follow the call: the stream is none of torch's, and is not remembered. Raises
        Unsupported for one that cannot be in order.
        """
        key, written = self.device.current_key(), self._written
        known = self._users.get(key)
        if known is not None and known[1] is written:
            return False
        stream = self.device.current()
        foreign = self.device.is_foreign(stream)
        self.device.wait(stream, written)
        if foreign:
            return True
        if known is None:
            self.device.lend(self.buffer, stream)
        self._users[key] = stream, written
        return False

    def leave(self) -> None:
        """Let what writes here, and what has the memory later, wait for what the current stream was asked for."""
        mark = self.device.mark(self.device.current())
        for stream in (self.device.staging, self.device.commits):
            self.device.wait(stream, mark)

    def check_streams(self) -> None:
        """Raise DeviceError where a writing would become a part of what an application captures."""
        for stream, _ in list(self._users.values()):
            check_not_capturing(self.device, stream)

    @contextmanager
    def writing(self, urgent: bool = False, join: bool = False) -> Iterator[None]:
        """A block that writes in a stream of its own, in order with all calls. It is not the thread's current stream.

        join: within another such block it does nothing; elsewhere calls may begin and go on meanwhile. Raises what
        `check_streams` raises, with nothing done.
        """
        if join and self._writer is not None:
            yield
            return
        self.check_streams()
        stream = self.device.commits if urgent else self.device.staging
        try:
            self._writer = stream
            for key, known in list(self._users.items()):
                self.device.wait(stream, self.device.mark(known[0]))
                if not join and self._users.get(key) is known:  # it comes again with its next call
                    del self._users[key]
            with self.device.on(stream):
                self.use()
            yield
        finally:
            self._writer = None
            self._written = self.device.mark(stream)

    @property
    def holds_calls(self) -> bool:
        """Whether something urgent is being written."""
        return self._writer is self.device.commits

    def stream(self) -> AbstractContextManager[object]:
        """A block whose work is done where that of `writing` is."""
        return self.device.on(self._stream)

    def _take(self) -> AbstractContextManager[LockedBuffer]:
        ring = self._ring.urgent if self._stream is self.device.commits else self._ring
        return ring.take(self._stream)

    @property
    def _stream(self) -> Stream:
        return self._writer or self.device.staging

    @contextmanager
    def room(self, slots: Sequence[ByteRange]) -> Iterator[list[memoryview]]:
        """Page-locked memory, from which the slots' content goes to the device. For more than `most`, any memory."""
        begins, runs = plan_runs(slots)
        if runs and runs[-1].begin + runs[-1].nbytes > BUFFER_BYTES:
            large = [memoryview(allocate(slot.nbytes)) for slot in slots]
            yield large
            for slot, data in zip(slots, large, strict=True):
                self.write(slot.offset, data)
            return
        with self._take() as buffer:
            yield [buffer.view[begin : begin + slot.nbytes] for begin, slot in zip(begins, slots, strict=True)]
            with self.stream():
                for offset, begin, nbytes in runs:
                    self.device.copy(self.buffer, offset, buffer, begin, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes to an offset, through the ring."""
        for start in range(0, len(data), BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            with self.room([ByteRange(offset + start, len(part))]) as (target,):
                copy_bytes(target, part)

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes from an offset, through the ring; the host waits for them."""
        for start in range(0, len(target), BUFFER_BYTES):
            part = target[start : start + BUFFER_BYTES]
            with self._take() as buffer:
                self.download(offset + start, buffer, 0, len(part))
                copy_bytes(part, buffer.view[: len(part)])

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """A copy of bytes."""
        memory = memoryview(allocate(nbytes))
        self.read(offset, memory)
        return memory

    def download(self, offset: int, target: LockedBuffer, at: int, nbytes: int) -> None:
        """Copy bytes to page-locked memory; the host waits for them."""
        with self.stream():
            self.use()
            self.device.copy(target, at, self.buffer, offset, nbytes)
            self.device.finish(self.device.mark(self._stream))

    def take_from(self, source: Region, runs: Iterable[Copy]) -> None:
        """Copy runs of bytes; the host waits for nothing."""
        with self.stream():
            source.use()
            for offset, begin, nbytes in runs:
                self.device.copy(self.buffer, offset, source.buffer, begin, nbytes)

    def beside(self, nbytes: int) -> Region:
        """Other memory of the same device. Raises MemoryError."""
        return Region(self.device, nbytes, self._ring)

    def synchronize(self) -> None:
        """Keep the host waiting until all that was written is there. Raises what the device reports."""
        self.device.finish(self._written)


class DeviceArena(Region):
    """Memory of a device that holds one full set of weights."""

    piece = 1 << 30

    def __init__(self, device: Device, layout: ArenaLayout, ring: Ring, *, serves: bool) -> None:
        """serves: whether it stays as long as its model, and not just for one staging. Raises MemoryError."""
        super().__init__(device, layout.nbytes, ring)
        self.layout = layout
        self.serves = serves

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        step = self.layout.nbytes if isinstance(other, DeviceArena) else BUFFER_BYTES
        parts = self.layout.whole.split(max(1, step))
        workers.run_all(lambda part: other.copy_part(self, part.offset, part.end), parts)

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of an arena of the same layout; the host waits only for pageable memory."""
        if isinstance(other, DeviceArena):
            self.take_from(other, [Copy(begin, begin, end - begin)])
        else:
            self.write(begin, other.fetch(begin, end - begin))

    @property
    def computes_digests(self) -> bool:
        """Whether the device computes digests of large sets sooner than the host."""
        if self.layout.nbytes < LEAST:
            return False
        with self.stream():  # it may be measured, which must not wait for calls
            self.use()
            return self.device.hasher(self.buffer) is not None

    def digests(self, parts: Sequence[ByteRange]) -> list[bytes] | None:
        """Those of parts of at most a block each; None where the host has another for one of the largest.

        None, too, where they cannot be computed.
        """
        hasher = self.device.hasher(self.buffer)
        if hasher is None:
            return None
        with self.stream():
            self.use()
            try:
                digests = hasher.digests(self.buffer, parts)
            except Exception as error:
                if not lacks_memory(error):  # there may be some the next time
                    self.device.distrust_hasher(f"{type(error).__name__}: {error}")
                return None
        index, part = max(enumerate(parts), key=lambda each: each[1].nbytes)
        if digests[index] == blake3(self.fetch(*part)).digest():
            return digests
        self.device.distrust_hasher("the device has computed another for a block of weights")
        return None
