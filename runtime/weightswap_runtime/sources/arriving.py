"""Content that comes once and in order, as from a network, read like a file that nobody can go back in."""

from __future__ import annotations

from collections.abc import Callable

from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.native import copy_bytes
from weightswap_runtime.tensors import BLOCK

from .byte_source import Check

Receive = Callable[[Check], memoryview]


class Arriving:
    """Content of a known size, as a ByteSource that one thread reads in order; what it leaves out is dropped.

    Until `start` it can be read as often as one likes, but from its begin only, as a header is; this much is kept.
    """

    unit: int | None = BLOCK

    def __init__(self, where: str, size: int, receive: Receive) -> None:
        """receive: returns the next bytes, at least one, which stay as they are until it is called again. It calls its
        argument while it waits, and raises what ends the transfer."""
        self.where, self.size = where, size
        self.check: Check = lambda: None  # called in each wait; what it raises ends that
        self._receive = receive
        self._kept: bytearray | None = bytearray()  # all that has come; None after `start`
        self._rest = memoryview(b"")  # what has come, and was not read yet
        self._position = 0  # of the rest

    def start(self) -> None:
        """Let everything be read once from now on."""
        if self._kept is not None:
            self._rest, self._kept = memoryview(self._kept), None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers with the bytes from `offset` on.

        Raises WeightFileError for bytes that were read or passed over before, and what ends the transfer.
        """
        size = sum(map(len, buffers))
        if self._kept is not None:
            self._copy_kept(self._kept, buffers, offset, offset + size)
        elif size:
            if offset < self._position:
                raise WeightFileError(f"{self.where}: comes once, and byte {offset} was read already")
            self._drop(offset)
            self._fill(buffers)

    def _copy_kept(self, kept: bytearray, buffers: list[memoryview], begin: int, end: int) -> None:
        while len(kept) < end:
            kept += self._receive(self.check)
        for buffer in buffers:
            buffer[:] = kept[begin : begin + len(buffer)]
            begin += len(buffer)

    def _drop(self, end: int) -> None:
        while self._position < end:
            self._advance(min(end - self._position, len(self._available())))

    def _fill(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                part = self._available()[: len(buffer) - done]
                copy_bytes(buffer[done : done + len(part)], part)
                done += len(part)
                self._advance(len(part))

    def _available(self) -> memoryview:
        if not self._rest:
            self._rest = self._receive(self.check)
        return self._rest

    def _advance(self, count: int) -> None:
        self._rest = self._rest[count:]
        self._position += count

    def await_stable_mtime(self) -> None:
        """Do nothing: nobody else can write to it."""

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Take the rest, so that it has come whole. Raises what ends the transfer."""
        self.start()
        self._drop(self.size)

    def close(self) -> None:
        self._rest, self._kept = memoryview(b""), None
