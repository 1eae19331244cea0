"""The report of a comparison of two sets of weights: one document for the terminal, the JSON and the HTML."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Literal

import msgspec

from weightswap_runtime.tensors.dtypes import TensorType

Status = Literal["removed", "added", "reshaped", "retyped", "renamed", "changed", "same"]
Level = Literal["alarm", "notice", "changed", "same"]
LEVELS: tuple[Level, ...] = ("alarm", "notice", "changed", "same")
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1023, 1023
COUNTING = frozenset({"I32", "U32", "I64", "U64"})
BINS = 2047  # the exponents of 64-bit floats


class DiffDocument(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Values(DiffDocument, frozen=True):
    """What one tensor holds.

    `mean`, the population's standard deviation `std`, and the Euclidean `norm` are of the finite elements; None where
    there are none. `dead_rows` counts rows along the first dimension that are zero throughout, in tensors of two
    dimensions or more. Here and in `Change` complex numbers are two elements each.
    """

    elements: int
    nan: int
    inf: int
    mean: float | None
    std: float | None
    norm: float
    dead_rows: int


class Largest(DiffDocument, frozen=True):
    """The element that changed most, the first of several: by how much, where it is, what it was and what it is."""

    change: float
    index: tuple[int, ...]
    before: float
    after: float


class Histogram(DiffDocument, frozen=True):
    """How many elements changed by how much: `counts[i]` by 2**(exponent + i) or more, and less than twice that.

    The bins are the same for all tensors, so that histograms can be added. What did not change is in none of them, and
    changes below 2**-1022 are in the bin of -1023.
    """

    exponent: int
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """The bins' bounds, one more than there are bins."""
        exponents = range(self.exponent, self.exponent + len(self.counts) + 1)
        return tuple(math.ldexp(1.0, power) if power <= HIGHEST_EXPONENT else sys.float_info.max for power in exponents)


class Change(DiffDocument, frozen=True):
    """What became of a tensor, element by element; A is before, B after.

    `changed` elements have another value (0.0 and -0.0 are one value, NaN and NaN too). `norm` is ‖B - A‖ and
    `rel_change` ‖B - A‖ / ‖A‖: 0 where nothing changed, infinite (null in JSON) where only A is zero.
    `max_rel_change` is the largest |b - a| / |a| among elements that A does not have as zero. `cosine` is that of the
    angle between A and B: 1 where nothing changed, also of zeros; else None where either is zero. All of these but
    `changed` are of elements that are finite in both. `new_nan` counts elements that were not NaN (but finite, or Inf),
    `new_inf` those that were not this Inf (but finite, NaN, or of the other sign). `new_dead_rows` are zero in B, and
    were not in A.
    What overflows 64-bit floats is infinite, or for the cosine None.
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
    """One tensor in both sets. `reasons` say, in words, why it has its level.

    `before` and `after` are None where the set does not have the tensor. `values_before`, `values_after` and `change`
    are None where nothing was read: both files carry the same digest, or the dtype has elements of less than a byte.
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
        """‖B - A‖ / ‖A‖; 0 where it was not measured."""
        return self.change.rel_change if self.change else 0.0

    @property
    def counts(self) -> bool:
        """Whether its numbers are wide integers: steps and indices, of which it says little how far they have moved."""
        return all(side.dtype in COUNTING for side in (self.before, self.after) if side)


class SetInfo(DiffDocument, frozen=True):
    """One side of a comparison. The ids are None where the file does not carry them.

    level: where in a pickled or distributed checkpoint the tensors are, such as `model`; empty for its top.
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
    """All tensors of both sides with other values, as if they were one; counters only where nothing else changed."""

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
        """That of the most alarming tensor."""
        return self.tensors[0].level if self.tensors else "same"

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors have each status, without those that none has."""
        return dict(Counter(tensor.status for tensor in self.tensors))
