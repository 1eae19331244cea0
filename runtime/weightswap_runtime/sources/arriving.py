"""Content that comes once and in order, as from a network, read like a file that nobody can go back in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition

from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.jobs import POLL_SECONDS
from weightswap_runtime.native import copy_bytes
from weightswap_runtime.tensors import BLOCK

from .byte_source import Check

Receive = Callable[[Check], memoryview]


class Arriving:
    """Content of a known size, as a ByteSource. Each byte is read once, after those before it, or dropped.

    At first it can be read as often as one likes, but from its begin only, as a header is; this much is kept. `expect`
    then says what will be read. Of several threads each waits for its turn: one reads while others hash what they have
    read.
    """

    unit: int | None = BLOCK

    def __init__(self, where: str, size: int, receive: Receive) -> None:
        """receive: returns the next bytes, at least one, which stay as they are until it is called again. It calls its
        argument while it waits, and raises what ends the transfer."""
        self.where, self.size = where, size
        self.check: Check = lambda: None  # called in each wait; what it raises ends that
        self._receive = receive
        self._kept = bytearray()  # all that has come, until `expect`
        self._rest = memoryview(b"")  # what has come, and was not read yet
        self._position = 0  # of the rest
        self._runs: deque[tuple[int, int]] | None = None  # begins and ends of what will be read
        self._error: BaseException | None = None
        self._turn = Condition()  # of all above

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say what will be read from now on: begins and ends, in order."""
        runs: deque[tuple[int, int]] = deque()
        for begin, end in ranges:
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], end)
            elif begin < end:
                runs.append((begin, end))
        with self._turn:
            if self._runs is None:
                self._rest, self._kept = memoryview(self._kept), bytearray()
            self._runs = runs

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers with the bytes from `offset` on, once those that are expected before them were read.

        Raises WeightFileError for bytes that were read before, and what ends the transfer, in each thread.
        """
        size = sum(map(len, buffers))
        with self._turn:
            if self._runs is None:
                self._copy_kept(buffers, offset, offset + size)
            elif size:
                try:
                    self._await_turn(offset)
                    self._drop(offset)
                    self._fill(buffers)
                    if self._position >= self._runs[0][1]:
                        self._runs.popleft()
                except BaseException as error:
                    self._error = self._error or error
                    raise
                finally:
                    self._turn.notify_all()

    def _copy_kept(self, buffers: list[memoryview], begin: int, end: int) -> None:
        while len(self._kept) < end:
            self._kept += self._receive(self.check)
        for buffer in buffers:
            buffer[:] = self._kept[begin : begin + len(buffer)]
            begin += len(buffer)

    def _await_turn(self, offset: int) -> None:
        while self._error is None:
            following = max(self._position, self._runs[0][0]) if self._runs else self.size
            if following == offset:
                return
            if following > offset:
                raise WeightFileError(f"{self.where}: comes once, and byte {offset} was read already")
            self._turn.wait(POLL_SECONDS)
            self.check()
        raise self._error

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

    def stop(self) -> None:
        """End the waits of threads, when one that should have read before them does not."""
        with self._turn:
            self._error = self._error or WeightFileError(f"{self.where}: is no longer read")
            self._turn.notify_all()

    def await_stable_mtime(self) -> None:
        """Do nothing: nobody else can write to it."""

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Take the rest, so that it has come whole. Raises what ends the transfer."""
        self.expect(())
        with self._turn:
            self._drop(self.size)

    def close(self) -> None:
        self.stop()
        self._rest = memoryview(b"")
        self._kept.clear()
