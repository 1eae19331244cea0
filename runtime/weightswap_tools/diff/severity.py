"""How alarming a difference is: a level, the reasons for it, and the order in which tensors are shown.

The order: by level (alarm, notice, changed, same); then by the gravest reason, as `_reasons` lists them; then by how
many elements or rows it concerns, the most first; then by relative change, the largest first; then by name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weightswap_tools.module_tree import natural

from .report import LEVELS, Level, TensorDiff

LARGE_CHANGE = 0.5  # relative; fine-tuning stays far below, training anew is far above


class _Reason(NamedTuple):
    """Why a tensor has a level. `concerned`: how many elements or rows give rise to it."""

    level: Level
    concerned: int
    text: str


def graded(diff: TensorDiff) -> TensorDiff:
    """With its level and reasons."""
    found = [reason for reason in _reasons(diff) if reason.concerned]
    level = found[0].level if found else "same"
    texts = [reason.text for reason in found if reason.level != "changed" or len(found) == 1]
    return msgspec.structs.replace(diff, level=level, reasons=tuple(texts))


def alarm_order(diff: TensorDiff) -> tuple[object, ...]:
    """The sort key of a graded tensor."""
    counts = [reason.concerned for reason in _reasons(diff)]
    rank = next((index for index, count in enumerate(counts) if count), len(counts))
    change = 0.0 if diff.counts else diff.rel_change
    return LEVELS.index(diff.level), rank, -sum(counts[rank : rank + 1]), -change, natural(diff.name)


def _reasons(diff: TensorDiff) -> tuple[_Reason, ...]:
    """All reasons that there are, the gravest first; those with a count of 0 do not apply."""
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
    """How many elements are NaN that were not, or an Inf that they were not, and how many rows are dead that were not.

    Of a tensor that has no counterpart of its shape, all that there are in B.
    """
    if diff.change:
        return diff.change.new_nan, diff.change.new_inf, diff.change.new_dead_rows
    after = diff.values_after
    return (after.nan, after.inf, after.dead_rows) if after else (0, 0, 0)
