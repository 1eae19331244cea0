"""An accelerator as this package needs it: memory, streams that keep an order, copies, a kernel that inspects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import DeviceError, Unsupported
from weightswap_runtime.tensors import BLOCK

from .arena import Content, Copy, Inspected

_FEW = 16  # ranges that are copied one by one

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


class Inspector(Protocol):
    """Inspects blocks of a buffer on the device. Its work is enqueued in the current stream."""

    def inspect(self, first: int, count: int) -> None:
        """Inspect so many blocks from an index on."""
        ...

    def results(self) -> Inspected:
        """Return what was found in all blocks. The host waits."""
        ...


class BlockTable(NamedTuple):
    """Blocks of tensors in a buffer, one row for each; a Python object for each would take longer than its copy."""

    offsets: np.ndarray  # int64, in bytes
    lengths: np.ndarray  # int64, in bytes
    kinds: np.ndarray  # indices of their dtypes
    dtypes: list[str]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> BlockTable:
        slots = np.array([content.slot for content in contents], np.int64)
        dtypes = sorted({content.dtype for content in contents})
        kinds = np.array([dtypes.index(content.dtype) for content in contents])
        counts = np.maximum(1, -(-slots[:, 1] // BLOCK))  # an empty tensor has one block
        starts = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK
        lengths = np.minimum(BLOCK, np.repeat(slots[:, 1], counts) - starts)
        return cls(np.repeat(slots[:, 0], counts) + starts, lengths, np.repeat(kinds, counts), dtypes)

    def windows(self, nbytes: int) -> list[int]:
        """Return the ends of windows of about so many bytes, as indices."""
        numbers = (self.lengths.cumsum() - self.lengths) // nbytes
        return [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]


class Device(Protocol):
    """One accelerator. Copies are enqueued in the calling thread's current stream."""

    name: str  # such as "cuda:0"
    staging: Stream  # for work that no call waits for
    inspecting: Stream  # for work beside that
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

    def upload(
        self, target: Buffer, copies: Sequence[Copy], source: int | memoryview, through: LockedBuffer, done: int
    ) -> int | None:
        """Enqueue copies of an open file's bytes, or of ordinary memory's, in the current stream, without Python.

        They pass through a page-locked buffer of native.UPLOAD_BYTES or more. done: how many of all their bytes are
        copied already. Returns how many are then, after some milliseconds perhaps not all; these are read, and the
        buffer as well if it is not all. Returns None, with some copied, if the device cannot do that or if it failed:
        to copy with the other methods then says why.
        """
        ...

    def scatter(self, target: Buffer, source: Buffer, rows: Rows) -> None:
        """Enqueue: write rows that are end to end in `source` to their places in `target`."""
        ...

    def gather(self, target: Buffer, source: Buffer, rows: Rows) -> None:
        """Enqueue: the reverse. Fill the rows of `target`, which has their numbers, from their places in `source`."""
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

    def borrow(self, tensor: Any) -> Buffer | None:
        """Return a torch tensor's row-major bytes, for the current stream; None if it is not on this device."""
        ...

    def inspector(self, buffer: Buffer, blocks: BlockTable) -> Inspector | None:
        """Return an inspector of blocks; None if the device has none. Raises what the device reports."""
        ...

    def distrust_inspector(self, reason: str, lasting: bool) -> None:
        """Log that the host inspects a set. lasting: `inspector` returns None from now on."""
        ...


class Rows(NamedTuple):
    """Rows of a table in an arena, with a region that has their content, and their numbers as int64."""

    base: int  # offset in the arena of the row with the number 0
    width: int  # bytes of a row
    total: int  # of rows
    begin: int  # offset in the region of the rows' content, end to end
    numbers: int  # offset in the region of their numbers, a multiple of 8

    @property
    def end(self) -> int:
        return self.numbers + 8 * self.total

    @classmethod
    def of(cls, part: ByteRanges, begin: int) -> Rows | None:
        """Return the rows that these ranges are, for a region; None if they are not rows, or fewer than a few."""
        width = part.width
        if width is None or len(part.begins) < _FEW or not part.moved(-int(part.begins[0])).are_multiples(width):
            return None
        numbers = begin + part.nbytes
        return cls(int(part.begins[0]), width, len(part.begins), begin, numbers + -numbers % 8)


def check_not_capturing(device: Device, stream: Stream) -> None:
    """Raise DeviceError if a stream is being captured: a mark in it, and work that waits for the mark, would be too."""
    if device.is_capturing(stream):
        raise DeviceError(
            f"{device.name}: a stream that calls have used is being captured in a CUDA graph of the application; "
            "our copies would become part of it. Wait until the capture ends, or capture on another stream."
        )


def check_call(device: Device, what: str = "a call") -> None:
    """Raise Unsupported if `what` would be captured in a CUDA graph of the application."""
    if device.is_capturing_here():
        raise Unsupported(
            f"{what} during a capture by the application: replays of its graph would not be ordered with swaps. Load "
            "with cuda_graphs=..., which captures calls itself."
        )
