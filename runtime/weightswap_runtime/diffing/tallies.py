"""What the blocks of a tensor add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.contents import Content

from . import blocks
from .blocks import BLOCK, Moments
from .deadrows import DeadRows, RowTally, dead_rows
from .differences import Differences, differences, unchanged
from .report import BINS, LOWEST_EXPONENT, Change, Histogram, Largest, Values
from .scaling import Floats, Scaled, total

GLANCE = 256  # bytes: most blocks that differ at all differ there


class Stretch(NamedTuple):
    """Elements `begin` to `end` of a tensor of a dtype and shape; `data` holds their bytes."""

    content: Content
    begin: int
    parts: bool

    def block(self, start: int, stop: int) -> Content:
        """Elements `start` to `stop` of the stretch."""
        dtype, shape, data = self.content
        size = len(data) // max(1, math.prod(shape))
        return Content(dtype, (stop - start,), data[start * size : stop * size])


class Tally(NamedTuple):
    """The statistics of a stretch: a row for each block, the histogram, and what is known of rows.

    `sides` has one or two arrays of `Moments`; `differences` is None with one side.
    """

    sides: tuple[Floats, ...]
    differences: Floats | None
    histogram: NDArray[Any]
    rows: RowTally


def tally(stretches: Sequence[Stretch], tensor_shape: tuple[int, ...]) -> Tally:
    """The statistics of one stretch, or of the same stretch of two tensors."""
    count = math.prod(stretches[0].content.shape)
    moments: list[list[Moments]] = [[] for _ in stretches]
    found: list[Differences] = []
    histogram = np.zeros(BINS, np.int64)
    for start in range(0, count, BLOCK):
        contents = [stretch.block(start, min(start + BLOCK, count)) for stretch in stretches]
        one = _block(contents, stretches[0].parts, moments, histogram)
        found += [one] if one else []
    sides = tuple(np.array(side, np.float64).reshape(-1, len(Moments._fields)) for side in moments)
    table = np.array(found, np.float64).reshape(-1, len(Differences._fields)) if len(stretches) > 1 else None
    rows = dead_rows([stretch.content for stretch in stretches], tensor_shape, stretches[0].begin)
    return Tally(sides, table, histogram, rows)


def _block(
    contents: Sequence[Content], parts: bool, moments: list[list[Moments]], histogram: NDArray[Any]
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
    found, counts = differences((contents[0], contents[1]), (before, after))
    histogram += counts
    return found


def same_bytes(before: Content, after: Content) -> bool:
    """Whether two contents of one dtype are the same bit for bit."""
    if before.dtype != after.dtype or before.data[:GLANCE] != after.data[:GLANCE]:
        return False
    return np.array_equal(np.frombuffer(before.data, np.uint8), np.frombuffer(after.data, np.uint8))


class Summary(NamedTuple):
    """The statistics of a whole tensor; of one side, or of both with their change."""

    sides: tuple[Values, ...]
    change: Change | None


def summary(tallies: Sequence[Tally], shape: tuple[int, ...], *, parts: bool) -> Summary:
    """Add up the stretches of a tensor, which are all of it in their order."""
    rows = DeadRows.of(tally.rows for tally in tallies)
    moments = [np.concatenate([tally.sides[side] for tally in tallies]) for side in range(len(tallies[0].sides))]
    sides = tuple(_values(table, rows.dead[side]) for side, table in enumerate(moments))
    tables = [tally.differences for tally in tallies if tally.differences is not None]
    if not tables:
        return Summary(sides, None)
    table = np.concatenate(tables)
    counts = np.sum([tally.histogram for tally in tallies], axis=0)
    return Summary(sides, _change(table, histogram_of(counts), rows.new, _Places(shape, parts)))


def _columns(kind: Any, table: Floats) -> Any:
    """The rows of blocks as one array for each of their fields."""
    return kind(*table.T)


def _values(table: Floats, dead: int) -> Values:
    columns = _columns(Moments, table)
    exponents = columns.exponent.astype(np.int64)
    finite = int(columns.finite.sum())
    elements = finite + int(columns.nan.sum() + columns.inf.sum())
    mean, variance = _mean_and_variance(columns, exponents, finite)
    return Values(
        elements=elements,
        nan=int(columns.nan.sum()),
        inf=int(columns.inf.sum()),
        mean=float(mean) if finite else None,
        std=float(variance.root()) if finite else None,
        norm=float(total(columns.squares, 2 * exponents).root()),
        dead_rows=dead,
    )


def _mean_and_variance(columns: Any, exponents: NDArray[np.int64], finite: int) -> tuple[Scaled, Scaled]:
    """Within blocks and between their means, as in an analysis of variance."""
    sums = total(columns.sum, exponents)
    mean = Scaled(sums.value / max(1, finite), sums.exponent)
    used = exponents[columns.squares != 0]  # zeros have no exponent
    common = int(used.max()) if used.size else 0
    means = np.ldexp(columns.sum / np.maximum(1, columns.finite), exponents - common)
    between = columns.finite * (means - math.ldexp(mean.value, mean.exponent - common)) ** 2
    within = np.ldexp(columns.spread, 2 * (exponents - common))
    return mean, Scaled(math.fsum([*within.tolist(), *between.tolist()]) / max(1, finite), 2 * common)


@dataclass(frozen=True)
class _Places:
    """How positions in blocks become indices: complex numbers have a last dimension of two."""

    tensor_shape: tuple[int, ...]
    parts: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensor_shape, 2) if self.parts else self.tensor_shape

    def index(self, block: int, place: int) -> tuple[int, ...]:
        start = block * BLOCK * (2 if self.parts else 1)
        return tuple(int(position) for position in np.unravel_index(start + place, self.shape)) if self.shape else ()


def _change(table: Floats, histogram: Histogram, new_dead: int, places: _Places) -> Change:
    columns = _columns(Differences, table)
    elements, changed = math.prod(places.shape), int(columns.changed.sum())
    norm = total(columns.squares, columns.squares_exponent.astype(np.int64)).root()
    first, second = columns.before_exponent.astype(np.int64), columns.after_exponent.astype(np.int64)
    before, after = total(columns.before_squares, 2 * first), total(columns.after_squares, 2 * second)
    return Change(
        elements=elements,
        changed=changed,
        share_changed=changed / max(1, elements),
        norm=float(norm),
        rel_change=norm.over(before.root()),
        largest=_largest(columns, places),
        max_rel_change=float(columns.largest_ratio.max(initial=0.0)),
        cosine=_cosine(total(columns.product, first + second), before, after) if changed else 1.0,
        new_nan=int(columns.new_nan.sum()),
        new_inf=int(columns.new_inf.sum()),
        sign_flips=int(columns.sign_flips.sum()),
        new_dead_rows=new_dead,
        histogram=histogram,
    )


def _largest(columns: Any, places: _Places) -> Largest | None:
    block = int(columns.largest.argmax()) if len(columns.largest) else 0
    if not len(columns.largest) or not columns.largest[block]:
        return None
    return Largest(
        change=float(columns.largest[block]),
        index=places.index(block, int(columns.place[block])),
        before=float(columns.before[block]),
        after=float(columns.after[block]),
    )


def _cosine(product: Scaled, before: Scaled, after: Scaled) -> float | None:
    """Of the inner product and the squares of the norms."""
    if not before.value or not after.value:
        return None
    both = Scaled(before.value * after.value, before.exponent + after.exponent).root()
    return max(-1.0, min(1.0, product.over(both)))


def histogram_of(counts: NDArray[Any]) -> Histogram:
    """Without the empty bins on either side."""
    used = np.flatnonzero(counts)
    if not used.size:
        return Histogram(exponent=0, counts=())
    first, last = int(used[0]), int(used[-1])
    return Histogram(exponent=first + LOWEST_EXPONENT, counts=tuple(counts[first : last + 1].tolist()))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The counts of all of them."""
    counts = np.zeros(BINS, np.int64)
    for histogram in histograms:
        start = histogram.exponent - LOWEST_EXPONENT
        counts[start : start + len(histogram.counts)] += np.array(histogram.counts, np.int64)
    return histogram_of(counts)
