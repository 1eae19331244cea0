"""Host memory at addresses that never change, holding one full set of weights."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from .errors import OutOfMemory
from .manifest import NamedTensor
from .weightfile import ALIGNMENT, TensorRow, canonical_order
from .workers import Workers

COPY_CHUNK = 16 << 20


class Slot(NamedTuple):
    """Where a weight lives in an arena: byte offset from its base, and size in bytes."""

    offset: int
    nbytes: int


class ArenaLayout:
    """Places weights in the order of the canonical file layout, each at a multiple of 256 bytes."""

    def __init__(self, weights: Iterable[NamedTensor]) -> None:
        self.weights: dict[str, NamedTensor] = {weight.name: weight for weight in weights}
        self.slots: dict[str, Slot] = {}
        position = 0
        for row in canonical_order(TensorRow(w.name, w.dtype, w.shape) for w in self.weights.values()):
            size = self.weights[row.name].nbytes
            self.slots[row.name] = Slot(position, size)
            position += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = position


class HostArena:
    """Anonymous, page-aligned memory of this process; it maps no file, and a forked child gets a copy of its own.

    The memory lives as long as anything views it.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        try:
            self.memory = _map(max(layout.nbytes, mmap.PAGESIZE))
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemory(
                f"an arena of {layout.nbytes} bytes cannot be allocated ({error}). "
                'Free memory, or load with residency="single", which holds one set of weights instead of two.'
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def view(self, name: str) -> memoryview:
        """The bytes of one weight, writable."""
        offset, size = self.layout.slots[name]
        return memoryview(self.memory)[offset : offset + size]

    def write_to(self, other: HostArena, workers: Workers) -> None:
        """Copy every weight to an arena of the same layout; addresses stay. Bounded by memory bandwidth."""
        total = self.layout.nbytes
        workers.run_all(
            lambda start: other.copy_part(self, start, min(start + COPY_CHUNK, total)), range(0, total, COPY_CHUNK)
        )

    def copy_part(self, other: HostArena, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of an arena of the same layout."""
        # ctypes releases the interpreter's lock for the call, slice assignment would not
        ctypes.memmove(self.address + begin, other.address + begin, end - begin)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes to an offset. `data` is of writable memory."""
        if len(data):
            ctypes.memmove(self.address + offset, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes from an offset, as many as `target`, which is of writable memory, holds."""
        if len(target):
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), self.address + offset, len(target))


def allocate(nbytes: int) -> mmap.mmap | bytearray:
    """Memory that goes back to the system when it is dropped. Raises MemoryError."""
    try:
        # malloc would keep tens of megabytes of what is freed
        return _map(nbytes) if nbytes else bytearray()
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error


def allocate_each(sizes: Sequence[int]) -> list[memoryview]:
    """As `allocate`, in one piece of memory that lives as long as any part of it is viewed."""
    memory, parts = memoryview(allocate(sum(sizes))), []
    for size in sizes:
        parts.append(memory[:size])
        memory = memory[size:]
    return parts


def _map(nbytes: int) -> mmap.mmap:
    """Memory of this process alone. Huge pages are a wish: first touch is several times quicker with them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
