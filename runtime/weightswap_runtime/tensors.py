"""One tensor as bytes: its type, its content as an array, its digest, and how it differs from another.

Weights are bytes almost everywhere here: they come from files and go to memory without torch. The dtypes are those of
the safetensors format, under its names.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .errors import Unsupported

MAX_DIMENSIONS = 64  # of a tensor, in numpy and torch
# Digests are of blocks, so that threads hash one tensor together, and a delta can tell which bytes of it differ
BLOCK = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")  # as text; graph ids and weights ids are digests, too
Blocks = tuple[bytes, ...]  # digests of a tensor's blocks


class DType(NamedTuple):
    """An element type of the safetensors format."""

    name: str
    bits: int
    torch: str | None = None  # its name in torch, and in numpy or ml_dtypes
    code: int | None = None  # its number in torch's archives of graphs: ScalarType of torch/_export/serde/schema.py


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("BOOL", 8, "bool", 12),
        DType("U8", 8, "uint8", 1),
        DType("I8", 8, "int8", 2),
        DType("U16", 16, "uint16", 28),
        DType("I16", 16, "int16", 3),
        DType("U32", 32, "uint32", 34),
        DType("I32", 32, "int32", 4),
        DType("U64", 64, "uint64", 35),
        DType("I64", 64, "int64", 5),
        DType("F16", 16, "float16", 6),
        DType("BF16", 16, "bfloat16", 13),
        DType("F32", 32, "float32", 7),
        DType("F64", 64, "float64", 8),
        DType("C64", 64, "complex64", 10),
        DType("F8_E4M3", 8, "float8_e4m3fn", 29),
        DType("F8_E5M2", 8, "float8_e5m2", 30),
        DType("F8_E8M0", 8, "float8_e8m0fnu", 33),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", 31),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", 32),
        DType("F6_E2M3", 6),
        DType("F6_E3M2", 6),
        DType("F4", 4),
    )
}
FLOATING = frozenset(name for name in DTYPES if name.startswith(("F", "BF")))
TORCH_NAMES: dict[str, str] = {row.torch: row.name for row in DTYPES.values() if row.torch}


def has_fractions(dtype: str) -> bool:
    """Return whether the elements are floating or complex numbers."""
    return dtype.startswith(("F", "BF", "C"))


def nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a dense tensor in bytes; None if its bits do not fill whole bytes."""
    bits = DTYPES[dtype].bits * math.prod(shape)
    return bits // 8 if bits % 8 == 0 else None


def is_valid(tensor: Typed) -> bool:
    """Return whether the dtype is known, there are at most 64 sizes, none negative, and the bits fill whole bytes.

    There are less than 2^63 bytes, so that offsets in them can be computed with 64 bits.
    """
    known = tensor.dtype in DTYPES and len(tensor.shape) <= MAX_DIMENSIONS and min(tensor.shape, default=0) >= 0
    size = nbytes(tensor.dtype, tensor.shape) if known else None
    return size is not None and size < 1 << 63


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


class Typed(Protocol):
    """An object with a safetensors dtype and a shape in elements."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorType(msgspec.Struct, frozen=True):
    """A safetensors dtype and a shape in elements."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Typed) -> TensorType:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return describe(self)


def describe(tensor: Typed) -> str:
    """Format a tensor's type for messages and tables, such as `F32[2, 3]`."""
    sizes = list(tensor.shape) if len(tensor.shape) <= MAX_DIMENSIONS else [f"{len(tensor.shape)} dimensions"]
    return f"{tensor.dtype}[{', '.join(map(str, sizes))}]"


def same_type(one: Typed, other: Typed) -> bool:
    """Return whether two tensors have the same dtype and shape."""
    return one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)


class TensorBytes(NamedTuple):
    """A tensor's safetensors dtype, its shape, and its row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, memory: memoryview, begin: int) -> None:
        """Fill the memory with bytes from the offset `begin` on."""
        memory[:] = self.data[begin : begin + len(memory)]


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of numpy or ml_dtypes. Raises Unsupported for elements that do not fill whole bytes."""
    name = DTYPES[dtype].torch
    if name is None:
        raise Unsupported(f"dtype {dtype}: numpy has no such type")
    return np.dtype(getattr(ml_dtypes, name, name))


def is_numpys(dtype: str) -> bool:
    """Return whether the type is numpy's own."""
    return numpy_dtype(dtype).isbuiltin == 1


def as_array(content: TensorBytes) -> NDArray[Any]:
    """Return an array that shares the bytes' memory. Raises Unsupported if numpy has no such type."""
    return np.frombuffer(content.data, _little_endian(numpy_dtype(content.dtype))).reshape(content.shape)


def array_content(array: NDArray[Any]) -> TensorBytes:
    """Return the content of an array; it shares the array's memory if that is row-major and little-endian.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = safetensors_name(array.dtype)
    if name is None:
        raise Unsupported(f"numpy's {array.dtype} is not a dtype of the safetensors format")
    rows = np.ascontiguousarray(array, _little_endian(array.dtype))
    return TensorBytes(name, array.shape, rows.reshape(-1).view(np.uint8).data)


@functools.lru_cache
def safetensors_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype of numpy or ml_dtypes; None if the format has none."""
    return TORCH_NAMES.get(dtype.name)


@functools.lru_cache
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def as_float64(content: TensorBytes, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the elements as float64 or complex128, flat and row-major. Integers beyond 2**53 are rounded.

    out: memory for the result, of its dtype and size. Raises Unsupported for dtypes whose elements do not fill whole
    bytes.
    """
    values = as_array(content).reshape(-1)
    if DTYPES[content.dtype].bits == 8 and has_fractions(content.dtype):  # several times faster than a cast
        return np.take(_float8_values(content.dtype), values.view(np.uint8), out=out, mode="clip")
    if out is None:
        out = np.empty(len(values), np.complex128 if values.dtype.kind == "c" else np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN is made a quiet one
        np.copyto(out, values, casting="unsafe")
    return out


@functools.cache
def _float8_values(dtype: str) -> NDArray[Any]:
    """Return the values of all 256 codes."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float64)


def block_count(nbytes: int) -> int:
    """Return the number of blocks of a tensor of this size. An empty tensor has one empty block."""
    return max(1, -(-nbytes // BLOCK))


def block_digests(data: memoryview) -> Blocks:
    """Return the digests of a tensor's blocks of 1 MiB, in order. The last block may be shorter."""
    return tuple(blake3(data[start : start + BLOCK]).digest() for start in range(0, max(1, len(data)), BLOCK))


def tensor_digest(blocks: Sequence[bytes]) -> str:
    """Return a tensor's digest, hexadecimal: that of its only block, or the digest of its blocks' digests."""
    return blocks[0].hex() if len(blocks) == 1 else blake3(b"".join(blocks)).hexdigest()


class TensorHasher:
    """Computes the digest of a tensor from pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._block = blake3()
        self._free = BLOCK  # bytes that are missing in the block

    def update(self, piece: memoryview) -> None:
        while len(piece):
            if not self._free:  # only now, as the last block is never an empty one
                self._blocks.append(self._block.digest())
                self._block, self._free = blake3(), BLOCK
            part = piece[: self._free]
            self._block.update(part)
            self._free -= len(part)
            piece = piece[len(part) :]

    @property
    def blocks(self) -> Blocks:
        """The digests of the blocks so far."""
        return (*self._blocks, self._block.digest())

    def hexdigest(self) -> str:
        return tensor_digest(self.blocks)


def digest_of(pieces: Iterable[memoryview]) -> str:
    """Return the digest of a tensor whose bytes come in pieces of any size."""
    hasher = TensorHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


Tolerance = tuple[float, float]  # relative, absolute
EXACT: Tolerance = (0.0, 0.0)
# https://docs.pytorch.org/docs/stable/testing.html#torch.testing.assert_close; every other dtype is compared exactly
DEFAULT_TOLERANCES: dict[str, Tolerance] = {
    "F16": (1e-3, 1e-5),
    "BF16": (1.6e-2, 1e-5),
    "F32": (1.3e-6, 1e-5),
    "F64": (1e-7, 1e-7),
    "C64": (1.3e-6, 1e-5),
}


def difference(expected: TensorBytes, found: TensorBytes, tolerance: Tolerance | None) -> str | None:
    """Describe where two tensors differ most; return None if they do not.

    tolerance: (rtol, atol), as in `torch.isclose` with `expected` as its second operand. None means bit for bit,
    where any NaN equals any other, but 0.0 is not -0.0: the same operations in the same order give the same sign, so
    another sign shows that something else was computed. Tensors that are neither floating nor complex are always
    compared exactly. Another dtype or shape is a difference.
    """
    if not same_type(expected, found):
        return f": expected {describe(expected)}, found {describe(found)}"
    differ = differing(expected, found, tolerance)
    count = int(differ.sum())
    if not count:
        return None
    position = furthest(expected, found, differ)
    one, other = number(expected, position), number(found, position)
    absolute = abs(other - one)
    relative = absolute / abs(one) if one else float("inf") if absolute else 0.0
    beyond = ", compared bit for bit"
    if tolerance is not None and has_fractions(found.dtype):
        beyond = f" by more than rtol={tolerance[0]:g}, atol={tolerance[1]:g}"
    return (
        f"{_index_text(position, found.shape)}: expected {one}, found {other}, absolute difference {absolute:.6g}, "
        f"relative {relative:.6g}; {count} of {differ.size} elements differ{beyond}"
    )


def differing(expected: TensorBytes, found: TensorBytes, tolerance: Tolerance | None) -> NDArray[np.bool_]:
    """Return a mask, flat and row-major, of the elements that differ between tensors of one type. See `difference`."""
    if tolerance is not None and has_fractions(found.dtype):
        return ~_close(as_float64(expected), as_float64(found), *tolerance)
    one, other = (np.frombuffer(each.data, f"u{DTYPES[each.dtype].bits // 8}") for each in (expected, found))
    differ: NDArray[np.bool_] = one != other
    if has_fractions(found.dtype) and differ.any():
        differ &= ~(np.isnan(as_float64(expected)) & np.isnan(as_float64(found)))
    return differ


def furthest(expected: TensorBytes, found: TensorBytes, differ: NDArray[np.bool_]) -> int:
    """Return the row-major position of the element furthest from the expected one, among those that `differ`."""
    gaps = np.nan_to_num(_gaps(as_float64(expected), as_float64(found)), nan=np.inf)
    return int(np.where(differ, gaps, -1).argmax())


def number(tensor: TensorBytes, position: int) -> Any:
    """Return the element at a row-major position, as a Python number."""
    values = as_float64(tensor) if has_fractions(tensor.dtype) else as_array(tensor).reshape(-1)
    return values[position].item()


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a row-major position."""
    return tuple(int(part) for part in np.unravel_index(position, shape))


def not_finite(recorded: TensorBytes | None, found: TensorBytes) -> str | None:
    """Describe where `found` is not finite although `recorded`, if given, is; return None if there is no such element.

    If the shapes differ, as they may where they depend on the weights, all of `found` must be finite if all of
    `recorded` is.
    """
    if not has_fractions(found.dtype):
        return None
    values = as_float64(found)
    wrong: NDArray[np.bool_] = ~np.isfinite(values)
    if recorded is not None:
        expected = np.isfinite(as_float64(recorded))
        wrong &= expected if recorded.shape == found.shape else expected.all()
    count = int(wrong.sum())
    if not count:
        return None
    index = int(wrong.argmax())
    value = values[index].item()
    return f"{_index_text(index, found.shape)}: expected a finite value, found {value}; {count} of {wrong.size} are not"


def _close(expected: NDArray[Any], found: NDArray[Any], rtol: float, atol: float) -> NDArray[Any]:
    """Do as `torch.isclose(found, expected, ..., equal_nan=True)`; an infinity is close to itself alone."""
    equal = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gaps = _gaps(expected, found)
    with np.errstate(all="ignore"):
        near = np.isfinite(gaps) & (gaps <= atol + np.abs(rtol * expected))
    close: NDArray[Any] = equal | near
    return close


def _gaps(expected: NDArray[Any], found: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # between infinities the gap is NaN, between large numbers it may be infinite
        gaps: NDArray[Any] = np.abs(found - expected)
    return gaps


def _index_text(position: int, shape: Sequence[int]) -> str:
    """Format an index as `[1, 2]`; for a scalar, as nothing."""
    return str(list(index_of(position, shape))) if shape else ""
