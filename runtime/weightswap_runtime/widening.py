"""Values of every dtype in 64-bit floats, also of those that numpy lacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .contents import Content, as_array


class Float8(NamedTuple):
    """How eight bits are a number: a sign, if one is left over, then the exponent, then the mantissa.

    special: the codes that mean something else.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: Mapping[int, float]


_INFINITIES = {0x7C: math.inf, 0xFC: -math.inf}
_NO_ZERO = {0x00: 2.0**-127}
# OCP 8-bit Floating Point; E8M0: OCP Microscaling Formats; FNUZ: https://arxiv.org/abs/2206.02915
FLOAT8: dict[str, Float8] = {
    "F8_E4M3": Float8(4, 3, 7, dict.fromkeys((0x7F, 0xFF), math.nan)),
    "F8_E5M2": Float8(5, 2, 15, _INFINITIES | dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), math.nan)),
    "F8_E8M0": Float8(8, 0, 127, _NO_ZERO | {0xFF: math.nan}),
    "F8_E4M3FNUZ": Float8(4, 3, 8, {0x80: math.nan}),
    "F8_E5M2FNUZ": Float8(5, 2, 16, {0x80: math.nan}),
}


def widened(content: Content, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """The elements as float64 or complex128, in row-major order and one dimension. Integers beyond 2**53 are rounded.

    out: memory for the result, of its dtype and size. Raises Unsupported for dtypes whose elements do not fill whole
    bytes.
    """
    if content.dtype in FLOAT8:
        codes = np.frombuffer(content.data, np.uint8)
        return np.take(_table(content.dtype), codes, out=out, mode="clip")  # other modes would copy `out`
    with np.errstate(invalid="ignore"):  # a signalling NaN is made a quiet one
        if content.dtype == "BF16":
            values: NDArray[Any] = _upper_halves(np.frombuffer(content.data, "<u2"))
        else:
            values = as_array(content).reshape(-1)
        if out is None:
            return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
        np.copyto(out, values, casting="unsafe")
        return out


def _upper_halves(codes: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 is float32 without its lower half."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def _table(dtype: str) -> NDArray[Any]:
    form = FLOAT8[dtype]
    return np.array([form.special.get(code, _number(form, code)) for code in range(256)])


def _number(form: Float8, code: int) -> float:
    """IEEE 754's way: without an exponent there is no leading one, and the exponent is that of the next larger."""
    rest, mantissa = divmod(code, 1 << form.mantissa_bits)
    negative, exponent = divmod(rest, 1 << form.exponent_bits)
    if exponent:
        mantissa += 1 << form.mantissa_bits
    size = math.ldexp(mantissa, max(exponent, 1) - form.bias - form.mantissa_bits)
    return -size if negative else size
