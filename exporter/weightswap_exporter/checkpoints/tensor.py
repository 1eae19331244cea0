"""A tensor of a checkpoint, whose values are read when they are wanted, and by whom: in memory, or in an open file."""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightswap_exporter.modules.tensors import Kind, tie_key
from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import Match, Reading, Readings, by_key
from weightswap_runtime.sources.byte_source import has_writer, open_at_once, outwait_clock
from weightswap_runtime.tensors import DTYPES, FLOATING, TensorBytes, TensorType, Typed, row_major
from weightswap_runtime.torch_tensors import DTYPE_NAMES, tensor_bytes, torch_dtype

PIECE = 16 << 20  # bytes that are converted at a time
SCALED = ("F8", "F4")  # dtypes of floats that mostly have a scale beside them
Read = Callable[[memoryview, int], None]


class PartOf(NamedTuple):
    """Composed tensor that a tensor is a part of."""

    suffix: str  # that the part's name adds to its name
    kind: Kind


class CheckpointTensor(NamedTuple):
    """Tensor of a checkpoint."""

    dtype: str  # safetensors name
    shape: tuple[int, ...]
    tie_key: Hashable  # equal only for tensors that have the same values, found without reading them
    load: Callable[[], torch.Tensor]  # returns the values, in their own memory or the source's
    problems: Callable[[], Sequence[str]] = lambda: ()  # reasons why `load` would fail, and wrong checksums
    lacking: Callable[[], Sequence[str]] = lambda: ()  # those that are known without reading the values
    # returns what fills memory with row-major bytes from an offset on, in any thread; None if that would take the
    # memory of the whole tensor
    parts: Callable[[], Read | None] = lambda: None
    file: Path | None = None  # of the values, if there is exactly one
    offset: int | None = None  # of the first element in the file, in bytes, if known
    part_of: PartOf | None = None  # if known


def values_of(tensor: torch.Tensor) -> CheckpointTensor:
    """Return a tensor in memory as a CheckpointTensor, without a copy."""

    def parts() -> Read | None:
        return partial(copy_part, tensor) if tensor.is_contiguous() else None

    return CheckpointTensor(dtype_of(tensor.dtype), tuple(tensor.shape), tie_key(tensor), lambda: tensor, parts=parts)


def dtype_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, or `torch.x` if it has none."""
    return DTYPE_NAMES.get(dtype, str(dtype))


def content_of(tensor: torch.Tensor) -> TensorBytes:
    """Return a tensor's content; it shares the tensor's memory if that is contiguous and on the CPU."""
    return TensorBytes(dtype_of(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def contents_of(values: Iterable[Any]) -> list[Any]:
    """Return the inputs or outputs of a call, with tensors as contents."""
    return [content_of(value) if isinstance(value, torch.Tensor) else value for value in values]


def copy_part(tensor: torch.Tensor, memory: memoryview, begin: int) -> None:
    """Fill memory with a tensor's row-major bytes from `begin` on."""
    memory[:] = tensor_bytes(tensor)[begin : begin + len(memory)]


def pieces(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor of any layout and device, in pieces of at most 16 MiB before `change`.

    change: an elementwise function, called on one piece at a time. Memory: one piece, beside the tensor.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size <= PIECE:
        yield tensor_bytes(change(tensor.cpu()))
    elif tensor.is_contiguous():
        for part in torch.split(tensor.view(-1), PIECE // tensor.element_size()):
            yield tensor_bytes(change(part.cpu()))
    else:
        rows = max(1, PIECE // (size // len(tensor)))
        for part in tensor.unbind() if rows == 1 else torch.split(tensor, rows):
            yield from pieces(part, change)


# Tensors in files.


class Files:
    """Files of a checkpoint, which must stay as they are at their first opening.

    Those of a distributed checkpoint are opened for one tensor at a time, so that there can be any number of them.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._records: dict[Path, dict[tuple[int, int, int], bool]] = {}

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

    def is_damaged(self, path: Path, place: tuple[int, int, int], check: Callable[[], bool]) -> bool:
        """Return the result of the check of a record's checksum, which is computed once, however many chunks share it.

        place: begin and size in bytes, and the checksum. Raises CheckpointError for records that overlap.
        """
        known = self._records.setdefault(path, {})
        if place not in known:
            if sum(size for _, size, _ in {*known, place}) > path.stat().st_size:
                raise CheckpointError(f"{path}: its records overlap. Save the checkpoint again, or copy it again.")
            known[place] = check()
        return known[place]

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


class Stored(NamedTuple):
    """Tensor in an open file."""

    where: str
    fd: int
    offset: int  # of its first element in the file, in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements

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


# Casts.


def requested(dtype: torch.dtype | str | None, manifest: Manifest) -> str | None:
    """Return the safetensors name of a torch dtype, given as such or by name (`bfloat16`).

    Raises CheckpointError unless it is floating and the graph has a tensor of it.
    """
    if dtype is None:
        return None
    torch_type = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    name = dtype_of(torch_type) if isinstance(torch_type, torch.dtype) else ""
    if name not in FLOATING:
        known = ", ".join(row.torch for row in DTYPES.values() if row.torch and row.name in FLOATING)
        raise CheckpointError(f"dtype {str(dtype)!r}: tensors can be cast to {known}")
    dtypes = {weight.dtype for weight in manifest.weights}
    dtypes |= {item.dtype for item in manifest.conversion.inputs if item.kind == "key"}
    if name not in dtypes:
        wants = ", ".join(DTYPES[other].torch or other for other in sorted(dtypes & FLOATING)) or "no float tensors"
        raise CheckpointError(
            f"dtype {DTYPES[name].torch}: the graph expects none, so nothing would be cast; it expects {wants}. Leave "
            "the dtype out or give one of these, or export the model in this dtype."
        )
    return name


def casting(readings: Readings, dtype: str | None, manifest: Manifest) -> Readings:
    """Return readings that accept floating tensors of any dtype where the graph has `dtype`."""
    if dtype is None or (manifest.conversion.untraceable and by_key in readings):  # `resolve` refuses these
        return readings
    return tuple(_casting(reading, dtype) for reading in readings)


def _casting(reading: Callable[[Manifest], Reading], dtype: str) -> Callable[[Manifest], Reading]:
    class Casting(Reading):
        def match(self, tensors: Mapping[str, Typed]) -> Match:
            expected = [(key, typed) for demand in self.demands for key, typed in demand.keys.items()]
            cast = {
                key: TensorType(dtype, tuple(tensors[key].shape))
                for key, typed in expected
                if typed.dtype == dtype and key in tensors and tensors[key].dtype in FLOATING
            }
            return super().match({**tensors, **cast})

    return lambda manifest: Casting(*reading(manifest))


def casts(match: Match, manifest: Manifest, tensors: Mapping[str, CheckpointTensor]) -> dict[str, list[str]]:
    """Return the weights that a match casts, sorted, by their dtype in the checkpoint."""
    rows = {weight.name: weight for weight in manifest.weights}
    inputs = {item.name: item.dtype for item in manifest.conversion.inputs}
    sources = {(tensors[names[0]].dtype, weight) for weight, names in match.found.items()}
    changed = {(dtype, weight) for dtype, weight in sources if dtype != rows[weight].dtype}
    changed |= {
        (tensors[name].dtype, weight)
        for weight, names in match.computed.items()
        for key, name in names.items()
        if tensors[name].dtype != inputs[key]
    }
    return {
        dtype: sorted(weight for of, weight in changed if of == dtype) for dtype in sorted({of for of, _ in changed})
    }


def cast(tensor: torch.Tensor, dtype: str, where: str) -> torch.Tensor:
    """Cast a tensor as `Tensor.to` does; return the same tensor if it has the dtype.

    Raises CheckpointError if a finite value is beyond the dtype's range.
    """
    target = torch_dtype(dtype)
    if tensor.dtype == target:
        return tensor
    result = tensor.to(target)
    lost = ~torch.isfinite(result.float())
    if (lost.any() and (lost & torch.isfinite(tensor.double())).any()) or _is_beyond(tensor, result):
        raise CheckpointError(f"{where}: has values outside the range of {dtype}, to which it would be cast")
    return result


def _is_beyond(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether a cast to eight bits has made another number of what is beyond the range: torch 2.13 makes the
    largest one where a dtype has no infinity, and a positive one where it has neither a sign nor zero."""
    if result.element_size() > 1:
        return False
    info = torch.finfo(result.dtype)
    rounded = math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)  # so much more is rounded to the largest, too
    before, after = tensor.double(), result.double()
    beyond = (before.abs() > info.max + rounded) | ((after != 0) & (after.sign() != before.sign()))
    return bool((beyond & torch.isfinite(after)).any())
