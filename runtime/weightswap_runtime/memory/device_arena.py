"""A set of weights in an accelerator's memory, where streams keep calls and writes in order without the host.

A copy from ordinary host memory would stall the whole device. What comes from files therefore passes through a ring of
page-locked buffers, which all models on a device share.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from weightswap_runtime.byte_ranges import CHUNK, ByteRanges
from weightswap_runtime.errors import DeviceError, Unsupported, lacks_memory
from weightswap_runtime.format.safetensors import ALIGNMENT
from weightswap_runtime.jobs import POLL_SECONDS, Claim, ClaimReference
from weightswap_runtime.native import UPLOAD_BYTES, Offsets, as_bytes, copy_bytes
from weightswap_runtime.tensors import block_count
from weightswap_runtime.threads import WorkerThreads

from .arena import Arena, ArenaLayout, BlockTable, ByteRange, Content, Copy, Inspected, Inspection, Rows, allocate

if TYPE_CHECKING:
    from torch import Event, Stream

    from .torch_device import Accelerator, TorchBuffer, TorchInspector

BUFFER_BYTES = 16 << 20  # of each buffer of a ring
SHARE = 8  # a ring locks at most 1/SHARE of the host's free memory: a device has two, for stagings and for commits
LEAST = 64 << 20  # bytes of the smallest set that the device inspects
WINDOW = 256 << 20  # bytes that are inspected at once, while more are copied


class Region:
    """One allocation on a device. Streams keep calls and writes in order; the host never waits.

    A call begins with `use()`: its stream then waits for the last `writing()`. That waits for all streams that calls
    have used; the gate sees to it that no call begins meanwhile. A stream that is neither torch's nor ours may be
    destroyed by then, so each call in such a stream ends with `leave()`, and writes wait for the call instead.
    """

    apart = BUFFER_BYTES
    most = BUFFER_BYTES - (1 << 20)  # leaves space in a buffer for the gaps between slots

    def __init__(self, device: Accelerator, nbytes: int, ring: Ring) -> None:
        """Raises MemoryError."""
        self.device = device
        self.buffer = device.allocate(max(1, nbytes))
        self.address = self.buffer.address
        self._ring = ring
        self._written = device.mark(device.staging)  # the memory's previous user may not be done yet
        # streams of calls by key, each with the `_written` that it waits for: usually still the last, so that a call
        # costs one look-up
        self._users: dict[int, tuple[Stream, Event]] = {}
        self._writer: Stream | None = None  # of the `writing` block

    def use(self) -> bool:
        """Let the thread's current stream read the memory until the next write.

        Returns whether `leave` must follow the call, because the stream is foreign and not remembered. Raises
        Unsupported for a stream that cannot be kept in order.
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
        if known is None:  # else the allocator would hand out dropped memory while a call still reads it
            self.device.lend(self.buffer, stream)
        self._users[key] = stream, written
        return False

    def leave(self) -> None:
        """Let writes, and the next user of the memory, wait for the current stream's work so far."""
        mark = self.device.mark(self.device.current())
        for stream in (self.device.staging, self.device.commits):
            self.device.wait(stream, mark)

    @contextmanager
    def writing(self, urgent: bool = False, join: bool = False) -> Iterator[None]:
        """Let the block write, in a stream in order with all calls, which does not become the thread's current stream.

        join: within another such block do nothing; elsewhere calls may begin and run meanwhile. Raises DeviceError,
        with nothing done, if a write would become a part of a CUDA graph that the application captures.
        """
        if join and self._writer is not None:
            yield
            return
        for user, _ in list(self._users.values()):
            check_not_capturing(self.device, user)
        stream = self.device.commits if urgent else self.device.staging
        try:
            self._writer = stream
            for key, known in list(self._users.items()):
                self.device.wait(stream, self.device.mark(known[0]))
                # its next call adds it again. With `join` a call in it may run beside the block, and be enqueued after
                # the mark: the next write has to wait for it
                if not join and self._users.get(key) is known:
                    del self._users[key]
            with self.device.on(stream):
                self.use()  # after the writes before, which may be in the other stream
            yield
        finally:
            self._writer = None
            self._written = self.device.mark(stream)

    @property
    def holds_calls(self) -> bool:
        """True during an urgent `writing` block."""
        return self._writer is self.device.commits

    def stream(self) -> AbstractContextManager[object]:
        """Return a context whose current stream is that of `writing`."""
        return self.device.on(self._stream)

    def _acquire(self) -> AbstractContextManager[TorchBuffer]:
        ring = self._ring.urgent if self._stream is self.device.commits else self._ring
        return ring.acquire(self._stream)

    @property
    def _stream(self) -> Stream:
        return self._writer or self.device.staging

    @contextmanager
    def buffers(self, slots: Sequence[ByteRange], slow: bool = False) -> Iterator[list[memoryview]]:
        """Yield page-locked memory, whose content is copied to the slots at the end; more than `most` is ordinary.

        slow: the memory is ordinary, too, as others would wait for the ring's buffer meanwhile.
        """
        if slow:
            memory = [memoryview(allocate(slot.nbytes)) for slot in slots]
            yield memory
            with self.buffers(slots) as targets:
                for target, data in zip(targets, memory, strict=True):
                    copy_bytes(target, data)
            return
        begins, runs = plan_runs(slots)
        if runs and runs[-1].begin + runs[-1].nbytes > BUFFER_BYTES:
            large = [memoryview(allocate(slot.nbytes)) for slot in slots]
            yield large
            for slot, data in zip(slots, large, strict=True):
                self.write(slot.offset, data)
            return
        with self._acquire() as buffer:
            yield [buffer.view[begin : begin + slot.nbytes] for begin, slot in zip(begins, slots, strict=True)]
            with self.stream():
                for offset, begin, nbytes in runs:
                    self.device.copy(self.buffer, offset, buffer, begin, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes to an offset, through the ring."""
        if len(data) >= UPLOAD_BYTES and self.upload([Copy(offset, 0, len(data))], data):
            return
        for start in range(0, len(data), BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            with self.buffers([ByteRange(offset + start, len(part))]) as (target,):
                copy_bytes(target, part)

    def upload(
        self, copies: Sequence[Copy], source: int | memoryview, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Copy bytes of an open file, or of memory, through buffers of the ring, which others may have in between.

        check: called several times a second; may raise. Returns False as `Accelerator.upload` returns None.
        """
        total, done = sum(copy.nbytes for copy in copies), 0
        while done < total:
            check()
            with self._acquire() as buffer, self.stream():
                now = self.device.upload(self.buffer, copies, source, buffer, done)
            if now is None:
                return False
            done = now
        return True

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes from an offset, through the ring; the host waits for them."""
        for start in range(0, len(target), BUFFER_BYTES):
            part = target[start : start + BUFFER_BYTES]
            with self._acquire() as buffer:
                self.download(offset + start, buffer, 0, len(part))
                copy_bytes(part, buffer.view[: len(part)])

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """A copy of bytes."""
        memory = memoryview(allocate(nbytes))
        self.read(offset, memory)
        return memory

    def scatter(self, ranges: ByteRanges) -> None:
        for begin, part in ranges.pieces():
            self.write(begin, part)

    def gather(self, ranges: ByteRanges) -> None:
        for begin, part in ranges.pieces():
            self.read(begin, part)

    def chunks(self, slot: ByteRange, numbers: Offsets) -> tuple[memoryview, bool]:
        """Return a copy of the pieces, which the device has put end to end. Raises MemoryError."""
        rows = Rows(slot.offset, CHUNK, len(numbers), 0, len(numbers) * CHUNK)
        found = self.beside(rows.end)
        with found.writing():
            found.write(rows.numbers, as_bytes(numbers))
            found.gather_rows(self, [rows])
        return found.fetch(0, rows.numbers), True

    def download(self, offset: int, target: TorchBuffer, at: int, nbytes: int) -> None:
        """Copy bytes to page-locked memory; the host waits for them."""
        with self.stream():
            self.use()
            self.device.copy(target, at, self.buffer, offset, nbytes)
            self.device.finish(self.device.mark(self._stream))

    def copy_from(self, source: Region, runs: Iterable[Copy]) -> None:
        """Copy runs of bytes. The host does not wait."""
        with self.stream():
            source.use()
            for offset, begin, nbytes in runs:
                self.device.copy(self.buffer, offset, source.buffer, begin, nbytes)

    def scatter_rows(self, source: Region, rows: Iterable[Rows]) -> None:
        """Write rows to their places. The host does not wait."""
        with self.stream():
            source.use()
            for each in rows:
                self.device.scatter(self.buffer, source.buffer, each)

    def gather_rows(self, source: Region, rows: Iterable[Rows]) -> None:
        """Fill rows, whose numbers are here, from their places in another region. The host does not wait."""
        with self.stream():
            source.use()
            for each in rows:
                self.device.gather(self.buffer, source.buffer, each)

    def beside(self, nbytes: int) -> Region:
        """Allocate other memory on the same device. Raises MemoryError."""
        return Region(self.device, nbytes, self._ring)

    def synchronize(self) -> None:
        """Let the host wait until all writes are done. Raises what the device reports."""
        self.device.finish(self._written)


class DeviceArena(Region):
    """Device memory of one full set of weights."""

    piece = 1 << 30  # not the whole, so that a copy can be cancelled

    def __init__(self, device: Accelerator, layout: ArenaLayout, ring: Ring, *, serves: bool) -> None:
        """serves: the arena lives as long as its model, not just for one staging. Raises MemoryError."""
        super().__init__(device, layout.nbytes, ring)
        self.layout = layout
        self.serves = serves

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        if isinstance(other, DeviceArena):  # at once: calls wait meanwhile
            other.copy_part(self, 0, self.layout.nbytes)
        else:
            parts = self.layout.whole.split(BUFFER_BYTES)
            workers.run_all(lambda part: other.copy_part(self, part.offset, part.end), parts)

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of an arena of the same layout. The host waits only for pageable memory."""
        if isinstance(other, DeviceArena):
            self.copy_from(other, [Copy(begin, begin, end - begin)])
        else:
            self.write(begin, other.fetch(begin, end - begin))

    @contextmanager
    def inspecting(self, contents: Sequence[Content]) -> Iterator[Inspection | None]:
        if self.layout.nbytes < LEAST or not contents:
            yield None
            return
        inspection = DeviceInspection(self, BlockTable.of(contents))
        try:
            yield inspection if inspection.is_possible else None
        finally:  # what comes next in this memory
            self.device.wait(self._stream, self.device.mark(self.device.inspecting))


class DeviceInspection:
    """Inspection of an arena in a stream of its own, beside copies to the device: each window once it is complete."""

    def __init__(self, arena: DeviceArena, blocks: BlockTable) -> None:
        self._arena, self._device, self._blocks = arena, arena.device, blocks
        self._inspector: TorchInspector | None = None
        self._ends = blocks.windows(WINDOW)
        self._missing = [end - begin for begin, end in pairwise([0, *self._ends])]
        self._lock = Lock()
        self._device.wait(self._device.inspecting, self._device.mark(arena._stream))  # the memory is ours by then
        with self._reporting(), self._device.on(self._device.inspecting):
            self._inspector = self._device.inspector(arena.buffer, blocks)

    @property
    def is_possible(self) -> bool:
        """False if there will be no results."""
        return self._inspector is not None

    def written(self, first: int, count: int) -> None:
        window, end = bisect_right(self._ends, first), first + count
        while first < end:
            stop = min(end, self._ends[window])
            with self._lock:
                self._missing[window] -= stop - first
                is_complete = not self._missing[window]
            if is_complete:
                self._inspect(window)
            first, window = stop, window + 1

    def read(self, file: int, copies: Sequence[Copy], check: Callable[[], None]) -> bool:
        return self._arena.upload(copies, file, check)

    def copy(self, slot: ByteRange, tensor: Any, first: int) -> bool:
        with self._arena.stream():
            buffer = self._device.borrow(tensor)
            if buffer is None:
                return False
            self._device.copy(self._arena.buffer, slot.offset, buffer, 0, slot.nbytes)
            self._device.lend(buffer, self._arena._stream)
        self.written(first, block_count(slot.nbytes))
        return True

    def _inspect(self, window: int) -> None:
        begin, end = self._ends[window - 1] if window else 0, self._ends[window]
        # threads note blocks after they have enqueued the copies, so a mark from now on is behind all of them
        self._device.wait(self._device.inspecting, self._device.mark(self._arena._stream))
        with self._reporting(), self._device.on(self._device.inspecting):
            if (inspector := self._inspector) is not None:
                inspector.inspect(begin, end - begin)

    def results(self) -> Inspected | None:
        found: Inspected | None = None
        with self._reporting(), self._device.on(self._device.inspecting):
            if self._inspector is not None:
                found = self._inspector.results()
        if found is None:
            return None
        # the kernel was compiled for whatever GPU this is: one block that the host hashes, too, shows that it works
        index = int(self._blocks.lengths.argmax())
        content = self._arena.fetch(int(self._blocks.offsets[index]), int(self._blocks.lengths[index]))
        if found.digests[index] == blake3(content).digest():
            return found
        self._device.distrust_inspector("the device computed a wrong digest for a block of weights", lasting=True)
        return None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """After an error of the block the host inspects."""
        try:
            yield
        except Exception as error:
            self._inspector = None
            # the next attempt may have more memory
            self._device.distrust_inspector(f"{type(error).__name__}: {error}", lasting=not lacks_memory(error))


class Ring:
    """Page-locked buffers of BUFFER_BYTES, allocated on first use at the latest, which any number of threads share.

    A buffer is reused once the device has copied what was in it, so that a thread fills one while others are copied.
    """

    def __init__(self, device: Accelerator, count: int, urgent: Ring | None = None) -> None:
        """count: buffers at most. urgent: a ring for copies that calls wait for, which must not wait for files."""
        self.urgent = urgent or self
        self._device = device
        self._count = count
        self._turns: list[_Turn] = []  # first the buffer that was returned first, whose copies are likely done
        # both are in C: an interrupt in a Condition's methods would leave its lock held for ever
        self._lock = RLock()
        self._returned = Lock()  # free once a buffer has been given back

    def allocate(self) -> None:
        """Allocate all buffers, or as many as fit a share of the host's free memory and can be locked, at least one.

        Called in `load()`: each takes milliseconds, in which the driver serves no other thread. Raises MemoryError.
        """
        free = available()
        most = self._count if free is None else min(self._count, max(1, free // SHARE // BUFFER_BYTES))
        with self._lock:
            while len(self._turns) < most:
                try:
                    self._turns.insert(0, _Turn(self._device.lock(BUFFER_BYTES)))
                except MemoryError:
                    if not self._turns:
                        raise
                    break
        if self.urgent is not self:
            self.urgent.allocate()

    @contextmanager
    def acquire(self, stream: Stream) -> Iterator[TorchBuffer]:
        """Yield a buffer. The block's copies in `stream` are done before the buffer is used again.

        Raises MemoryError if there is no buffer yet and no memory can be page-locked.
        """
        claim = Claim()
        is_free = False
        try:
            turn = self._acquire(claim)
            if turn.copied is not None:
                self._device.finish(turn.copied)  # without the lock: others may find their buffer done
            is_free = True
            yield turn.buffer
        finally:
            # also where the device reports an error, or nobody could ever take a buffer again
            self._give_back(claim, self._device.mark(stream) if is_free else None)

    def _acquire(self, claim: Claim) -> _Turn:
        while True:
            with self._lock:
                if not self._turns:
                    self.allocate()
                if (free := next((turn for turn in self._turns if not turn.is_held), None)) is not None:
                    turn = free._replace(holder=weakref.ref(claim))
                    self._turns = [other for other in self._turns if other.buffer is not turn.buffer] + [turn]
                    return turn
            self._returned.acquire(timeout=POLL_SECONDS)  # not for ever: an interrupted thread does not pass it on

    def _give_back(self, claim: Claim, copied: Event | None) -> None:
        """copied: the mark after the last copies; None: as before."""
        with self._lock:
            held = [turn for turn in self._turns if turn.holder is not None and turn.holder() is claim]
            self._turns = [turn for turn in self._turns if turn not in held] + [
                turn._replace(copied=copied or turn.copied, holder=None) for turn in held
            ]
            claim.end()  # not sooner, or another thread would miss the mark that it has to wait for
        with suppress(RuntimeError):  # it is free
            self._returned.release()


class _Turn(NamedTuple):
    """A buffer of a ring. An interrupt may come between any two instructions, so nothing is ever taken out of the ring:
    who fills a buffer is a claim, which ends with the frame that made it."""

    buffer: TorchBuffer
    copied: Event | None = None  # to be waited for before the buffer is filled again
    holder: ClaimReference | None = None  # the claim of the thread that fills it

    @property
    def is_held(self) -> bool:
        holder = self.holder() if self.holder else None
        return holder is not None and holder.holds


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes available by the machine and by the limits of this process's control groups; None: unknown."""
    limits = [free for group in _groups(proc, cgroups) if (free := _free(group)) is not None]
    with suppress(OSError, ValueError):
        rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        limits += [int(rows["MemAvailable"].split()[0]) << 10] if "MemAvailable" in rows else []
    return min(limits, default=None)


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return this process's control group (version 2) and its ancestors."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path(line[3:].lstrip("/"))
                return [cgroups / path for path in (own, *own.parents)]
    return []


def _free(group: Path) -> int | None:
    """Return the bytes that a group may still take, counting its inactive page cache as free."""
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(rows["inactive_file"]))
    return None


def plan_runs(slots: Sequence[ByteRange]) -> tuple[list[int], list[Copy]]:
    """Return each slot's offset in a buffer, and the copies to the arena. Neighbours move in one copy with their gap.

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


def check_not_capturing(device: Accelerator, stream: Stream) -> None:
    """Raise DeviceError if a stream is being captured: a mark in it, and work that waits for the mark, would be too."""
    if device.is_capturing(stream):
        raise DeviceError(
            f"{device.name}: a stream that calls have used is being captured in a CUDA graph of the application; "
            "our copies would become part of it. Wait until the capture ends, or capture on another stream."
        )


def check_call(device: Accelerator, what: str = "a call") -> None:
    """Raise Unsupported if `what` would be captured in a CUDA graph of the application."""
    if device.is_capturing_here():
        raise Unsupported(
            f"{what} during a capture by the application: replays of its graph would not be ordered with swaps. Load "
            "with cuda_graphs=..., which captures calls itself."
        )
