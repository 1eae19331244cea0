"""Severity of differences: levels, the reasons for them, and the order in which tensors are shown.

Tensors are ordered by level (alarm, notice, changed, same), then by the gravest reason in the order of `_reasons`, then
by the number of affected elements or rows, then by relative change, both largest first, and then by name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weightswap_tools.module_tree import natural

from .report import LEVELS, Level, TensorDiff

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
