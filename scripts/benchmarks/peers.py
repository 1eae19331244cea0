"""Peers of weightswap: plain reads, hashes and copies of the same bytes, on the same number of threads."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch.distributed import BroadcastOptions

from weightswap_runtime.threads import WorkerThreads
from weightswap_runtime.transfer.group import BUCKET

LARGEST = 64 << 20
CACHED = 1 << 20


class Memory:
    """Anonymous memory of `nbytes` that asks for huge pages, like an arena."""

    def __init__(self, nbytes: int, *, touched: bool) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if touched:
            ctypes.memset(self.address, 1, nbytes)
        self.bytes = memoryview(self._map)

    def tensor(self) -> torch.Tensor:
        """Return one flat uint8 tensor over the whole memory."""
        return torch.frombuffer(self._map, dtype=torch.uint8)


def broadcast(group: Any, memory: torch.Tensor) -> None:
    """Send bytes of rank 0 to the others of a process group, as `Sender` does, and nothing else."""
    options = BroadcastOptions()
    options.rootRank = 0
    for bucket in memory.split(BUCKET):
        group.broadcast([bucket], options).wait()


class Peers:
    """Plain work on a number of threads, by default the library's own number."""

    def __init__(self) -> None:
        self.threads = WorkerThreads().threads
        self._pool = ThreadPoolExecutor(self.threads)

    def read(self, path: Path, memory: Memory) -> None:
        """Read a whole file with parallel `preadv`, in pieces large enough to keep every thread busy."""
        with path.open("rb", buffering=0) as file:
            self._each(memory, self._large(memory), lambda part, at: _read(file.fileno(), part, at))

    def hash(self, memory: Memory) -> None:
        """Hash the memory with BLAKE3, each piece by one thread."""
        self._each(memory, self._large(memory), lambda part, _: blake3(part).digest())

    def read_and_hash(self, path: Path, memory: Memory) -> None:
        """Do the minimum of a staging: each thread reads a little, and hashes it while it is in the cache."""
        with path.open("rb", buffering=0) as file:
            fd = file.fileno()

            def work(part: memoryview, at: int) -> None:
                hasher = blake3()
                for start in range(0, len(part), CACHED):
                    piece = part[start : start + CACHED]
                    _read(fd, piece, at + start)
                    hasher.update(piece)
                hasher.digest()

            self._each(memory, self._large(memory), work)

    def copy(self, target: Memory, source: Memory) -> None:
        """Copy in parallel with memcpy."""

        def work(part: memoryview, at: int) -> None:
            ctypes.memmove(target.address + at, source.address + at, len(part))

        self._each(source, self._large(source), work)

    def copy_and_hash(self, target: Memory, source: Memory) -> None:
        """Do the minimum of a staging from memory: each thread copies a little, and hashes it while it is in cache."""

        def work(part: memoryview, at: int) -> None:
            for start in range(0, len(part), CACHED):
                piece = target.bytes[at + start : at + min(start + CACHED, len(part))]
                ctypes.memmove(target.address + at + start, source.address + at + start, len(piece))
                blake3(piece).digest()

        self._each(source, self._large(source), work)

    def _large(self, memory: Memory) -> int:
        return min(LARGEST, -(-memory.nbytes // self.threads))

    def _each(self, memory: Memory, step: int, work: Callable[[memoryview, int], object]) -> None:
        starts = range(0, memory.nbytes, step)
        list(self._pool.map(lambda at: work(memory.bytes[at : at + step], at), starts))


def _read(fd: int, part: memoryview, at: int) -> None:
    while part:
        got = os.preadv(fd, [part], at)
        if not got:
            raise EOFError(f"the file ended at byte {at}")
        part, at = part[got:], at + got
