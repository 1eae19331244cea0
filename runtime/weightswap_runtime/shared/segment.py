"""The shared memory of one model: two arenas and a control page, as memfds, which outlive any one process."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import NamedTuple

import numpy as np

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.memory.arena import ArenaLayout
from weightswap_runtime.memory.available import available
from weightswap_runtime.memory.host import FOR_TWO
from weightswap_runtime.tensors.digests import block_count

from .control import Control, control_size

PARTS = ("control", "0", "1")
_ADVICE = FOR_TWO.partition(",")[0] + ": the workers of the machine hold two sets between them."
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a process that truncates the file would kill all its readers


class Segment(NamedTuple):
    """File descriptors of shared memory. A process that gets them, by inheritance or over a socket, shares it."""

    control: int
    arenas: tuple[int, int]

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], workers: int, name: str = "weightswap") -> Segment:
        """Create room for two sets of weights, and slots for the workers. Memory is allocated as it is written.

        weights: those of a manifest. name: the name of the descriptors in /proc, followed by one of PARTS. `close`
        closes the descriptors. Raises OutOfMemory.
        """
        nbytes = max(ArenaLayout(weights).nbytes, 1)
        description_size = sum(64 + len(weight.name) + 48 * block_count(weight.nbytes) for weight in weights)
        control, first, second = (f"{name}.{part}" for part in PARTS)
        page = memfd(control_size(workers, description_size), control)
        Control(page, workers)
        return cls(page, (memfd(nbytes, first), memfd(nbytes, second)))

    def read_only(self) -> Segment:
        """Return the same memory with read-only descriptors of the arenas. The control page stays writable."""
        return Segment(os.dup(self.control), (_reopened(self.arenas[0]), _reopened(self.arenas[1])))

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return (self.control, *self.arenas)

    def close(self) -> None:
        """Close the descriptors; the memory is freed with the last process that maps it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def memfd(nbytes: int, name: str) -> int:
    """Create shared memory of whole pages, whose size is sealed; return its descriptor. Raises OutOfMemory."""
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, pages)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemory(f"cannot allocate {pages} bytes of shared memory ({error})") from error
    return descriptor


def allocate(descriptor: int) -> None:
    """Allocate all memory of a memfd now: a later lack of memory would make the system kill a process.

    Raises OutOfMemory.
    """
    status = os.fstat(descriptor)
    needed = status.st_size - status.st_blocks * 512
    if needed <= 0:
        return
    if (free := available()) is not None and needed > free:
        raise OutOfMemory(f"a set of weights needs {needed} bytes of shared memory, but {free} are free. {_ADVICE}")
    try:
        os.posix_fallocate(descriptor, 0, status.st_size)
    except OSError as error:
        raise OutOfMemory(f"cannot allocate {needed} bytes of shared memory ({error}). {_ADVICE}") from error


def _reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int) -> ctypes.Array[ctypes.c_char]:
    """Map a descriptor read-only, as a buffer that claims to be writable for torch; a write kills the process."""
    mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_char * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # keeps the mapping alive as long as a view of it
    return memory
