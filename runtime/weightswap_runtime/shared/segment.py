"""The shared memory of one model: two arenas and a control page, as files without names that outlive any process."""

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
_ADVICE = FOR_TWO.partition(",")[0] + ": all workers of the machine hold two sets together."
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # else whoever cuts it off would kill all who read it


class Segment(NamedTuple):
    """Descriptors; whoever is given them, by inheritance or over a socket, shares the memory."""

    control: int
    arenas: tuple[int, int]

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], workers: int, name: str = "weightswap") -> Segment:
        """Room for two sets of weights, and for so many workers. It takes memory as it is written. Raises OutOfMemory.

        weights: a manifest's. name: what the system shows of the descriptors, with one of PARTS. `close` gives them
        back.
        """
        nbytes = max(ArenaLayout(weights).nbytes, 1)
        described = sum(64 + len(weight.name) + 48 * block_count(weight.nbytes) for weight in weights)
        control, first, second = (f"{name}.{part}" for part in PARTS)
        made = cls(memfd(control_size(workers, described), control), (memfd(nbytes, first), memfd(nbytes, second)))
        Control(made.control, workers)
        return made

    def read_only(self) -> Segment:
        """The same memory, by descriptors of arenas that cannot be written. Those of the control page can."""
        return Segment(os.dup(self.control), (_reopened(self.arenas[0]), _reopened(self.arenas[1])))

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return (self.control, *self.arenas)

    def close(self) -> None:
        """Give the descriptors back; the memory goes with the last process that maps it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def memfd(nbytes: int, name: str) -> int:
    """A descriptor of shared memory, of whole pages, which keeps its size. Raises OutOfMemory."""
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, pages)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemory(f"{pages} bytes of shared memory cannot be had ({error})") from error
    return descriptor


def allocate(descriptor: int) -> None:
    """Take all memory of a memfd that it has not yet: else the system kills somebody, where there is not enough.

    Raises OutOfMemory.
    """
    status = os.fstat(descriptor)
    wanted = status.st_size - status.st_blocks * 512
    if wanted <= 0:
        return
    if (there := available()) is not None and wanted > there:
        raise OutOfMemory(f"{wanted} bytes of shared memory for a set of weights, and {there} are free. {_ADVICE}")
    try:
        os.posix_fallocate(descriptor, 0, status.st_size)
    except OSError as error:
        raise OutOfMemory(f"{wanted} bytes of shared memory cannot be had ({error}). {_ADVICE}") from error


def _reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int) -> ctypes.Array[ctypes.c_char]:
    """The memory behind a descriptor, which calls itself writable, as torch asks for that; a write ends the process."""
    mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_char * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # which lives as long as anything views it
    return memory
