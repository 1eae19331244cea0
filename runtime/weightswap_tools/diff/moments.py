"""The statistics of one block: at most BLOCK elements of a tensor.

Blocks begin at multiples of BLOCK whatever the pieces are in which files are read, so results do not depend on those.
"""

from __future__ import annotations

import math
import threading
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors.content import TensorBytes, as_float64

Floats = NDArray[np.float64]
BLOCK = 1 << 16  # elements: what is made of them in 64-bit floats stays in a core's cache
STEP = 8192  # OpenBLAS computes longer products with threads of its own, which fight with ours
CLOSE = 1e-2  # of the mean square; a variance below that is computed again, from the distances to the mean


class _Workspace(threading.local):
    """An array for each use, taken again for every block: fresh memory would cost more than the work."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def __call__(self, use: Literal["before", "after", "gaps", "spare"], count: int) -> Floats:
        if use not in self._arrays or len(self._arrays[use]) < count:
            self._arrays[use] = np.empty(count)
        return self._arrays[use][:count]


workspace = _Workspace()


class Moments(NamedTuple):
    """One side of a block: sums over its finite elements, infinite if too large; `spread` is about their mean."""

    finite: int
    nan: int
    inf: int
    sum: float
    squares: float
    spread: float


class Numbers(NamedTuple):
    """The elements of a block as 64-bit floats, and which of them are finite: None where all are."""

    values: Floats
    finite: NDArray[np.bool_] | None

    def picked(self, chosen: NDArray[np.bool_] | None) -> Floats:
        return self.values if chosen is None else self.values[chosen]


def cut(content: TensorBytes, start: int, stop: int) -> TensorBytes:
    """Elements `start` to `stop`."""
    size = len(content.data) // max(1, math.prod(content.shape))
    return TensorBytes(content.dtype, (stop - start,), content.data[start * size : stop * size])


def numbers(content: TensorBytes, side: Literal["before", "after"], *, parts: bool) -> Numbers:
    """The elements; with `parts`, the real and the imaginary part of each. Good until those of the next block."""
    (count,) = content.shape
    values = workspace(side, 2 * count if parts else count)
    if parts:
        values.view(np.complex128)[:] = as_float64(content)
    else:
        as_float64(content, values)
    finite = np.isfinite(values)
    return Numbers(values, None if finite.all() else finite)


def moments(side: Numbers) -> Moments:
    """The statistics of one side."""
    values = side.picked(side.finite)
    count, nan = len(values), int(np.isnan(side.values).sum()) if side.finite is not None else 0
    sum_, squares = float(values.sum()), dot(values, values)
    spread = squares - sum_ * sum_ / count if count else 0.0
    if not spread >= CLOSE * squares:  # also NaN, of sums that overflow
        distances = np.subtract(values, sum_ / count, out=workspace("spare", count))
        spread = dot(distances, distances)
    return Moments(count, nan, len(side.values) - count - nan, sum_, squares, spread)


def dot(one: Floats, other: Floats) -> float:
    """The inner product."""
    steps = range(0, len(one), STEP)
    return sum(float(np.dot(one[start : start + STEP], other[start : start + STEP])) for start in steps)
