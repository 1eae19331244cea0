"""The comparison as a document, and its severity."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Literal, NamedTuple

import msgspec

from weightswap_runtime.tensors import TensorType
from weightswap_tools.tensor_set import natural

Status = Literal["removed", "added", "reshaped", "retyped", "renamed", "changed", "same"]
Level = Literal["alarm", "notice", "changed", "same"]
LEVELS: tuple[Level, ...] = ("alarm", "notice", "changed", "same")
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1023, 1023
COUNTING = frozenset({"I32", "U32", "I64", "U64"})
BINS = 2047  # the exponents of 64-bit floats


class DiffDocument(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Values(DiffDocument, frozen=True):
    """Statistics of one tensor.

    `mean`, the population standard deviation `std` and the Euclidean `norm` are of the finite elements; the first two
    are None if there are none. `dead_rows` counts all-zero rows along the first dimension, in tensors of two dimensions
    or more. Here and in `Change` a complex number counts as two elements.
    """

    elements: int
    nan: int
    inf: int
    mean: float | None
    std: float | None
    norm: float
    dead_rows: int


class Largest(DiffDocument, frozen=True):
    """The element that changed most, the first of several: its change, its index, and its values."""

    change: float
    index: tuple[int, ...]
    before: float
    after: float


class Histogram(DiffDocument, frozen=True):
    """Sizes of changes: `counts[i]` elements changed by at least 2**(exponent + i), and less than twice that.

    The bins are the same for all tensors, so that histograms can be added. Unchanged elements are not counted. Changes
    below 2**-1022 are in the bin of -1023.
    """

    exponent: int
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """The bounds of the bins, one more than there are bins."""
        exponents = range(self.exponent, self.exponent + len(self.counts) + 1)
        return tuple(math.ldexp(1.0, power) if power <= HIGHEST_EXPONENT else sys.float_info.max for power in exponents)


class Change(DiffDocument, frozen=True):
    """The change of a tensor, element by element, from A (before) to B (after).

    `changed` counts elements with another value; 0.0 equals -0.0, and NaN equals NaN. `norm` is ‖B - A‖. `rel_change`
    is ‖B - A‖ / ‖A‖: 0 if nothing changed, infinite (null in JSON) if only A is zero. `max_rel_change` is the largest
    |b - a| / |a| over nonzero a. `cosine` is the cosine of the angle between A and B: 1 if nothing changed, even for
    zeros; else None if either is zero. All of these but `changed` are over elements that are finite in both.
    `new_nan` counts NaN elements that were finite or Inf, `new_inf` Inf elements that were finite, NaN or of the other
    sign. `new_dead_rows` counts rows that are zero in B and were not in A. Values that overflow 64-bit floats are
    infinite, or for the cosine None.
    """

    elements: int
    changed: int
    share_changed: float
    norm: float
    rel_change: float
    largest: Largest | None
    max_rel_change: float
    cosine: float | None
    new_nan: int
    new_inf: int
    sign_flips: int
    new_dead_rows: int
    histogram: Histogram


class TensorDiff(DiffDocument, frozen=True):
    """One tensor in both sets. `reasons` are texts that justify its level.

    `before` and `after` are None if the set does not have the tensor. `values_before`, `values_after` and `change` are
    None if nothing was read: both files carry the same digest, or the dtype has elements of less than a byte.
    """

    name: str
    status: Status
    level: Level = "same"
    reasons: tuple[str, ...] = ()
    before: TensorType | None = None
    after: TensorType | None = None
    renamed_from: str | None = None
    values_before: Values | None = None
    values_after: Values | None = None
    change: Change | None = None

    @property
    def rel_change(self) -> float:
        """‖B - A‖ / ‖A‖; 0 if it was not measured."""
        return self.change.rel_change if self.change else 0.0

    @property
    def counts(self) -> bool:
        """True for wide integers, such as steps and indices, whose relative change means little."""
        return all(side.dtype in COUNTING for side in (self.before, self.after) if side)


class SetInfo(DiffDocument, frozen=True):
    """One side of a comparison. The ids are None if the file does not carry them.

    level: the path of the tensors inside a pickled or distributed checkpoint, such as `model`; empty for its top.
    """

    where: str
    tensors: int
    nbytes: int
    level: str | None = None
    weights_id: str | None = None
    graph_id: str | None = None
    labels: dict[str, str] = {}
    ignored: tuple[str, ...] = ()


class Overall(DiffDocument, frozen=True):
    """The change of all changed tensors together. Counters are included only if nothing else changed."""

    tensors: int
    elements: int
    changed: int
    rel_change: float
    histogram: Histogram


class WeightsDiff(DiffDocument, frozen=True):
    """The comparison of two sets of weights; `tensors` are sorted, the most alarming first."""

    before: SetInfo
    after: SetInfo
    tensors: tuple[TensorDiff, ...]
    overall: Overall
    notices: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """The level of the most alarming tensor."""
        return self.tensors[0].level if self.tensors else "same"

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors by status, without zeros."""
        return dict(Counter(tensor.status for tensor in self.tensors))


LARGE_CHANGE = 0.5  # relative; fine-tuning stays far below, training from scratch is far above


class _Reason(NamedTuple):
    """A reason for a level. `concerned` is the number of affected elements or rows; 0 if it does not apply."""

    level: Level
    concerned: int
    text: str


def graded(diff: TensorDiff) -> TensorDiff:
    """Return the difference with its level and reasons."""
    reasons = [reason for reason in _reasons(diff) if reason.concerned]
    level = reasons[0].level if reasons else "same"
    texts = [reason.text for reason in reasons if reason.level != "changed" or len(reasons) == 1]
    return msgspec.structs.replace(diff, level=level, reasons=tuple(texts))


def alarm_order(diff: TensorDiff) -> tuple[object, ...]:
    """Return the sort key of a graded tensor."""
    counts = [reason.concerned for reason in _reasons(diff)]
    rank = next((index for index, count in enumerate(counts) if count), len(counts))
    change = 0.0 if diff.counts else diff.rel_change
    return LEVELS.index(diff.level), rank, -sum(counts[rank : rank + 1]), -change, natural(diff.name)


def _reasons(diff: TensorDiff) -> tuple[_Reason, ...]:
    """Return all possible reasons, the gravest first."""
    nan, inf, dead = new_values(diff)
    types = f"{diff.before} became {diff.after}"
    return (
        _Reason("alarm", nan, f"{nan} new NaN"),
        _Reason("alarm", inf, f"{inf} new Inf"),
        _Reason("alarm", diff.status == "removed", f"removed, {diff.before}"),
        _Reason("alarm", diff.status == "reshaped", types),
        _Reason("notice", dead, f"{dead} new dead row{'s' if dead > 1 else ''}"),
        _Reason("notice", diff.rel_change > LARGE_CHANGE and not diff.counts, f"relative change {diff.rel_change:.3g}"),
        _Reason("notice", diff.status == "added", f"added, {diff.after}"),
        _Reason("notice", diff.status == "retyped", types),
        _Reason("notice", diff.status == "renamed", f"renamed from {diff.renamed_from}"),
        _Reason("changed", diff.status == "changed", "changed"),
    )


def new_values(diff: TensorDiff) -> tuple[int, int, int]:
    """Return the numbers of new NaN, new Inf and new dead rows.

    For a tensor without a counterpart of the same shape, these are all NaN, Inf and dead rows in B.
    """
    if diff.change:
        return diff.change.new_nan, diff.change.new_inf, diff.change.new_dead_rows
    after = diff.values_after
    return (after.nan, after.inf, after.dead_rows) if after else (0, 0, 0)
