"""Interface of byte sources: open files and remote objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MOST_BUFFERS = 512  # below the kernel's IOV_MAX of 1024
Check = Callable[[], None]  # a callback that raises an exception to end a wait


def between(buffers: list[memoryview], low: int, high: int) -> list[memoryview]:
    """Return views of bytes `low` to `high` of the concatenation of `buffers`."""
    views = []
    for buffer in buffers:
        views += [buffer[max(0, low) : high]] if low < len(buffer) and high > 0 else []
        low, high = low - len(buffer), high - len(buffer)
    return views


class ByteSource(Protocol):
    """Open file or object of a known size. Several threads may read it at once."""

    where: str  # its name in messages: a path or a URL
    size: int  # bytes
    unit: int  # preferred size of a read in bytes

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill all the buffers, at most MOST_BUFFERS, with the bytes from `offset` on. Raises WeightFileError.

        Nothing is written to the buffers after this method has returned or raised.
        """
        ...

    def await_stable_mtime(self) -> None:
        """Wait until `check_unchanged` can detect every later write.

        Raises WeightFileError if it never can, for example while a local file is open for writing, and if a remote
        object is no longer the one that was read before.
        """
        ...

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError if the file or object was written to since it was opened, or may have been.

        proven: True if digests prove the content; other changes of the file (names, mode) are then accepted.
        """
        ...

    def close(self) -> None: ...
