"""The element types of ONNX Runtime."""

from __future__ import annotations

from typing import NamedTuple

from weightswap_runtime.errors import Unsupported


class Element(NamedTuple):
    """An element type: its name in ONNX Runtime and its number in ONNX's TensorProto."""

    text: str
    code: int


ELEMENTS = {
    "BOOL": Element("tensor(bool)", 9),
    "U8": Element("tensor(uint8)", 2),
    "I8": Element("tensor(int8)", 3),
    "U16": Element("tensor(uint16)", 4),
    "I16": Element("tensor(int16)", 5),
    "U32": Element("tensor(uint32)", 12),
    "I32": Element("tensor(int32)", 6),
    "U64": Element("tensor(uint64)", 13),
    "I64": Element("tensor(int64)", 7),
    "F16": Element("tensor(float16)", 10),
    "F32": Element("tensor(float)", 1),
    "F64": Element("tensor(double)", 11),
    "BF16": Element("tensor(bfloat16)", 16),
    "F8_E4M3": Element("tensor(float8e4m3fn)", 17),
    "F8_E4M3FNUZ": Element("tensor(float8e4m3fnuz)", 18),
    "F8_E5M2": Element("tensor(float8e5m2)", 19),
    "F8_E5M2FNUZ": Element("tensor(float8e5m2fnuz)", 20),
}


def element_of(name: str, dtype: str) -> Element:
    """Return the element type of a tensor. Raises Unsupported."""
    if dtype not in ELEMENTS:
        raise Unsupported(f"{name}: ONNX Runtime has no {dtype}; it has {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]
