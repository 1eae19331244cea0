"""Differences between the same block of two tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors.content import TensorBytes, as_array
from weightswap_runtime.tensors.dtypes import has_fractions

from .moments import Floats, Moments, Numbers, dot, workspace
from .report import BINS

EXACT_INTEGERS = ("I64", "U64")  # 64-bit floats cannot represent all of them
_MANTISSA_BITS = 52


class Differences(NamedTuple):
    """Differences of a block, over elements that are finite on both sides. Sums that overflow are infinite.

    `squares` sums the squared differences, `before_squares` and `after_squares` the squares of either side; `product`
    is the inner product of the sides. `largest` is at the index `largest_at`.
    """

    changed: int
    squares: float
    before_squares: float
    after_squares: float
    product: float
    largest: float
    largest_at: int
    before: float
    after: float
    largest_ratio: float
    sign_flips: int
    new_nan: int
    new_inf: int


class _ValuePair(NamedTuple):
    """Elements that are finite on both sides, and the sizes of their changes. `mask` selects them; None for all."""

    before: Floats
    after: Floats
    sizes: Floats
    mask: NDArray[np.bool_] | None


def unchanged(side: Moments) -> Differences:
    """Return the differences of a block with the same bytes on both sides."""
    return Differences(0, 0.0, side.squares, side.squares, side.squares, 0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0)


def differences(
    contents: tuple[TensorBytes, TensorBytes], sides: tuple[Numbers, Numbers]
) -> tuple[Differences, NDArray[Any]]:
    """Return the differences, and a histogram of their sizes with a count per exponent of a 64-bit float."""
    differ = _differ(contents, sides)
    pair = _pair(contents, sides)
    changed = int(np.count_nonzero(differ))
    changes = Differences(
        changed,
        dot(pair.sizes, pair.sizes),
        dot(pair.before, pair.before),
        dot(pair.after, pair.after),
        dot(pair.before, pair.after),
        *_largest(pair),
        _largest_ratio(pair),
        _sign_flips(pair),
        *_new(*sides),
    )
    return changes, _histogram(pair, changed if pair.mask is None else int(np.count_nonzero(differ[pair.mask])))


def _differ(contents: tuple[TensorBytes, TensorBytes], sides: tuple[Numbers, Numbers]) -> NDArray[np.bool_]:
    before, after = sides
    if contents[0].dtype == contents[1].dtype and not has_fractions(contents[0].dtype):
        exact: NDArray[np.bool_] = as_array(contents[0]) != as_array(contents[1])
        return exact
    differ: NDArray[np.bool_] = before.values != after.values
    if before.finite is not None and after.finite is not None:
        differ &= ~(np.isnan(before.values) & np.isnan(after.values))
    return differ


def _pair(contents: tuple[TensorBytes, TensorBytes], sides: tuple[Numbers, Numbers]) -> _ValuePair:
    before, after = sides
    masks = [side.finite for side in sides if side.finite is not None]
    mask = np.logical_and.reduce(masks) if masks else None
    old, new = before.masked(mask), after.masked(mask)
    if contents[0].dtype == contents[1].dtype in EXACT_INTEGERS:
        sizes = _distances(as_array(contents[0]), as_array(contents[1]))
    else:
        sizes = np.subtract(new, old, out=workspace("gaps", len(old)))
        np.abs(sizes, out=sizes)
    return _ValuePair(old, new, sizes, mask)


def _distances(before: NDArray[Any], after: NDArray[Any]) -> Floats:
    """Return |B - A| of integers, rounded once."""
    distances = after.view(np.uint64) - before.view(np.uint64)  # modulo 2**64
    return np.where(after >= before, distances, -distances).astype(np.float64)


def _largest(pair: _ValuePair) -> tuple[float, int, float, float]:
    """Return the largest change, its index in the block, and the values before and after."""
    if not len(pair.sizes):
        return 0.0, 0, 0.0, 0.0
    index = int(pair.sizes.argmax())
    in_block = index if pair.mask is None else int(np.flatnonzero(pair.mask)[index])
    return float(pair.sizes[index]), in_block, float(pair.before[index]), float(pair.after[index])


def _largest_ratio(pair: _ValuePair) -> float:
    spare = workspace("spare", len(pair.sizes))
    ratios = np.divide(pair.sizes, np.abs(pair.before, out=spare), out=spare)
    largest = float(ratios.max(initial=0.0))
    return largest if np.isfinite(largest) else float(ratios[pair.before != 0].max(initial=0.0))


def _sign_flips(pair: _ValuePair) -> int:
    flipped = np.flatnonzero(np.signbit(pair.before) != np.signbit(pair.after))
    return int(np.count_nonzero((pair.before[flipped] != 0) & (pair.after[flipped] != 0)))


def _new(before: Numbers, after: Numbers) -> tuple[int, int]:
    """Count the elements that became NaN, and those that became an Inf."""
    if after.finite is None:
        return 0, 0
    old, new = before.values[~after.finite], after.values[~after.finite]
    nan = np.isnan(new)
    return int((nan & ~np.isnan(old)).sum()), int((~nan & (new != old)).sum())


def _histogram(pair: _ValuePair, changed: int) -> NDArray[Any]:
    spare = workspace("spare", len(pair.sizes)).view(np.int64)
    exponents = np.right_shift(pair.sizes.view(np.int64), _MANTISSA_BITS, out=spare)
    counts = np.bincount(exponents, minlength=BINS + 1)
    counts[0] += changed - len(pair.sizes)  # elements that did not change were counted here
    counts[BINS - 1] += counts[BINS]  # infinite changes
    return counts[:BINS]
