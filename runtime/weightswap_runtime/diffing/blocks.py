"""The statistics of one block: at most BLOCK elements of a tensor.

Blocks begin at multiples of BLOCK whatever the pieces are in which files are read, so results do not depend on those.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.contents import Content
from weightswap_runtime.widening import widened

from .scaling import Floats, dot, scaled
from .workspace import WORKSPACE

BLOCK = 1 << 16  # elements: what is made of them in 64-bit floats stays in a core's cache
CLOSE = 1e-2  # of the mean square; a variance below that is computed again, from the distances to the mean
WIDE = ("F64",)  # squares of their elements may overflow


class Moments(NamedTuple):
    """One side of a block: sums over its finite elements times 2**-exponent; `spread` is about their mean."""

    finite: int
    nan: int
    inf: int
    sum: float
    squares: float
    spread: float
    exponent: int


class Numbers(NamedTuple):
    """The elements of a block as 64-bit floats, and which of them are finite: None where all are.

    `wide`: their squares may be beyond the range of 64-bit floats.
    """

    values: Floats
    finite: NDArray[np.bool_] | None
    wide: bool

    def picked(self, chosen: NDArray[np.bool_] | None) -> Floats:
        return self.values if chosen is None else self.values[chosen]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which elements are finite."""
        return np.ones(len(self.values), np.bool_) if self.finite is None else self.finite


def numbers(content: Content, side: Literal["before", "after"], *, parts: bool) -> Numbers:
    """The elements; with `parts`, the real and the imaginary part of each. Good until those of the next block."""
    (count,), wide = content.shape, content.dtype in WIDE
    if parts:
        values = WORKSPACE.take(side, 2 * count)
        values.view(np.complex128)[:] = widened(content)
    else:
        values = widened(content, WORKSPACE.take(side, count))
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):  # of finite numbers, too, the sum may be too large
            return Numbers(values, None, wide)
        finite = np.isfinite(values)
    return Numbers(values, None if finite.all() else finite, wide)


def moments(side: Numbers) -> Moments:
    """The statistics of one side."""
    nan = int(np.isnan(side.values).sum()) if side.finite is not None else 0
    values, exponent = scaled(side.picked(side.finite), wide=side.wide)
    count = len(values)
    sum_, squares = float(values.sum()), dot(values, values)
    spread = squares - sum_ * sum_ / count if count else 0.0
    if spread < CLOSE * squares:
        distances = np.subtract(values, sum_ / count, out=WORKSPACE.take("spare", count))
        spread = dot(distances, distances)
    return Moments(count, nan, len(side.values) - count - nan, sum_, squares, spread, exponent)
