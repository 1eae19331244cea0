"""Weight files whose bytes come once and in order, in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

from weightswap_runtime import TransferFailed
from weightswap_runtime.staging.given import GivenWeights, as_arriving


def in_pieces(content: bytes, *sizes: int) -> Callable[[Callable[[], None]], memoryview]:
    """Return a callback that hands content over in pieces, and raises TransferFailed once there is no more."""

    def pieces() -> Iterator[memoryview]:
        at, lengths = 0, cycle(sizes)
        while at < len(content):
            size = next(lengths)
            yield memoryview(content)[at : at + size]
            at += size
        raise TransferFailed("the sender has gone")

    left = pieces()

    def receive(check: Callable[[], None]) -> memoryview:
        check()
        return next(left)

    return receive


def arriving(path: Path, *sizes: int, announced: int | None = None) -> GivenWeights:
    """Return the content of a file as weights that arrive. announced: bytes; None: as many as there are."""
    content = path.read_bytes()
    size = len(content) if announced is None else announced
    return as_arriving("memory:upload", size, in_pieces(content, *(sizes or (1 << 16,))))
