"""A set of weights in one piece of memory, at addresses that stay, and patches of parts of it.

Engines bind the addresses once. New weights come into the memory that no call uses, or are copied over the served ones
while calls are held; from where, and how fast, is the arena's matter, on the host (here) or on a device.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges, copy, gather, scatter
from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.format.canonical import canonical_order
from weightswap_runtime.format.cuts import Rank, Share
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.safetensors import ALIGNMENT
from weightswap_runtime.jobs import Job
from weightswap_runtime.native import Offsets, copy_bytes
from weightswap_runtime.tensors import BLOCK, Blocks
from weightswap_runtime.threads import WorkerThreads

COPY_CHUNK = 16 << 20  # bytes that a thread copies at once, or one large weight would keep one thread busy at the end
MOST_CHUNK = 64 << 20  # bytes likewise of a large set
LEAST_SHARE = 1 << 20  # bytes of small ranges that one thread copies in less time than it takes to call another
_FEW = 16  # ranges that are copied one by one
Buffer = mmap.mmap | ctypes.Array[ctypes.c_char]


class ByteRange(NamedTuple):
    """A range of bytes in a memory, such as a weight's slot in an arena. The offset is from the memory's base."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def split(self, most: int) -> Iterator[ByteRange]:
        """Yield consecutive parts of at most `most` bytes."""
        return (ByteRange(start, min(most, self.end - start)) for start in range(self.offset, self.end, most))


class Copy(NamedTuple):
    """A copy of bytes to a memory, such as from a buffer or a file to an arena."""

    offset: int  # in the memory that is written
    begin: int  # in the memory or file that is read
    nbytes: int


class Content(NamedTuple):
    """A tensor in an arena: where it is, and the dtype of its elements."""

    slot: ByteRange
    dtype: str


class Inspected(NamedTuple):
    """What an arena has found in the blocks of some tensors."""

    digests: list[bytes]
    nonfinite: list[int]  # the indices of blocks with values that are not finite


class Inspection(Protocol):
    """Blocks of tensors that an arena inspects where they are, while others are still being written."""

    def written(self, first: int, count: int) -> None:
        """Note that so many blocks from an index on are written, or enqueued to be. Called in any thread."""
        ...

    def read(self, file: int, copies: Sequence[Copy], check: Callable[[], None]) -> bool:
        """Read an open file into the arena without a step of Python for each piece; `written` must follow.

        `check` is called several times a second, and may raise. Returns False, with some read, if the arena cannot do
        that or if it failed: to read with `Destination.buffers` then says why.
        """
        ...

    def copy(self, slot: ByteRange, tensor: Any, first: int) -> bool:
        """Write a torch tensor on the arena's device to a slot, whose blocks begin at an index; False for others."""
        ...

    def results(self) -> Inspected | None:
        """Return what was found; None if it could not be, or turns out to be wrong."""
        ...


class BlockTable(NamedTuple):
    """Blocks of tensors in a buffer, one row for each; a Python object for each would take longer than its copy."""

    offsets: np.ndarray  # int64, in bytes
    lengths: np.ndarray  # int64, in bytes
    kinds: np.ndarray  # indices of their dtypes
    dtypes: list[str]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> BlockTable:
        slots = np.array([content.slot for content in contents], np.int64)
        dtypes = sorted({content.dtype for content in contents})
        kinds = np.array([dtypes.index(content.dtype) for content in contents])
        counts = np.maximum(1, -(-slots[:, 1] // BLOCK))  # an empty tensor has one block
        starts = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK
        lengths = np.minimum(BLOCK, np.repeat(slots[:, 1], counts) - starts)
        return cls(np.repeat(slots[:, 0], counts) + starts, lengths, np.repeat(kinds, counts), dtypes)

    def windows(self, nbytes: int) -> list[int]:
        """Return the ends of windows of about so many bytes, as indices."""
        numbers = (self.lengths.cumsum() - self.lengths) // nbytes
        return [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]


class Rows(NamedTuple):
    """Rows of a table in an arena, with a region that has their content, and their numbers as int64."""

    base: int  # offset in the arena of the row with the number 0
    width: int  # bytes of a row
    total: int  # of rows
    begin: int  # offset in the region of the rows' content, end to end
    numbers: int  # offset in the region of their numbers, a multiple of 8

    @property
    def end(self) -> int:
        return self.numbers + 8 * self.total

    @classmethod
    def of(cls, part: ByteRanges, begin: int) -> Rows | None:
        """Return the rows that these ranges are, for a region; None if they are not rows, or fewer than a few."""
        width = part.width
        if width is None or len(part.begins) < _FEW or not part.moved(-int(part.begins[0])).are_multiples(width):
            return None
        numbers = begin + part.nbytes
        return cls(int(part.begins[0]), width, len(part.begins), begin, numbers + -numbers % 8)


class ArenaLayout:
    """Offsets of weights in an arena, in the order of the canonical file layout, each a multiple of 256 bytes.

    weights: as the arena has them, by name: of what ranks share, the part of its rank. shares: which bytes these are.
    """

    rank: Rank | None = None
    shares: Mapping[str, Share] = MappingProxyType({})

    def __init__(self, weights: Iterable[NamedTensor], rank: Rank | None = None) -> None:
        """weights: of files. rank: whose parts the arena has; None: the whole of all."""
        self.rank = rank
        rows = list(weights)
        shares = {} if rank is None else {weight.name: rank.share(weight) for weight in rows}
        self.shares = {name: share for name, share in shares.items() if share is not None}
        self.weights: dict[str, NamedTensor] = {
            weight.name: weight if rank is None else rank.part(weight) for weight in rows
        }
        self.slots: dict[str, ByteRange] = {}
        position = 0
        for row in canonical_order(weight.row for weight in self.weights.values()):
            size = self.weights[row.name].nbytes
            self.slots[row.name] = ByteRange(position, size)
            position += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = position
        self.whole = ByteRange(0, position)


class Destination(Protocol):
    """Memory into which pieces of tensors are read."""

    most: int  # bytes that `buffers` should be asked for at once

    def buffers(self, slots: Sequence[ByteRange], slow: bool = False) -> AbstractContextManager[list[memoryview]]:
        """Return a context with writable host memory for each slot; at its end the content is in the slot.

        slow: the block waits for a network or a rate limit, so its memory should be none that others wait for.
        """
        ...


class Arena(Destination, Protocol):
    """Memory of a full set of weights, on the host or on an accelerator. Offsets and sizes are in bytes.

    What methods do here is what the host needs, which works in order.
    """

    layout: ArenaLayout
    address: int
    piece: int  # size of one copy to another arena of this kind
    apart: int  # bytes between two ranges up to which one copy of both, with what is between, takes less time

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes from writable memory to an offset, in order with the other work of a `writing` block."""
        ...

    def read(self, offset: int, target: memoryview) -> None:
        """Fill writable memory with bytes from an offset on."""
        ...

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes from an offset, which must only be read: the arena's own memory or a copy."""
        ...

    def scatter(self, ranges: ByteRanges) -> None:
        """Write the ranges' data, which is end to end, to their places; otherwise as `write`."""
        ...

    def gather(self, ranges: ByteRanges) -> None:
        """Fill the ranges' data, end to end, with the bytes at their places."""
        ...

    def chunks(self, slot: ByteRange, numbers: Offsets) -> tuple[memoryview, bool]:
        """Return the slot, and False; or a copy of its pieces of 1 KiB with these numbers, end to end, and True."""
        return self.fetch(*slot), False

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        """Copy every weight to an arena of the same layout. Addresses stay."""
        ...

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of an arena of the same layout."""
        ...

    def writing(self, urgent: bool = False, join: bool = False) -> AbstractContextManager[None]:
        """Return a context for writing, ordered after all calls that began before it and before all that begin later.

        It does not hold calls; the gate does. On the host they have ended when they have given their lease back. On an
        accelerator the host does not wait: streams keep the order.
        urgent: calls are held meanwhile. join: the block may be nested in another such block, and run beside calls.
        Raises DeviceError, with nothing done, while the application captures a stream that calls have used.
        """
        return nullcontext()

    def stream(self) -> AbstractContextManager[object]:
        """Return a context whose work on an accelerator is in order with the writes of `writing`."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until all writes are done. Raises what the device reports."""
        return

    def inspecting(self, contents: Sequence[Content]) -> AbstractContextManager[Inspection | None]:
        """Return a context in which the arena inspects tensors' blocks, in this order; with None, who writes has to."""
        return nullcontext()  # the threads that read inspect what is in their caches


class HostArena(Arena):
    """Page-aligned memory, which lives as long as anything views it.

    It is anonymous and private to this process, with a copy in each forked child; or it is the argument `memory`,
    which may be read-only.
    """

    most = 1 << 30
    piece = COPY_CHUNK
    apart = 0

    def __init__(self, layout: ArenaLayout, memory: Buffer | None = None) -> None:
        self.layout = layout
        try:
            self.memory = memory or _map(max(layout.nbytes, mmap.PAGESIZE))
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemory(f"a set of weights of {layout.nbytes} bytes cannot be allocated ({error}).") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def view(self, name: str) -> memoryview:
        """Return the bytes of one weight, writable."""
        return self.fetch(*self.layout.slots[name])

    def buffers(self, slots: Sequence[ByteRange], slow: bool = False) -> AbstractContextManager[list[memoryview]]:
        """Return the arena's own memory."""
        return nullcontext([self.fetch(*slot) for slot in slots])

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        # several for each thread, so that all end together
        chunk = max(COPY_CHUNK, min(MOST_CHUNK, self.layout.nbytes // (4 * workers.threads)))
        workers.run_all(lambda part: other.copy_part(self, part.offset, part.end), self.layout.whole.split(chunk))

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        other.read(begin, self.fetch(begin, end - begin))

    def write(self, offset: int, data: memoryview) -> None:
        copy_bytes(self.fetch(offset, len(data)), data)

    def read(self, offset: int, target: memoryview) -> None:
        copy_bytes(target, self.fetch(offset, len(target)))

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Return the arena's own memory."""
        return memoryview(self.memory)[offset : offset + nbytes]

    def scatter(self, ranges: ByteRanges) -> None:
        scatter(memoryview(self.memory), ranges)

    def gather(self, ranges: ByteRanges) -> None:
        gather(memoryview(self.memory), ranges)


class Scratch:
    """Memory for several tensors, in one piece, which lives as long as any part of it is viewed. Raises MemoryError."""

    most = 1 << 30

    def __init__(self, sizes: Sequence[int]) -> None:
        self.memory = memoryview(allocate(sum(sizes)))
        ends = list(accumulate(sizes, initial=0))
        self.slots = [ByteRange(begin, size) for begin, size in zip(ends, sizes, strict=False)]

    def part(self, index: int) -> memoryview:
        """Return the memory for the size at this index."""
        offset, size = self.slots[index]
        return self.memory[offset : offset + size]

    def buffers(self, slots: Sequence[ByteRange], slow: bool = False) -> AbstractContextManager[list[memoryview]]:
        """Return this memory itself."""
        return nullcontext([self.memory[offset : offset + size] for offset, size in slots])


class Patch(ABC):
    """Changes of parts of an arena, in memory of their own."""

    nbytes: int

    @abstractmethod
    def write_to(self, arena: Arena, workers: WorkerThreads, job: Job | None = None) -> None:
        """Write every range to its place, with a `job` at its rate limit. Addresses stay.

        Raises StageCancelled if the job is cancelled, with the copy half done.
        """

    @abstractmethod
    def undo(self, arena: Arena) -> Patch:
        """Copy what this patch would overwrite in the arena, as a patch. Raises MemoryError."""

    @abstractmethod
    def saved(self, arena: Arena) -> HostPatch:
        """As `undo`, in host memory, however long it takes. Raises MemoryError."""


class HostPatch(Patch):
    """New bytes in host memory, and their places in an arena. Bytes between them stay."""

    def __init__(self, parts: Iterable[ByteRanges]) -> None:
        """parts: each with its bytes end to end; none overlaps another."""
        self.parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    def write_to(self, arena: Arena, workers: WorkerThreads, job: Job | None = None) -> None:
        job = job or Job()
        job.begin("copying", self.nbytes)

        def write(piece: ByteRanges) -> None:
            for _ in job.steps(0, piece.nbytes):
                arena.scatter(piece)

        most = _share(self.nbytes, job, workers)
        workers.run_all(write, (piece for part in self.parts for piece in part.split(most)))

    def undo(self, arena: Arena) -> HostPatch:
        parts = [part._replace(data=memoryview(allocate(part.nbytes))) for part in self.parts]
        for part in parts:
            arena.gather(part)
        return HostPatch(parts)

    def places(self) -> ByteRanges:
        """Return the ranges of all parts, in ascending order and without data."""
        sides = [np.concatenate([part[side] for part in self.parts] or [np.empty(0, np.int64)]) for side in (0, 1)]
        order = np.argsort(sides[0], kind="stable")
        return ByteRanges(sides[0][order], sides[1][order], np.zeros(len(order), np.int64), memoryview(b""))

    saved = undo


def differing(arena: Arena, one: Mapping[str, Blocks], other: Mapping[str, Blocks]) -> list[ByteRange]:
    """Return the ranges that differ between two arenas of this layout, from the digests of their weights' blocks."""
    ranges: list[ByteRange] = []
    for name, weight in arena.layout.weights.items():
        slot = arena.layout.slots[name]
        if one[name] == other[name]:
            continue
        if weight.stride is not None or name in arena.layout.shares:  # its blocks are scattered over the arena's memory
            ranges.append(slot)
            continue
        blocks = zip(slot.split(BLOCK), one[name], other[name], strict=True)
        ranges += [block for block, mine, theirs in blocks if mine != theirs]
    return ranges


def copy_ranges(target: Arena, source: Arena, ranges: Sequence[ByteRange], workers: WorkerThreads, job: Job) -> None:
    """Copy parts of an arena to the same ranges of another. Raises StageCancelled, with the copy half done."""
    job.begin("copying", sum(part.nbytes for part in ranges))

    def copy(part: ByteRange) -> None:
        for start, stop in job.steps(part.offset, part.end):
            target.copy_part(source, start, stop)

    piece = min(target.piece, source.piece)
    workers.run_all(copy, (part for whole in ranges for part in whole.split(piece)))


def copy_places(target: Arena, source: Arena, places: ByteRanges, workers: WorkerThreads, job: Job) -> None:
    """Copy scattered parts of an arena to the same places of another. Raises StageCancelled, as `copy_ranges` does."""
    places = places.joined(max(target.apart, source.apart))
    if isinstance(target, HostArena) and isinstance(source, HostArena):
        total = int((places.ends - places.begins).sum())
        job.begin("copying", total)
        mine, theirs = target.fetch(*target.layout.whole), source.fetch(*source.layout.whole)

        def copy_piece(piece: ByteRanges) -> None:
            for _ in job.steps(0, int((piece.ends - piece.begins).sum())):
                copy(mine, theirs, piece)

        workers.run_all(copy_piece, places.split(_share(total, job, workers)))
        return
    ranges = [ByteRange(begin, end - begin) for begin, end in zip(*(each.tolist() for each in places[:2]), strict=True)]
    copy_ranges(target, source, ranges, workers, job)


def _share(nbytes: int, job: Job, workers: WorkerThreads) -> int:
    """Return how many bytes of many small ranges a thread copies at once."""
    return job.unit(min(COPY_CHUNK, max(LEAST_SHARE, -(-nbytes // workers.threads))))


def allocate(nbytes: int) -> mmap.mmap | bytearray:
    """Allocate memory that returns to the system when it is dropped. Raises MemoryError."""
    try:
        # malloc would keep tens of megabytes of freed memory
        return _map(nbytes) if nbytes else bytearray()
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error


def _map(nbytes: int) -> mmap.mmap:
    """Map private memory, with huge pages if possible: first touch is several times quicker with them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
