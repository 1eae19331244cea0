"""The interface of what bytes are read from, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MOST_BUFFERS = 512  # below the kernel's IOV_MAX of 1024
Check = Callable[[], None]  # raises what ends a wait


def between(buffers: list[memoryview], low: int, high: int) -> list[memoryview]:
    """The parts of neighbouring buffers that are bytes `low` to `high` of the whole."""
    found = []
    for buffer in buffers:
        found += [buffer[max(0, low) : high]] if low < len(buffer) and high > 0 else []
        low, high = low - len(buffer), high - len(buffer)
    return found


class ByteSource(Protocol):
    """An open file or object of a known size, whose bytes several threads may read at once."""

    where: str  # what messages call it: a path or a URL
    size: int
    unit: int  # bytes that one read should ask for

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill all the buffers, at most MOST_BUFFERS, from `offset` on. Raises WeightFileError.

        Nothing is written to them after it has returned or raised.
        """
        ...

    def await_stable_mtime(self) -> None:
        """Wait until `check_unchanged` would notice every later write.

        Raises WeightFileError if it never would, as while a local file is open for writing, and if what a remote source
        has given before is no longer there.
        """
        ...

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError if what the name stood for was written to since it was opened, or may have been.

        proven: digests prove the content, so that what else may have changed the file (its names, its mode) is fine.
        """
        ...

    def close(self) -> None: ...
