"""The comparison of two sets of weights as a document, and how alarming each change is."""

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
BINS = 2047  # the exponents of 64-bit floats
LOWEST_EXPONENT, _HIGHEST_EXPONENT = -1023, 1023
_COUNTING = frozenset({"I32", "U32", "I64", "U64"})
_LARGE_CHANGE = 0.5  # relative; fine-tuning stays far below, training from scratch is far above


class DiffDocument(msgspec.Struct, frozen=True, kw_only=True):
    pass


class WeightsDiff(DiffDocument, frozen=True):
    """The comparison of two sets of weights."""

    before: SetInfo
    after: SetInfo
    tensors: tuple[TensorDiff, ...]  # the most alarming first
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


class SetInfo(DiffDocument, frozen=True):
    """One side of a comparison."""

    where: str
    tensors: int
    nbytes: int
    level: str | None = None  # the path of the tensors inside a checkpoint, such as `model`; empty for its top
    weights_id: str | None = None  # this and the next are None if the file does not carry them
    graph_id: str | None = None
    labels: dict[str, str] = {}
    ignored: tuple[str, ...] = ()


class TensorDiff(DiffDocument, frozen=True):
    """One tensor in both sets.

    The last three fields are None if nothing was read: both files carry the same digest, or the dtype has elements of
    less than a byte.
    """

    name: str
    status: Status
    level: Level = "same"
    reasons: tuple[str, ...] = ()  # texts that justify the level
    before: TensorType | None = None  # None if the set does not have the tensor
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
        return all(side.dtype in _COUNTING for side in (self.before, self.after) if side)


class Values(DiffDocument, frozen=True):
    """Statistics of one tensor. Here and in `Change` a complex number counts as two elements."""

    elements: int
    nan: int
    inf: int
    mean: float | None  # of the finite elements, as the next two; None if there are none
    std: float | None  # the population standard deviation; None as before
    norm: float  # Euclidean
    dead_rows: int  # all-zero rows along the first dimension, in tensors of two dimensions or more


class Change(DiffDocument, frozen=True):
    """The change of a tensor, element by element, from A (before) to B (after).

    All figures but `changed` are over elements that are finite in both. Values that overflow 64-bit floats are
    infinite, or for the cosine None.
    """

    elements: int
    changed: int  # elements with another value; 0.0 equals -0.0, and NaN equals NaN
    share_changed: float
    norm: float  # ‖B - A‖
    rel_change: float  # ‖B - A‖ / ‖A‖: 0 if nothing changed, infinite (null in JSON) if only A is zero
    largest: Largest | None
    max_rel_change: float  # the largest |b - a| / |a| over nonzero a
    cosine: float | None  # of the angle between A and B: 1 if nothing changed, even for zeros; else None if one is zero
    new_nan: int  # NaN elements that were finite or Inf
    new_inf: int  # Inf elements that were finite, NaN or of the other sign
    sign_flips: int
    new_dead_rows: int  # rows that are zero in B and were not in A
    histogram: Histogram


class Largest(DiffDocument, frozen=True):
    """The element that changed most, the first of several."""

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
        powers = range(self.exponent, self.exponent + len(self.counts) + 1)
        return tuple(math.ldexp(1.0, power) if power <= _HIGHEST_EXPONENT else sys.float_info.max for power in powers)


class Overall(DiffDocument, frozen=True):
    """The change of all changed tensors together. Counters are included only if nothing else changed."""

    tensors: int
    elements: int
    changed: int
    rel_change: float
    histogram: Histogram


class _Reason(NamedTuple):
    level: Level
    concerned: int  # the number of affected elements or rows; 0 if the reason does not apply
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
        _Reason(
            "notice", diff.rel_change > _LARGE_CHANGE and not diff.counts, f"relative change {diff.rel_change:.3g}"
        ),
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
