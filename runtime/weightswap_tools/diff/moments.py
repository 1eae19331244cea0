"""Statistics of one block: at most BLOCK elements of a tensor.

Blocks start at multiples of BLOCK, so results do not depend on the pieces in which files are read.
"""

from __future__ import annotations

import math
import threading
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors.content import TensorBytes, as_float64

Floats = NDArray[np.float64]
BLOCK = 1 << 16  # elements: their 64-bit floats fit in a core's cache
STEP = 8192  # OpenBLAS computes longer products with its own threads, which compete with ours
CLOSE = 1e-2  # of the mean square; smaller variances are computed again from the distances to the mean


class _Workspace(threading.local):
    """Thread-local arrays, one for each use, that every block reuses: fresh memory would cost more than the work."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def __call__(self, use: Literal["before", "after", "gaps", "spare"], count: int) -> Floats:
        if use not in self._arrays or len(self._arrays[use]) < count:
            self._arrays[use] = np.empty(count)
        return self._arrays[use][:count]


workspace = _Workspace()


class Moments(NamedTuple):
    """Sums over the finite elements of one side of a block, infinite on overflow. `spread` is about the mean."""

    finite: int
    nan: int
    inf: int
    sum: float
    squares: float
    spread: float


class Numbers(NamedTuple):
    """The elements of a block as 64-bit floats, and the mask of finite ones; None if all are finite."""

    values: Floats
    finite: NDArray[np.bool_] | None

    def masked(self, mask: NDArray[np.bool_] | None) -> Floats:
        return self.values if mask is None else self.values[mask]


def cut(content: TensorBytes, start: int, stop: int) -> TensorBytes:
    """Return a view of the elements from `start` to `stop`."""
    size = len(content.data) // max(1, math.prod(content.shape))
    return TensorBytes(content.dtype, (stop - start,), content.data[start * size : stop * size])


def numbers(content: TensorBytes, side: Literal["before", "after"], *, parts: bool) -> Numbers:
    """Return the elements, or with `parts` their real and imaginary parts. Valid until the next block of this side."""
    (count,) = content.shape
    values = workspace(side, 2 * count if parts else count)
    if parts:
        values.view(np.complex128)[:] = as_float64(content)
    else:
        as_float64(content, values)
    finite = np.isfinite(values)
    return Numbers(values, None if finite.all() else finite)


def moments(side: Numbers) -> Moments:
    """Return the moments of one side."""
    values = side.masked(side.finite)
    count, nan = len(values), int(np.isnan(side.values).sum()) if side.finite is not None else 0
    sum_, squares = float(values.sum()), dot(values, values)
    spread = squares - sum_ * sum_ / count if count else 0.0
    if not spread >= CLOSE * squares:  # also for NaN, when sums overflow
        distances = np.subtract(values, sum_ / count, out=workspace("spare", count))
        spread = dot(distances, distances)
    return Moments(count, nan, len(side.values) - count - nan, sum_, squares, spread)


def dot(one: Floats, other: Floats) -> float:
    """Return the inner product."""
    steps = range(0, len(one), STEP)
    return sum(float(np.dot(one[start : start + STEP], other[start : start + STEP])) for start in steps)
