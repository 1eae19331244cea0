"""Statistics of a tensor, or of the change between two, in one pass.

A tensor is read in pieces, by several threads, and a piece is taken in blocks that fit a core's cache. Each block gives
a row of sums; the rows of all pieces, in their order, give the result. It depends neither on the threads nor on where a
piece ends. Sums are 64-bit floats: what overflows is infinite, never an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors import TensorBytes, as_array, as_float64, has_fractions

from .documents import BINS, LOWEST_EXPONENT, Change, Histogram, Largest, Values

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
EXACT_INTEGERS = ("I64", "U64")  # 64-bit floats cannot represent all of them
BLOCK = 1 << 16  # elements: their 64-bit floats fit in a core's cache
_STEP = 8192  # OpenBLAS computes longer products with its own threads, which compete with ours
_CLOSE = 1e-2  # of the mean square; smaller variances are computed again from the distances to the mean
_GLANCE = 256  # bytes: most blocks that differ at all differ in the first ones
_MANTISSA_BITS = 52  # of a 64-bit float; its exponent is above them


class Tally(NamedTuple):
    """The statistics of a piece of a tensor, or of two."""

    sides: tuple[Floats, ...]  # for each side, a table of _Moments with a row for each block
    differences: Floats | None  # the same of _Differences; None with one side
    histogram: NDArray[Any]  # counts of changes by exponent
    rows: list[_RowTally]  # of each block


class Summary(NamedTuple):
    """The statistics of a whole tensor: of one side, or of both with their change."""

    sides: tuple[Values, ...]
    change: Change | None


@np.errstate(all="ignore")
def tally(contents: Sequence[TensorBytes], tensor_shape: tuple[int, ...], begin: int, *, parts: bool) -> Tally:
    """Return the statistics of a piece of one tensor, or of two, that starts at element `begin`.

    parts: whether to take a number as two, its real and its imaginary part.
    """
    count = math.prod(contents[0].shape)
    moments: list[list[_Moments]] = [[] for _ in contents]
    differences: list[_Differences] = []
    rows: list[_RowTally] = []
    length = math.prod(tensor_shape[1:]) if len(tensor_shape) > 1 else 0  # of a row; a vector has none
    histogram = np.zeros(BINS, np.int64)
    for start in range(0, count, BLOCK):
        block = [cut(content, start, min(start + BLOCK, count)) for content in contents]
        numbers, difference = _block(block, parts, moments, histogram)
        differences += [difference] if difference else []
        rows += [_dead_rows(numbers, (1 + parts) * length, (1 + parts) * (begin + start))] if length else []
    sides = tuple(np.array(side, np.float64).reshape(-1, len(_Moments._fields)) for side in moments)
    table = np.array(differences, np.float64).reshape(-1, len(_Differences._fields)) if len(contents) > 1 else None
    return Tally(sides, table, histogram, rows)


def _block(
    contents: Sequence[TensorBytes], parts: bool, moments: list[list[_Moments]], histogram: NDArray[Any]
) -> tuple[list[_Numbers], _Differences | None]:
    before = _numbers(contents[0], "before", parts=parts)
    moments[0].append(_moments(before))
    if len(contents) == 1:
        return [before], None
    if same_bytes(*contents):
        moments[1].append(moments[0][-1])
        return [before, before], _unchanged(moments[0][-1])
    after = _numbers(contents[1], "after", parts=parts)
    moments[1].append(_moments(after))
    row, counts = _differences((contents[0], contents[1]), (before, after))
    histogram += counts
    return [before, after], row


@np.errstate(all="ignore")
def summary(tallies: Sequence[Tally], shape: tuple[int, ...], *, parts: bool) -> Summary:
    """Merge the tallies of all pieces of a tensor, in order."""
    moments = [np.concatenate([tally.sides[side] for tally in tallies]) for side in range(len(tallies[0].sides))]
    *dead, new_dead = _merged_rows([row for tally in tallies for row in tally.rows], len(moments))
    sides = tuple(_values_of(table, rows) for table, rows in zip(moments, dead, strict=True))
    tables = [tally.differences for tally in tallies if tally.differences is not None]
    if not tables:
        return Summary(sides, None)
    table = np.concatenate(tables)
    counts = np.sum([tally.histogram for tally in tallies], axis=0)
    return Summary(sides, _change(table, _trimmed(counts), new_dead, (*shape, 2) if parts else shape, parts))


def _values_of(table: Floats, dead: int) -> Values:
    columns: Any = _Moments(*table.T)  # each field is an array over all blocks
    finite, nan, inf = (int(counts.sum()) for counts in (columns.finite, columns.nan, columns.inf))
    mean, variance = _mean_and_variance(columns, max(1, finite))
    return Values(
        elements=finite + nan + inf,
        nan=nan,
        inf=inf,
        mean=mean if finite else None,
        std=math.sqrt(variance) if finite else None,
        norm=math.sqrt(columns.squares.sum()),
        dead_rows=dead,
    )


def _mean_and_variance(columns: Any, count: int) -> tuple[float, float]:
    """Return the mean, and the variance within blocks plus that between their means."""
    mean = columns.sum.sum() / count
    between = columns.finite * (columns.sum / np.maximum(1, columns.finite) - mean) ** 2
    return float(mean), float((columns.spread + between).sum() / count)


def _change(table: Floats, histogram: Histogram, new_dead: int, shape: tuple[int, ...], parts: bool) -> Change:
    columns: Any = _Differences(*table.T)
    elements, changed = math.prod(shape), int(columns.changed.sum())
    norm, before, after = (
        math.sqrt(squares.sum()) for squares in (columns.squares, columns.before_squares, columns.after_squares)
    )
    return Change(
        elements=elements,
        changed=changed,
        share_changed=changed / max(1, elements),
        norm=norm,
        rel_change=ratio(norm, before),
        largest=_largest_of(columns, shape, BLOCK * (1 + parts)),
        max_rel_change=float(columns.largest_ratio.max(initial=0.0)),
        cosine=_cosine(float(columns.product.sum()), before, after) if changed else 1.0,
        new_nan=int(columns.new_nan.sum()),
        new_inf=int(columns.new_inf.sum()),
        sign_flips=int(columns.sign_flips.sum()),
        new_dead_rows=new_dead,
        histogram=histogram,
    )


def _largest_of(columns: Any, shape: tuple[int, ...], step: int) -> Largest | None:
    if not columns.largest.any():
        return None
    block = int(columns.largest.argmax())
    index = np.unravel_index(block * step + int(columns.largest_at[block]), shape) if shape else ()
    return Largest(
        change=float(columns.largest[block]),
        index=tuple(map(int, index)),
        before=float(columns.before[block]),
        after=float(columns.after[block]),
    )


def ratio(change: float, norm: float) -> float:
    """Return the norm of a change relative to the norm before it; infinite if only the latter is zero."""
    if not change:
        return 0.0
    return change / norm if norm and math.isfinite(change) else math.inf


def _cosine(product: float, before: float, after: float) -> float | None:
    if not before or not after or not math.isfinite(before + after):
        return None
    return max(-1.0, min(1.0, product / before / after))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms."""
    counts = np.zeros(BINS, np.int64)
    for histogram in histograms:
        start = histogram.exponent - LOWEST_EXPONENT
        counts[start : start + len(histogram.counts)] += np.array(histogram.counts, np.int64)
    return _trimmed(counts)


def _trimmed(counts: NDArray[Any]) -> Histogram:
    """Return a histogram without the empty bins at either end."""
    used = np.flatnonzero(counts)
    if not used.size:
        return Histogram(exponent=0, counts=())
    first, last = int(used[0]), int(used[-1])
    return Histogram(exponent=first + LOWEST_EXPONENT, counts=tuple(counts[first : last + 1].tolist()))


def same_bytes(before: TensorBytes, after: TensorBytes) -> bool:
    """Return whether two contents have the same dtype and the same bytes."""
    if before.dtype != after.dtype or before.data[:_GLANCE] != after.data[:_GLANCE]:
        return False
    return np.array_equal(np.frombuffer(before.data, np.uint8), np.frombuffer(after.data, np.uint8))


# Moments of one side of a block.


class _Moments(NamedTuple):
    """Counts of elements, and sums over the finite ones."""

    finite: int
    nan: int
    inf: int
    sum: float
    squares: float
    spread: float  # squared distances from the mean


class _Numbers(NamedTuple):
    """The elements of a block as 64-bit floats, and the mask of finite ones; None if all are finite."""

    values: Floats
    finite: Flags | None

    def masked(self, mask: Flags | None) -> Floats:
        return self.values if mask is None else self.values[mask]


class _Workspace(threading.local):
    """Thread-local arrays, one for each use, that every block reuses: fresh memory would cost more than the work."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def __call__(self, use: Literal["before", "after", "gaps", "spare"], count: int) -> Floats:
        if use not in self._arrays or len(self._arrays[use]) < count:
            self._arrays[use] = np.empty(count)
        return self._arrays[use][:count]


_workspace = _Workspace()


def _numbers(content: TensorBytes, side: Literal["before", "after"], *, parts: bool) -> _Numbers:
    """Return the elements, or with `parts` their real and imaginary parts. Valid until the next block of this side."""
    (count,) = content.shape
    values = _workspace(side, 2 * count if parts else count)
    if parts:
        values.view(np.complex128)[:] = as_float64(content)
    else:
        as_float64(content, values)
    finite = np.isfinite(values)
    return _Numbers(values, None if finite.all() else finite)


def _moments(side: _Numbers) -> _Moments:
    """Return the moments of one side."""
    values = side.masked(side.finite)
    count, nan = len(values), int(np.isnan(side.values).sum()) if side.finite is not None else 0
    sum_, squares = float(values.sum()), _dot(values, values)
    spread = squares - sum_ * sum_ / count if count else 0.0
    if not spread >= _CLOSE * squares:  # too few digits are left of the subtraction; also for NaN, when sums overflow
        distances = np.subtract(values, sum_ / count, out=_workspace("spare", count))
        spread = _dot(distances, distances)
    return _Moments(count, nan, len(side.values) - count - nan, sum_, squares, spread)


def _dot(one: Floats, other: Floats) -> float:
    """Return the inner product."""
    steps = range(0, len(one), _STEP)
    return sum(float(np.dot(one[start : start + _STEP], other[start : start + _STEP])) for start in steps)


def cut(content: TensorBytes, start: int, stop: int) -> TensorBytes:
    """Return a view of the elements from `start` to `stop`."""
    size = len(content.data) // max(1, math.prod(content.shape))
    return TensorBytes(content.dtype, (stop - start,), content.data[start * size : stop * size])


# Differences between the sides of a block.


class _Differences(NamedTuple):
    """Counts of elements, and figures of those that are finite on both sides."""

    changed: int
    squares: float  # of the differences
    before_squares: float
    after_squares: float
    product: float  # the inner product of the sides
    largest: float  # difference
    largest_at: int  # its index in the block
    before: float  # the values there
    after: float
    largest_ratio: float  # of a difference to the value before
    sign_flips: int
    new_nan: int
    new_inf: int


class _ValuePair(NamedTuple):
    """The elements that are finite on both sides."""

    before: Floats
    after: Floats
    sizes: Floats  # of their changes
    mask: Flags | None  # selects them in the block; None for all


def _unchanged(side: _Moments) -> _Differences:
    """Return the differences of a block with the same bytes on both sides."""
    return _Differences(0, 0.0, side.squares, side.squares, side.squares, 0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0)


def _differences(
    contents: tuple[TensorBytes, TensorBytes], sides: tuple[_Numbers, _Numbers]
) -> tuple[_Differences, NDArray[Any]]:
    """Return the differences, and a histogram of their sizes with a count per exponent of a 64-bit float."""
    differ = _differ(contents, sides)
    pair = _pair(contents, sides)
    changed = int(np.count_nonzero(differ))
    changes = _Differences(
        changed,
        _dot(pair.sizes, pair.sizes),
        _dot(pair.before, pair.before),
        _dot(pair.after, pair.after),
        _dot(pair.before, pair.after),
        *_largest(pair),
        _largest_ratio(pair),
        _sign_flips(pair),
        *_new(*sides),
    )
    return changes, _histogram(pair, changed if pair.mask is None else int(np.count_nonzero(differ[pair.mask])))


def _differ(contents: tuple[TensorBytes, TensorBytes], sides: tuple[_Numbers, _Numbers]) -> Flags:
    before, after = sides
    if contents[0].dtype == contents[1].dtype and not has_fractions(contents[0].dtype):
        exact: Flags = as_array(contents[0]) != as_array(contents[1])
        return exact
    differ: Flags = before.values != after.values
    if before.finite is not None and after.finite is not None:
        differ &= ~(np.isnan(before.values) & np.isnan(after.values))
    return differ


def _pair(contents: tuple[TensorBytes, TensorBytes], sides: tuple[_Numbers, _Numbers]) -> _ValuePair:
    before, after = sides
    masks = [side.finite for side in sides if side.finite is not None]
    mask = np.logical_and.reduce(masks) if masks else None
    old, new = before.masked(mask), after.masked(mask)
    if contents[0].dtype == contents[1].dtype in EXACT_INTEGERS:
        sizes = _distances(as_array(contents[0]), as_array(contents[1]))
    else:
        sizes = np.subtract(new, old, out=_workspace("gaps", len(old)))
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
    spare = _workspace("spare", len(pair.sizes))
    ratios = np.divide(pair.sizes, np.abs(pair.before, out=spare), out=spare)
    largest = float(ratios.max(initial=0.0))
    return largest if np.isfinite(largest) else float(ratios[pair.before != 0].max(initial=0.0))


def _sign_flips(pair: _ValuePair) -> int:
    flipped = np.flatnonzero(np.signbit(pair.before) != np.signbit(pair.after))
    return int(np.count_nonzero((pair.before[flipped] != 0) & (pair.after[flipped] != 0)))


def _new(before: _Numbers, after: _Numbers) -> tuple[int, int]:
    """Count the elements that became NaN, and those that became an Inf."""
    if after.finite is None:
        return 0, 0
    old, new = before.values[~after.finite], after.values[~after.finite]
    nan = np.isnan(new)
    return int((nan & ~np.isnan(old)).sum()), int((~nan & (new != old)).sum())


def _histogram(pair: _ValuePair, changed: int) -> NDArray[Any]:
    """Count the changes by exponent, which is read from their bits."""
    spare = _workspace("spare", len(pair.sizes)).view(np.int64)
    exponents = np.right_shift(pair.sizes.view(np.int64), _MANTISSA_BITS, out=spare)
    counts = np.bincount(exponents, minlength=BINS + 1)
    counts[0] += changed - len(pair.sizes)  # elements that did not change were counted here
    counts[BINS - 1] += counts[BINS]  # infinite changes
    return counts[:BINS]


# Dead rows: rows of zeros along the first dimension. A row may span several blocks.


# Of a block: how many rows are dead on each side, and dead after, but not before; and its first and its last row, which
# other blocks may share and which are not counted: index -> for each side whether it is zero here.
_RowTally = tuple[NDArray[Any], dict[int, Flags]]


def _merged_rows(tallies: Iterable[_RowTally], sides: int) -> list[int]:
    """Return the counts of all blocks of a tensor, including rows that span several blocks."""
    counts = np.zeros(sides + 1, np.int64)
    ends: dict[int, Flags] = {}
    for dead, shared in tallies:
        counts += dead
        for row, flags in shared.items():
            ends[row] = flags & ends.get(row, True)
    for flags in ends.values():
        counts += [*flags, flags[-1] & ~flags[0]]
    return counts.tolist()


def _dead_rows(sides: Sequence[_Numbers], length: int, begin: int) -> _RowTally:
    """Count the dead rows in blocks of one tensor, or of two, that start at element `begin`."""
    starts = np.arange(-(begin % length), len(sides[0].values), length).clip(0)
    dead = np.array([~np.logical_or.reduceat(side.values != 0, starts) for side in sides])
    whole, first = dead[:, 1:-1], begin // length
    counts = np.array([*whole.sum(axis=1), (whole[-1] & ~whole[0]).sum()])
    return counts, dict(zip((first, first + len(starts) - 1), dead[:, [0, -1]].T, strict=True))
