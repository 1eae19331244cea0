"""Sums and norms that neither overflow nor underflow, whatever 64-bit floats go in.

Numbers are kept as a float and an exponent of two, as in LAPACK's dnrm2 (J. L. Blue, "A Portable Fortran Program to
Find the Euclidean Norm of a Vector", ACM TOMS 4, 1978): a block whose largest element is far from 1 is scaled by a
power of two, which is exact, before it is squared. The sums of blocks are added with `math.fsum`, whose result is the
exact sum, rounded once: it does not depend on the order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SAFE_EXPONENT = 200  # products of four numbers within 2**±200 are normal, and so are sums of many
STEP = 8192  # OpenBLAS computes longer products with threads of its own, which fight with ours
MOST = sys.float_info.max


class Scaled(NamedTuple):
    """The number `value * 2**exponent`."""

    value: float
    exponent: int = 0

    def __float__(self) -> float:
        """The nearest 64-bit float; the largest one where there is none."""
        try:
            return math.ldexp(self.value, self.exponent)
        except OverflowError:
            return math.copysign(MOST, self.value)

    def root(self) -> Scaled:
        """The square root; the exponent is even."""
        return Scaled(math.sqrt(self.value), self.exponent // 2)

    def over(self, other: Scaled) -> float:
        """The quotient; infinite where only the other is zero, and 0 where both are."""
        if not other.value:
            return math.inf if self.value else 0.0
        return float(Scaled(self.value / other.value, self.exponent - other.exponent))


def scaled(values: Floats, *, wide: bool) -> tuple[Floats, int]:
    """Finite values, divided by a power of two so that their squares can be added, and its exponent.

    wide: whether they may be too large or too small as they are.
    """
    if not wide:
        return values, 0
    largest = float(np.abs(values).max(initial=0.0))
    exponent = math.frexp(largest)[1]
    if not largest or abs(exponent) <= SAFE_EXPONENT:
        return values, 0
    return np.ldexp(values, -exponent), exponent


def hypotenuse(norms: Sequence[float]) -> Scaled:
    """The norm of what has these norms."""
    exponent = math.frexp(max(norms, default=0.0))[1]
    return Scaled(math.hypot(*(math.ldexp(norm, -exponent) for norm in norms)), exponent)


def dot(one: Floats, other: Floats) -> float:
    """The inner product, with an error below 1e-12 of the sum of the products' sizes."""
    return math.fsum(
        float(np.dot(one[start : start + STEP], other[start : start + STEP])) for start in range(0, len(one), STEP)
    )


def total(values: Floats, exponents: NDArray[Any]) -> Scaled:
    """The sum of values that have exponents of their own, rounded once."""
    used = exponents[values != 0]
    common = int(used.max()) if used.size else 0
    return Scaled(math.fsum(np.ldexp(values, (exponents - common).astype(np.int64)).tolist()), common)
