"""Values that a graph states: dtypes, devices, formats, numbers."""

from __future__ import annotations

from typing import Any

import torch

from .schema import UnknownPart

_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_LAYOUTS = {1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc", 7: "strided"}
_TABLES = {"as_scalar_type": _DTYPES, "as_memory_format": _MEMORY_FORMATS, "as_layout": _LAYOUTS}
CONSTANTS = {*_TABLES, "as_device", "as_complex"}
_MOST_BITS = 64


def constant(kind: str, value: Any, device: torch.device) -> Any:
    """What torch has for a value of one of the kinds CONSTANTS. Raises UnknownPart.

    A graph runs where its weights are, wherever it was captured: each device is `device`.
    """
    if kind == "as_complex":
        return complex(value.real, value.imag)
    if kind == "as_device":
        if value.type not in ("cpu", "cuda"):
            raise UnknownPart(f"a tensor on the device {value.type!r:.40}")
        return device
    found = getattr(torch, _TABLES[kind].get(value, ""), None)
    if found is None:
        raise UnknownPart(f"{kind} {value}")
    return found


def literal(value: int) -> str:
    """An integer or a truth value as Python source. Raises UnknownPart for one that no operator takes."""
    if value.bit_length() > _MOST_BITS:
        raise UnknownPart(f"an integer of {value.bit_length()} bits")
    return f"({value!r})" if value < 0 else repr(value)
