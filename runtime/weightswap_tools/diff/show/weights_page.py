"""The HTML report of a comparison of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weightswap_tools.diff import Histogram as Changes
from weightswap_tools.diff import TensorDiff, WeightsDiff
from weightswap_tools.reports.blocks import Cell, Column, Facts, Histogram, Note, Report, Section, Table, columns

from .change_map import change_map
from .phrases import condition_words, largest_change, overall, set_facts, verdict

MOST_HISTOGRAMS = 6


def weights_report(diff: WeightsDiff, failures: Mapping[str, tuple[str, ...]]) -> Report:
    """Return a report: facts, conditions, a map and histograms of the changes, and tables of all tensors."""
    met = any(failures.values())
    sections = [
        Section("Overview", (Facts(tuple(_facts(diff))), *(Note(notice, "bad") for notice in diff.notices))),
        *_conditions(failures),
        Section("Where the change is", (change_map(diff.tensors),), _MAP_NOTE),
        *_histograms(diff),
        Section("Tensors", _tables(diff.tensors), _TABLE_NOTE),
    ]
    title = "What changed in the weights"
    subtitle = f"{diff.before.where} → {diff.after.where}"
    return Report(title, subtitle, tuple(sections), verdict(diff), not met and diff.level != "alarm")


_MAP_NOTE = """Relative change ‖B - A‖ / ‖A‖, with a row for each layer and a column for each kind of weight.
It is 0 if nothing changed, and infinite if all of A is zero."""
_TABLE_NOTE = "The most alarming tensors first. A is before, B is after."


def _facts(diff: WeightsDiff) -> Iterator[tuple[str, str]]:
    yield from set_facts("before", diff.before)
    yield from set_facts("after", diff.after)
    yield "tensors", ", ".join(f"{count} {status}" for status, count in diff.counts.items())
    yield "change", overall(diff)


def _conditions(failures: Mapping[str, tuple[str, ...]]) -> Iterator[Section]:
    if failures:
        notes = (
            Note(condition_words(condition, names) if names else f"{condition}: no tensor", "bad" if names else "good")
            for condition, names in failures.items()
        )
        yield Section(
            "Conditions", tuple(notes), "Conditions of --fail-if. The exit status is 1 if a tensor meets one."
        )


def _histograms(diff: WeightsDiff) -> Iterator[Section]:
    compared = sorted((tensor for tensor in diff.tensors if tensor.change), key=lambda tensor: -tensor.rel_change)
    changed = [(tensor.name, tensor.change.histogram) for tensor in compared if tensor.change and tensor.change.changed]
    if changed:
        blocks = [_histogram("All tensors", diff.overall.histogram)]
        blocks += [_histogram(name, changes) for name, changes in changed[:MOST_HISTOGRAMS]]
        note = "Changed elements by the absolute size of the change, in all tensors and in those that changed most."
        yield Section("How large the changes are", tuple(blocks), note)


def _histogram(caption: str, changes: Changes) -> Histogram:
    return Histogram(changes.edges, changes.counts, "absolute change", "log", caption)


_CHANGE_COLUMNS = (
    *columns("level", "tensor", "what"),
    Column("relative change", "number"),
    Column("largest change"),
    *columns("share changed", "cosine", "sign flips", kind="number"),
    *columns("new NaN", "new Inf", "new dead rows", kind="number", flag=True),
)
_VALUE_COLUMNS = (
    *columns("tensor", "type in A", "type in B"),
    *columns("mean of A", "mean of B", "std of A", "std of B", "largest relative change", kind="number"),
)


def _tables(tensors: Sequence[TensorDiff]) -> tuple[Table, Table]:
    changes = Table(_CHANGE_COLUMNS, tuple(map(_change_row, tensors)), "What changed")
    return changes, Table(_VALUE_COLUMNS, tuple(map(_value_row, tensors)), "What they hold")


def _change_row(tensor: TensorDiff) -> tuple[Cell, ...]:
    what = "; ".join(tensor.reasons) if tensor.level != "changed" else ""
    change = tensor.change
    if change is None:
        return tensor.level, tensor.name, what, None, "", *([None] * 6)
    counts = (change.sign_flips, change.new_nan, change.new_inf, change.new_dead_rows)
    shares = (change.share_changed, change.cosine)
    return tensor.level, tensor.name, what, change.rel_change, largest_change(tensor), *shares, *counts


def _value_row(tensor: TensorDiff) -> tuple[Cell, ...]:
    old, new = tensor.values_before, tensor.values_after
    return (
        tensor.name,
        str(tensor.before or ""),
        str(tensor.after or ""),
        old.mean if old else None,
        new.mean if new else None,
        old.std if old else None,
        new.std if new else None,
        tensor.change.max_rel_change if tensor.change else None,
    )
