"""Accelerators: what the runtime asks of one, so that the order of its work can be tested without any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from weightswap_runtime.memory.arena import ByteRange

Event = Any  # a mark in a stream; only the device looks into it
Stream = Any  # work of a device that is done in order, some time after it was asked for; only the device looks into it


class Buffer(Protocol):
    """Memory that the device reads and writes: its own, or page-locked memory of the host."""

    nbytes: int
    address: int


class LockedBuffer(Buffer, Protocol):
    """Page-locked memory of the host. What the device does to it shows once that is done."""

    @property
    def view(self) -> memoryview: ...


class Hasher(Protocol):
    """Computes BLAKE3 digests where the bytes are."""

    def digests(self, buffer: Buffer, parts: Sequence[ByteRange]) -> list[bytes]:
        """Those of parts of at most a block each, in the current stream. The host waits."""
        ...


class Device(Protocol):
    """One accelerator. Copies are asked for in the calling thread's current stream."""

    name: str  # such as "cuda:0"

    staging: Stream  # for work that serves nobody yet
    commits: Stream  # for work that calls wait for

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device, for the stream `staging`; others wait for a mark there first. Raises MemoryError."""
        ...

    def lock(self, nbytes: int) -> LockedBuffer:
        """Page-locked memory of the host. Raises MemoryError."""
        ...

    def free_bytes(self) -> int:
        """About how much can still be allocated."""
        ...

    def needed_by_calls(self) -> int:
        """About how many bytes calls may need beyond what they have now."""
        ...

    def is_foreign(self, stream: Stream) -> bool:
        """Whether a stream may end at any time, and another have its key. Raises Unsupported for what is no stream."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Whether what a stream is asked for is recorded instead of done."""
        ...

    def is_capturing_here(self) -> bool:
        """As `is_capturing`, of the current stream, and quick."""
        ...

    def copy(self, target: Buffer, at: int, source: Buffer, begin: int, nbytes: int) -> None:
        """Ask for a copy of bytes, in the current stream. The host does not wait."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A block in which `stream` is the thread's current one."""
        ...

    def current(self) -> Stream:
        """The thread's current stream."""
        ...

    def current_key(self) -> int:
        """A number that stands for the current stream, and for no other."""
        ...

    def mark(self, stream: Stream) -> Event:
        """A mark after all that `stream` was asked for."""
        ...

    def finish(self, mark: Event) -> None:
        """Keep the host waiting until everything before a mark is done. Raises what the device reports."""
        ...

    def wait(self, stream: Stream, mark: Event) -> None:
        """Let all that `stream` is asked for from now on wait for a mark. The host does not wait."""
        ...

    def lend(self, buffer: Buffer, stream: Stream) -> None:
        """Once `buffer` is dropped, its memory is kept until what `stream` was asked for until then is done."""
        ...

    def hasher(self, buffer: Buffer) -> Hasher | None:
        """What computes digests on the device, if that is quicker than on the host. buffer: of many blocks."""
        ...

    def distrust_hasher(self, reason: str) -> None:
        """Let there be none from now on."""
        ...
