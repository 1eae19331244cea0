"""The interface of accelerators. With it the order of the runtime's work can be tested without one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from weightswap_runtime.memory.arena import ByteRange

Event = Any  # a mark in a stream; opaque except to the device
Stream = Any  # a queue of asynchronous work that a device does in order; opaque except to the device


class Buffer(Protocol):
    """Memory that the device reads and writes: its own or page-locked host memory."""

    nbytes: int
    address: int


class LockedBuffer(Buffer, Protocol):
    """Page-locked host memory. Writes of the device are visible in it once they are done."""

    @property
    def view(self) -> memoryview: ...


class Hasher(Protocol):
    """Computes BLAKE3 digests on the device."""

    def digests(self, buffer: Buffer, parts: Sequence[ByteRange]) -> list[bytes]:
        """Return the digests of parts of at most a block each, computed in the current stream. The host waits."""
        ...


class Device(Protocol):
    """One accelerator. Copies are enqueued in the calling thread's current stream."""

    name: str  # such as "cuda:0"

    staging: Stream  # for work that no call waits for
    commits: Stream  # for work that calls wait for

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate memory for the stream `staging`; other streams wait for a mark in it first. Raises MemoryError."""
        ...

    def lock(self, nbytes: int) -> LockedBuffer:
        """Allocate page-locked host memory. Raises MemoryError."""
        ...

    def free_bytes(self) -> int:
        """Estimate how many bytes can still be allocated."""
        ...

    def needed_by_calls(self) -> int:
        """Estimate how many bytes calls may need beyond what they have now."""
        ...

    def is_foreign(self, stream: Stream) -> bool:
        """Return whether a stream may be destroyed at any time and its key reused. Raises Unsupported for no stream."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether a stream's work is being captured instead of done."""
        ...

    def is_capturing_here(self) -> bool:
        """As `is_capturing`, for the current stream, and fast."""
        ...

    def copy(self, target: Buffer, at: int, source: Buffer, begin: int, nbytes: int) -> None:
        """Enqueue a copy of bytes in the current stream. The host does not wait."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the thread's current one."""
        ...

    def current(self) -> Stream:
        """Return the thread's current stream."""
        ...

    def current_key(self) -> int:
        """Return a number that identifies the current stream."""
        ...

    def mark(self, stream: Stream) -> Event:
        """Record a mark after all work that is enqueued in `stream`."""
        ...

    def finish(self, mark: Event) -> None:
        """Let the host wait until everything before a mark is done. Raises what the device reports."""
        ...

    def wait(self, stream: Stream, mark: Event) -> None:
        """Let all later work of `stream` wait for a mark. The host does not wait."""
        ...

    def lend(self, buffer: Buffer, stream: Stream) -> None:
        """Keep the memory of `buffer`, once it is dropped, until `stream` has done all work enqueued until then."""
        ...

    def hasher(self, buffer: Buffer) -> Hasher | None:
        """Return the device's hasher if it is faster than the host. buffer: many blocks, to measure it with."""
        ...

    def distrust_hasher(self, reason: str) -> None:
        """Make `hasher` return None from now on."""
        ...
