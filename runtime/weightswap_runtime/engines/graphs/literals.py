"""Values in a graph's JSON: dtypes, devices, formats, numbers."""

from __future__ import annotations

from typing import Any

import torch

from weightswap_runtime.tensors.dtypes import DTYPES

from .schema import UnknownPart

# the first two are not dtypes of weight files
_DTYPES = {9: "complex32", 11: "complex128"} | {row.code: row.torch or "" for row in DTYPES.values() if row.code}
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_LAYOUTS = {1: "sparse_coo", 7: "strided"}  # tensors of other layouts have indices that nobody checks
_TABLES = {"as_scalar_type": _DTYPES, "as_memory_format": _MEMORY_FORMATS, "as_layout": _LAYOUTS}
CONSTANTS = {*_TABLES, "as_device", "as_complex"}
_MOST_BITS = 64


def constant(kind: str, value: Any, device: torch.device) -> Any:
    """Return torch's object for a value of one of the kinds CONSTANTS. Raises UnknownPart.

    A graph runs where its weights are, wherever it was captured: every device in it becomes `device`.
    """
    if kind == "as_complex":
        return complex(value.real, value.imag)
    if kind == "as_device":
        if value.type not in ("cpu", "cuda"):
            raise UnknownPart(f"a tensor on the device {value.type!r:.40}")
        return device
    torch_value = getattr(torch, _TABLES[kind].get(value, ""), None)
    if torch_value is None:
        raise UnknownPart(f"{kind} {value}")
    return torch_value


def literal(value: int) -> str:
    """Return an integer or boolean as Python source. Raises UnknownPart for one that no operator takes."""
    if value.bit_length() > _MOST_BITS:
        raise UnknownPart(f"an integer of {value.bit_length()} bits")
    return f"({value!r})" if value < 0 else repr(value)
