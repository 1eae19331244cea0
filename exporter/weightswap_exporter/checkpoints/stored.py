"""Uncompressed tensors in files: read into allocated memory, never mapped.

The pages of a mapped file that were read would count as this process's memory, and a truncation of the file would end
the process with a bus error.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.sources.local import has_writer, open_at_once, outwait_clock
from weightswap_runtime.tensors.dtypes import row_major

from .tensor import Read, copy_part


class Stored(NamedTuple):
    """Tensor in an open file. `offset` of its first element in bytes from the start; `stride` in elements."""

    where: str
    fd: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of bytes in the file from the tensor's first element to its last, both included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """True if the elements are in the order of a contiguous tensor, without gaps."""
        steps = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return 0 in self.shape or all(size == 1 or step == expected for size, step, expected in steps)

    def parts(self) -> Read | None:
        """Return a function that reads a part; None if the tensor must be read whole."""
        return self.read if self.is_row_major else None

    def read(self, memory: memoryview, begin: int) -> None:
        """Fill memory with row-major bytes from `begin` on; other layouts are read whole. Raises CheckpointError."""
        if self.is_row_major:
            read_into(self.fd, memory, self.offset + begin, self.where)
        else:
            copy_part(self.load(), memory, begin)

    def load(self) -> torch.Tensor:
        """Read the tensor. Raises CheckpointError."""
        memory = torch.empty(self.span, dtype=torch.uint8)
        read_into(self.fd, memory.numpy().data, self.offset, self.where)
        return memory.view(self.dtype).as_strided(self.shape, self.stride)


def read_into(fd: int, target: memoryview, offset: int, where: str) -> None:
    """Fill `target` from a file. Raises CheckpointError if the file ends early or cannot be read."""
    done = 0
    while done < len(target):
        try:
            got = os.preadv(fd, [target[done : done + (1 << 30)]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read at byte {offset + done} ({error.strerror})") from error
        if not got:
            raise CheckpointError(
                f"{where}: ends at byte {offset + done}, {len(target) - done} bytes early. Save it again, or copy it "
                "again."
            )
        done += got


class Files:
    """Files, each opened for one tensor at a time, so that checkpoints can have any number of files."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, ...]] = {}

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """Open for reading. Raises CheckpointError, also if the file has changed since it was first opened."""
        try:
            fd = open_at_once(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be opened ({getattr(error, 'strerror', error)})") from error
        try:
            first = path not in self._seen
            if first:
                outwait_clock(os.fstat(fd).st_ctime_ns)
            self._compare(path, os.fstat(fd))
            if first and has_writer(fd):  # a write that has begun may have its time stamp already
                raise CheckpointError(f"{path}: is open for writing, here or in another process; close it first")
            yield fd
        finally:
            os.close(fd)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since its first opening."""
        for path in self._seen:
            with self.open(path):
                pass

    def _compare(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: cannot be read (not a regular file)")
        # ctime, as mtime can be set back; it changes with names and modes, too
        seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if self._seen.setdefault(path, seen) != seen:
            raise CheckpointError(f"{path}: was written to, replaced, renamed or linked while it was read. Try again.")


class Window(io.RawIOBase):
    """Part of an open file, as a file object."""

    def __init__(self, fd: int, begin: int, length: int) -> None:
        self._fd, self._begin, self._length = fd, begin, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        rest = max(0, self._length - self._at)
        got = os.preadv(self._fd, [memoryview(buffer).cast("B")[:rest]], self._begin + self._at)
        self._at += got
        return got
