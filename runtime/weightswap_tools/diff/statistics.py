"""Statistics of a tensor, summed over its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors.content import TensorBytes

from . import moments as blocks
from .dead_rows import RowTally, added_up, dead_rows
from .differences import Differences, differences, unchanged
from .moments import BLOCK, Floats, Moments, cut
from .report import BINS, LOWEST_EXPONENT, Change, Histogram, Largest, Values

GLANCE = 256  # bytes: most blocks that differ at all differ in the first ones


class Tally(NamedTuple):
    """The statistics of a piece of a tensor: a row for each block, the histogram, and the tally of its rows.

    `sides` has an array of `Moments` for each side; `differences` is None with one side.
    """

    sides: tuple[Floats, ...]
    differences: Floats | None
    histogram: NDArray[Any]
    rows: RowTally


@np.errstate(all="ignore")
def tally(contents: Sequence[TensorBytes], tensor_shape: tuple[int, ...], begin: int, *, parts: bool) -> Tally:
    """Return the statistics of a piece of one tensor, or of two, that starts at element `begin`."""
    count = math.prod(contents[0].shape)
    moments: list[list[Moments]] = [[] for _ in contents]
    rows: list[Differences] = []
    histogram = np.zeros(BINS, np.int64)
    for start in range(0, count, BLOCK):
        block = [cut(content, start, min(start + BLOCK, count)) for content in contents]
        row = _block(block, parts, moments, histogram)
        rows += [row] if row else []
    sides = tuple(np.array(side, np.float64).reshape(-1, len(Moments._fields)) for side in moments)
    table = np.array(rows, np.float64).reshape(-1, len(Differences._fields)) if len(contents) > 1 else None
    return Tally(sides, table, histogram, dead_rows(contents, tensor_shape, begin))


def _block(
    contents: Sequence[TensorBytes], parts: bool, moments: list[list[Moments]], histogram: NDArray[Any]
) -> Differences | None:
    before = blocks.numbers(contents[0], "before", parts=parts)
    moments[0].append(blocks.moments(before))
    if len(contents) == 1:
        return None
    if same_bytes(*contents):
        moments[1].append(moments[0][-1])
        return unchanged(moments[0][-1])
    after = blocks.numbers(contents[1], "after", parts=parts)
    moments[1].append(blocks.moments(after))
    row, counts = differences((contents[0], contents[1]), (before, after))
    histogram += counts
    return row


def same_bytes(before: TensorBytes, after: TensorBytes) -> bool:
    """Return whether two contents have the same dtype and the same bytes."""
    if before.dtype != after.dtype or before.data[:GLANCE] != after.data[:GLANCE]:
        return False
    return np.array_equal(np.frombuffer(before.data, np.uint8), np.frombuffer(after.data, np.uint8))


class Summary(NamedTuple):
    """The statistics of a whole tensor: of one side, or of both with their change."""

    sides: tuple[Values, ...]
    change: Change | None


@np.errstate(all="ignore")
def summary(tallies: Sequence[Tally], shape: tuple[int, ...], *, parts: bool) -> Summary:
    """Merge the tallies of all pieces of a tensor, in order."""
    rows = added_up(tally.rows for tally in tallies)
    moments = [np.concatenate([tally.sides[side] for tally in tallies]) for side in range(len(tallies[0].sides))]
    sides = tuple(_values(table, rows.dead[side]) for side, table in enumerate(moments))
    tables = [tally.differences for tally in tallies if tally.differences is not None]
    if not tables:
        return Summary(sides, None)
    table = np.concatenate(tables)
    counts = np.sum([tally.histogram for tally in tallies], axis=0)
    return Summary(sides, _change(table, histogram_of(counts), rows.new, (*shape, 2) if parts else shape, parts))


def _values(table: Floats, dead: int) -> Values:
    columns: Any = Moments(*table.T)  # each field is an array over all blocks
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
    columns: Any = Differences(*table.T)
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
        largest=_largest(columns, shape, BLOCK * (1 + parts)),
        max_rel_change=float(columns.largest_ratio.max(initial=0.0)),
        cosine=_cosine(float(columns.product.sum()), before, after) if changed else 1.0,
        new_nan=int(columns.new_nan.sum()),
        new_inf=int(columns.new_inf.sum()),
        sign_flips=int(columns.sign_flips.sum()),
        new_dead_rows=new_dead,
        histogram=histogram,
    )


def _largest(columns: Any, shape: tuple[int, ...], step: int) -> Largest | None:
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


def histogram_of(counts: NDArray[Any]) -> Histogram:
    """Return a histogram without the empty bins at either end."""
    used = np.flatnonzero(counts)
    if not used.size:
        return Histogram(exponent=0, counts=())
    first, last = int(used[0]), int(used[-1])
    return Histogram(exponent=first + LOWEST_EXPONENT, counts=tuple(counts[first : last + 1].tolist()))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms."""
    counts = np.zeros(BINS, np.int64)
    for histogram in histograms:
        start = histogram.exponent - LOWEST_EXPONENT
        counts[start : start + len(histogram.counts)] += np.array(histogram.counts, np.int64)
    return histogram_of(counts)
