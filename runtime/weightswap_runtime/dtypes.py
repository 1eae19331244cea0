"""The one table of element types. Every other view of them is derived from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class DType(NamedTuple):
    """An element type of the safetensors format.

    `torch` and `numpy` are attribute names in those packages, or None where the type does not exist there.
    """

    name: str
    bits: int
    torch: str | None
    numpy: str | None


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("BOOL", 8, "bool", "bool"),
        DType("U8", 8, "uint8", "uint8"),
        DType("I8", 8, "int8", "int8"),
        DType("U16", 16, "uint16", "uint16"),
        DType("I16", 16, "int16", "int16"),
        DType("U32", 32, "uint32", "uint32"),
        DType("I32", 32, "int32", "int32"),
        DType("U64", 64, "uint64", "uint64"),
        DType("I64", 64, "int64", "int64"),
        DType("F16", 16, "float16", "float16"),
        DType("BF16", 16, "bfloat16", None),
        DType("F32", 32, "float32", "float32"),
        DType("F64", 64, "float64", "float64"),
        DType("C64", 64, "complex64", "complex64"),
        DType("F8_E4M3", 8, "float8_e4m3fn", None),
        DType("F8_E5M2", 8, "float8_e5m2", None),
        DType("F8_E8M0", 8, "float8_e8m0fnu", None),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", None),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", None),
        DType("F6_E2M3", 6, None, None),
        DType("F6_E3M2", 6, None, None),
        DType("F4", 4, None, None),
    )
}

TORCH_NAMES: dict[str, str] = {row.torch: row.name for row in DTYPES.values() if row.torch}
NUMPY_NAMES: dict[str, str] = {row.numpy: row.name for row in DTYPES.values() if row.numpy}


def has_fractions(dtype: str) -> bool:
    """Whether the elements are floating or complex numbers."""
    return dtype.startswith(("F", "BF", "C"))


def nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Size of a dense tensor in bytes; None when its bits do not fill whole bytes."""
    bits = DTYPES[dtype].bits * math.prod(shape)
    return bits // 8 if bits % 8 == 0 else None


def describe(dtype: str, shape: Sequence[int]) -> str:
    """`F32[2, 3]`: how messages and tables write a tensor's type."""
    return f"{dtype}{list(shape)}"
