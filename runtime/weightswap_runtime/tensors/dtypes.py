"""The one table of element types. Every other table of them is derived from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class DType(NamedTuple):
    """An element type of the safetensors format.

    `torch` is its name in torch and in numpy or ml_dtypes; `code` its number in torch's archives of graphs (ScalarType
    of torch/_export/serde/schema.py).
    """

    name: str
    bits: int
    torch: str | None = None
    code: int | None = None


MAX_DIMENSIONS = 64  # of a tensor, in numpy and torch
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

TORCH_NAMES: dict[str, str] = {row.torch: row.name for row in DTYPES.values() if row.torch}


def has_fractions(dtype: str) -> bool:
    """Return whether the elements are floating or complex numbers."""
    return dtype.startswith(("F", "BF", "C"))


def nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a dense tensor in bytes; None if its bits do not fill whole bytes."""
    bits = DTYPES[dtype].bits * math.prod(shape)
    return bits // 8 if bits % 8 == 0 else None


def is_valid(tensor: Typed) -> bool:
    """Return whether the dtype is known, there are at most 64 sizes, none negative, and the bits fill whole bytes."""
    known = tensor.dtype in DTYPES and len(tensor.shape) <= MAX_DIMENSIONS and min(tensor.shape, default=0) >= 0
    return known and nbytes(tensor.dtype, tensor.shape) is not None


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
