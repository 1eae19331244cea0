"""What is different between the same block of two tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.contents import Content, as_array
from weightswap_runtime.dtypes import has_fractions

from .blocks import Moments, Numbers
from .report import BINS
from .scaling import MOST, Floats, Scaled, dot, scaled
from .workspace import WORKSPACE

EXACT_INTEGERS = ("I64", "U64")  # 64-bit floats do not have all of them
_MANTISSA_BITS = 52


class Differences(NamedTuple):
    """Two sides of a block, where both are finite. Sums are times powers of two; `largest` is at `place`.

    `squares` are of the differences, `before_squares` and `after_squares` of either side, whose `product` is inner.
    """

    changed: int
    squares: float
    squares_exponent: int
    before_squares: float
    before_exponent: int
    after_squares: float
    after_exponent: int
    product: float
    largest: float
    place: int
    before: float
    after: float
    largest_ratio: float
    sign_flips: int
    new_nan: int
    new_inf: int


class _Pair(NamedTuple):
    """What is finite in both: `chosen` of the elements, None for all; the sizes of the changes times 2**-exponent."""

    before: Floats
    after: Floats
    sizes: Floats
    exponent: int
    chosen: NDArray[np.bool_] | None
    wide: bool


def unchanged(side: Moments) -> Differences:
    """What is found where both sides have the same bytes."""
    squares, exponent = side.squares, side.exponent
    return Differences(0, 0.0, 0, squares, exponent, squares, exponent, squares, 0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0)


def differences(contents: tuple[Content, Content], sides: tuple[Numbers, Numbers]) -> tuple[Differences, NDArray[Any]]:
    """What changed, and the histogram of by how much: a count for each exponent of a 64-bit float."""
    differ = _differ(contents, sides)
    pair = _pair(contents, sides)
    changed = int(np.count_nonzero(differ))
    found = Differences(
        changed,
        *_sums(pair),
        *_largest(pair),
        largest_ratio=_largest_ratio(pair),
        sign_flips=_sign_flips(pair),
        **_new(*sides),
    )
    return found, _histogram(pair, changed if pair.chosen is None else int(np.count_nonzero(differ[pair.chosen])))


def _differ(contents: tuple[Content, Content], sides: tuple[Numbers, Numbers]) -> NDArray[np.bool_]:
    """Which elements have another value."""
    before, after = sides
    if contents[0].dtype == contents[1].dtype and not has_fractions(contents[0].dtype):
        exact: NDArray[np.bool_] = as_array(contents[0]) != as_array(contents[1])
        return exact
    differ: NDArray[np.bool_] = before.values != after.values
    if before.finite is not None and after.finite is not None:
        differ &= ~(np.isnan(before.values) & np.isnan(after.values))
    return differ


def _pair(contents: tuple[Content, Content], sides: tuple[Numbers, Numbers]) -> _Pair:
    before, after = sides
    chosen = None if before.finite is None and after.finite is None else before.mask & after.mask
    old, new = before.picked(chosen), after.picked(chosen)
    if contents[0].dtype == contents[1].dtype in EXACT_INTEGERS:
        sizes, exponent = _distances(as_array(contents[0]), as_array(contents[1])), 0
    else:
        sizes, exponent = _gaps(old, new)
    return _Pair(old, new, sizes, exponent, chosen, before.wide or after.wide)


def _distances(before: NDArray[Any], after: NDArray[Any]) -> Floats:
    """|B - A| of integers, rounded once."""
    distances = after.view(np.uint64) - before.view(np.uint64)  # modulo 2**64
    return np.where(after >= before, distances, -distances).astype(np.float64)


def _gaps(old: Floats, new: Floats) -> tuple[Floats, int]:
    """|B - A|, and the exponent of two to multiply it by."""
    room = WORKSPACE.take("gaps", len(old))
    with np.errstate(over="ignore"):
        gaps = np.abs(np.subtract(new, old, out=room), out=room)
        if np.isfinite(gaps.max(initial=0.0)):
            return gaps, 0
    return np.abs(np.ldexp(new, -2) - np.ldexp(old, -2)), 2


def _sums(pair: _Pair) -> tuple[float, int, float, int, float, int, float]:
    """The squares of the changes and of both sides, with their exponents, and the inner product of both."""
    small, exponent = scaled(pair.sizes, wide=pair.wide)
    (one, first), (other, second) = (scaled(side, wide=pair.wide) for side in (pair.before, pair.after))
    squares = dot(small, small), 2 * (exponent + pair.exponent)
    return *squares, dot(one, one), first, dot(other, other), second, dot(one, other)


def _largest(pair: _Pair) -> tuple[float, int, float, float]:
    """The largest change, its place in the block, and what was and is there."""
    if not len(pair.sizes):
        return 0.0, 0, 0.0, 0.0
    place = int(pair.sizes.argmax())
    change = float(Scaled(float(pair.sizes[place]), pair.exponent))
    in_block = place if pair.chosen is None else int(np.flatnonzero(pair.chosen)[place])
    return change, in_block, float(pair.before[place]), float(pair.after[place])


def _largest_ratio(pair: _Pair) -> float:
    spare = WORKSPACE.take("spare", len(pair.sizes))
    with np.errstate(all="ignore"):
        ratios = np.divide(pair.sizes, np.abs(pair.before, out=spare), out=spare)
        largest = ratios.max(initial=0.0)
        if not np.isfinite(largest):  # divided by zero, or by next to nothing
            largest = min(ratios[pair.before != 0].max(initial=0.0), MOST)
    return float(Scaled(float(largest), pair.exponent))


def _sign_flips(pair: _Pair) -> int:
    places = np.flatnonzero(np.signbit(pair.before) != np.signbit(pair.after))
    return int(np.count_nonzero((pair.before[places] != 0) & (pair.after[places] != 0)))


def _new(before: Numbers, after: Numbers) -> dict[str, int]:
    """How many elements are NaN that were not, or an Inf that they were not."""
    if after.finite is None:
        return {"new_nan": 0, "new_inf": 0}
    old, new = before.values[~after.finite], after.values[~after.finite]
    nan = np.isnan(new)
    return {"new_nan": int((nan & ~np.isnan(old)).sum()), "new_inf": int((~nan & (new != old)).sum())}


def _histogram(pair: _Pair, changed: int) -> NDArray[Any]:
    spare = WORKSPACE.take("spare", len(pair.sizes)).view(np.int64)
    exponents = np.right_shift(pair.sizes.view(np.int64), _MANTISSA_BITS, out=spare)
    counts = np.bincount(exponents, minlength=BINS)
    counts[0] += changed - len(pair.sizes)  # what did not change has no exponent
    if not pair.exponent:
        return counts
    moved = np.zeros_like(counts)
    places = np.flatnonzero(counts)
    np.add.at(moved, np.clip(places + pair.exponent, 0, BINS - 1), counts[places])
    return moved
