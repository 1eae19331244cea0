"""Memory at addresses that never change, holding one full set of weights."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from typing import NamedTuple, Protocol

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_file import ALIGNMENT, canonical_order
from weightswap_runtime.threads.worker_threads import WorkerThreads

COPY_CHUNK = 16 << 20
Buffer = mmap.mmap | ctypes.Array[ctypes.c_char]


class ByteRange(NamedTuple):
    """A part of a memory, such as where a weight lives in an arena. The offset is from the memory's base."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def split(self, most: int) -> Iterator[ByteRange]:
        """Parts of at most so many bytes, one after another."""
        return (ByteRange(start, min(most, self.end - start)) for start in range(self.offset, self.end, most))


class ArenaLayout:
    """Places weights in the order of the canonical file layout, each at a multiple of 256 bytes."""

    def __init__(self, weights: Iterable[NamedTensor]) -> None:
        self.weights: dict[str, NamedTensor] = {weight.name: weight for weight in weights}
        self.slots: dict[str, ByteRange] = {}
        position = 0
        for row in canonical_order(weight.row for weight in self.weights.values()):
            size = self.weights[row.name].nbytes
            self.slots[row.name] = ByteRange(position, size)
            position += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = position
        self.whole = ByteRange(0, position)


class Room(Protocol):
    """Where bytes go that come in pieces."""

    most: int  # bytes that one `room` should ask for

    def room(self, slots: Sequence[ByteRange]) -> AbstractContextManager[list[memoryview]]:
        """Writable host memory for each slot. What it holds at the end of the block is, or goes, there."""
        ...


class Arena(Room, Protocol):
    """A full set of weights, on the host or on an accelerator. Offsets and sizes in bytes."""

    layout: ArenaLayout
    address: int
    piece: int  # bytes of one copy to another arena of this kind

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes, of writable memory, to an offset. They are in order with what the block `writing` does."""
        ...

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes from an offset, as many as `target`, which is of writable memory, holds."""
        ...

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Bytes from an offset, to be read only: the arena's own memory, or a copy."""
        ...

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        """Copy every weight to an arena of the same layout; addresses stay."""
        ...

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of an arena of the same layout."""
        ...

    def writing(self, urgent: bool = False, join: bool = False) -> AbstractContextManager[None]:
        """A block that writes, after all calls that have begun before, and before all that begin after it.

        It keeps no calls from beginning; the gate does. On an accelerator nothing waits for the device: the order is
        that of its streams. urgent: calls are held meanwhile. join: it may be a part of another such block,
        and go on beside calls.
        """
        ...

    def stream(self) -> AbstractContextManager[object]:
        """A block whose work for an accelerator is in order with what `writing` writes."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was written is there. Raises what the device reports."""
        ...

    def check_streams(self) -> None:
        """Raise DeviceError where `writing` would, with nothing done."""
        ...

    @property
    def computes_digests(self) -> bool:
        """Whether `digests` has some, and sooner than the host would."""
        ...

    def digests(self, parts: Sequence[ByteRange]) -> list[bytes] | None:
        """Those of parts of at most a block each, of what is there; None where they turn out to be wrong."""
        ...


class HostArena:
    """Page-aligned memory, which lives as long as anything views it.

    It is anonymous and of this process alone, and a forked child gets a copy of its own; or it is what is given as
    `memory`, of which it may be that nobody may write to it.
    """

    most = 1 << 30
    piece = COPY_CHUNK

    def __init__(self, layout: ArenaLayout, memory: Buffer | None = None) -> None:
        self.layout = layout
        try:
            self.memory = memory or _map(max(layout.nbytes, mmap.PAGESIZE))
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemory(f"a set of weights of {layout.nbytes} bytes cannot be allocated ({error}).") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def view(self, name: str) -> memoryview:
        """The bytes of one weight, writable."""
        offset, size = self.layout.slots[name]
        return memoryview(self.memory)[offset : offset + size]

    def room(self, slots: Sequence[ByteRange]) -> AbstractContextManager[list[memoryview]]:
        """The arena's own memory."""
        memory = memoryview(self.memory)
        return nullcontext([memory[offset : offset + size] for offset, size in slots])

    def write_to(self, other: Arena, workers: WorkerThreads) -> None:
        chunks = self.layout.whole.split(COPY_CHUNK)
        workers.run_all(lambda part: other.copy_part(self, part.offset, part.end), chunks)

    def copy_part(self, other: Arena, begin: int, end: int) -> None:
        other.read(begin, self.fetch(begin, end - begin))

    def write(self, offset: int, data: memoryview) -> None:
        copy_bytes(self.fetch(offset, len(data)), data)

    def read(self, offset: int, target: memoryview) -> None:
        copy_bytes(target, self.fetch(offset, len(target)))

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """The arena's own memory."""
        return memoryview(self.memory)[offset : offset + nbytes]

    def stream(self) -> AbstractContextManager[object]:
        """Nothing to do: the host works in order."""
        return nullcontext()

    def writing(self, urgent: bool = False, join: bool = False) -> AbstractContextManager[None]:
        """Nothing to do: calls have ended when they have given their lease back."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def check_streams(self) -> None:
        """Nothing to look at."""

    computes_digests = False

    def digests(self, parts: Sequence[ByteRange]) -> None:
        """None: those who read compute them."""


class Scratch:
    """Memory for several tensors, as one piece that lives as long as any part of it is viewed. Raises MemoryError."""

    most = 1 << 30

    def __init__(self, sizes: Sequence[int]) -> None:
        self.memory = memoryview(allocate(sum(sizes)))
        ends = list(accumulate(sizes, initial=0))
        self.slots = [ByteRange(begin, size) for begin, size in zip(ends, sizes, strict=False)]

    def part(self, index: int) -> memoryview:
        """What was asked for as the size of this index."""
        offset, size = self.slots[index]
        return self.memory[offset : offset + size]

    def room(self, slots: Sequence[ByteRange]) -> AbstractContextManager[list[memoryview]]:
        """This very memory."""
        return nullcontext([self.memory[offset : offset + size] for offset, size in slots])


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes between writable memories of one size, without the interpreter's lock, which an assignment keeps."""
    if len(source):
        to, at = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (target, source))
        ctypes.memmove(to, at, len(source))


def allocate(nbytes: int) -> mmap.mmap | bytearray:
    """Memory that goes back to the system when it is dropped. Raises MemoryError."""
    try:
        # malloc would keep tens of megabytes of what is freed
        return _map(nbytes) if nbytes else bytearray()
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error


def _map(nbytes: int) -> mmap.mmap:
    """Memory of this process alone. Huge pages are a wish: first touch is several times quicker with them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
