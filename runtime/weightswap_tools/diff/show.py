"""Terminal and page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weightswap_runtime.errors import listed, plural
from weightswap_runtime.format.signature import Signature
from weightswap_tools.diff import ArtifactsDiff, SetInfo, TensorDiff, WeightsDiff
from weightswap_tools.diff import Histogram as Changes
from weightswap_tools.reports.blocks import (
    Block,
    Cell,
    Column,
    Facts,
    HeatMap,
    Histogram,
    Mark,
    Note,
    Report,
    Section,
    Table,
    columns,
)
from weightswap_tools.tensor_set import natural, split_name
from weightswap_tools.terminal import human_bytes, print_table, say, signature_text

from .artifacts import MethodDiff, RowDiff, SourceDiff
from .documents import LEVELS

NAMED = 20  # the most tensors to name for a condition


def percent(share: float) -> str:
    """Return a share as `100 %` or `0.02 %`. A nonzero share never reads as 0."""
    return f"{100 * share:.3g} %"


def largest_change(diff: TensorDiff) -> str:
    """Return the largest change of an element, as `0.5 at [3, 128]`."""
    if diff.change is None or diff.change.largest is None:
        return ""
    largest = diff.change.largest
    return f"{largest.change:.3g} at {list(largest.index)}" if largest.index else f"{largest.change:.3g}"


def condition_words(condition: str, names: Sequence[str]) -> str:
    """Return the condition and the tensors that meet it, at most NAMED of them."""
    return f"{condition}: {listed(names, NAMED)}" if names else condition


def set_facts(title: str, info: SetInfo) -> Iterator[tuple[str, str]]:
    """Yield a set's file and size, as `v1.safetensors (12 tensors, 1.2 MB)`, its id, labels and ignored tensors."""
    level = f", level {info.level}" if info.level else ""
    yield title, f"{info.where}{level} ({info.tensors} tensors, {human_bytes(info.nbytes)})"
    if info.weights_id:
        yield "weights id", info.weights_id
    yield from (("label", f"{label} = {text}") for label, text in info.labels.items())
    if info.ignored:
        yield "left out", ", ".join(info.ignored)


def verdict(diff: WeightsDiff) -> str:
    """Return the number of tensors by level, as `1 alarm, 2 notices, 3 changed, 4 the same`."""
    counts = Counter(tensor.level for tensor in diff.tensors)
    words = {
        "alarm": plural(counts["alarm"], "alarm"),
        "notice": plural(counts["notice"], "notice"),
        "changed": f"{counts['changed']} changed",
        "same": f"{counts['same']} the same",
    }
    return ", ".join(words[level] for level in LEVELS if counts[level]) or "no tensors"


def overall(diff: WeightsDiff) -> str:
    """Return the overall change of the tensors that changed."""
    whole = diff.overall
    if not whole.tensors:
        return "no value changed"
    change = "infinite" if math.isinf(whole.rel_change) else f"{whole.rel_change:.3g}"
    share = percent(whole.changed / max(1, whole.elements))
    tensors = plural(whole.tensors, "tensor")
    return f"{change} (relative, of {tensors} with other values); {share} of the elements"


COLUMNS = ["level", "tensor", "what", "relative change", "largest change", "elements changed", "cosine"]


def print_weights(diff: WeightsDiff, most: int | None) -> None:
    """Print a summary and the `most` alarming changed tensors; None prints all tensors, also unchanged ones."""
    facts = [*set_facts("before", diff.before), *set_facts("after", diff.after)]
    facts += [("tensors", verdict(diff)), ("change", overall(diff)), *(("note", notice) for notice in diff.notices)]
    for title, text in facts:
        say(f"{title:<12}{text}")
    differing = [tensor for tensor in diff.tensors if tensor.level != "same"]
    shown = differing[:most] if most is not None else list(diff.tensors)
    if shown:
        title = f"{len(shown)} of {len(diff.tensors)} tensors, the most alarming first"
        print_table(title, COLUMNS, [tensor_cells(tensor) for tensor in shown])
    if len(shown) < len(differing):
        say(f"{len(differing) - len(shown)} more differ; --all shows them")


def print_failures(failures: Mapping[str, tuple[str, ...]]) -> None:
    """Print which tensors meet each condition."""
    for condition, names in failures.items():
        say(f"{'failed' if names else 'passed':<12}{condition_words(condition, names)}")


def tensor_cells(tensor: TensorDiff) -> list[str]:
    """Return the cells of a tensor, in the order of COLUMNS."""
    change = tensor.change
    return [
        tensor.level,
        tensor.name,
        "; ".join(tensor.reasons),
        f"{change.rel_change:.3g}" if change else "",
        largest_change(tensor),
        percent(change.share_changed) if change else "",
        f"{change.cosine:.6f}" if change and change.cosine is not None else "",
    ]


def print_artifacts(diff: ArtifactsDiff) -> None:
    """Print the verdict and all differences."""
    for title, info in (("before", diff.before), ("after", diff.after)):
        say(f"{title:<12}{info.where}, graph id {info.graph_id[:12]}, torch {info.torch}")
    say(f"verdict     {diff.verdict}")
    for problem in diff.misfits:
        say(f"misfit      {problem}")
    for method in diff.methods:
        _print_method(method)
    _table("tables", ["table", "name", "before", "after"], [row_cells(row) for row in diff.rows])
    _table("constants and initial state", COLUMNS, [tensor_cells(tensor) for tensor in diff.constants])
    _table("checkpoints", ["weight", "came from", "comes from"], [source_cells(source) for source in diff.sources])
    if diff.transforms_changed:
        say("adapter     the graph that computes weights from a checkpoint changed")
    for engine, what in diff.engines.items():
        say(f"engine      {engine}: {what}")


def _print_method(method: MethodDiff) -> None:
    for title, signature in (("before", method.before), ("after", method.after)):
        if not method.same_signature:
            say(f"{title:<12}{method_signature(method.name, signature)}")
    rows = [[count.name, str(count.before), str(count.after)] for count in method.operators]
    if not rows and not method.same_graph:
        say(f"method      {method.name}: the same operators, in another graph")
    _table(f"{method.name}: calls of operators", ["operator", "before", "after"], rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    if rows:
        print_table(title, columns, rows)


def method_signature(name: str, signature: Signature | None) -> str:
    """Return a method's signature as text, or say that there is no such method."""
    return signature_text(name, signature) if signature else f"no method {name}"


def row_cells(row: RowDiff) -> list[str]:
    """Return the cells of a changed tensor of the weights, state or constants."""
    return [row.kind, row.name, str(row.before or "absent"), str(row.after or "absent")]


def source_cells(source: SourceDiff) -> list[str]:
    """Return the cells of a weight whose checkpoint keys changed."""
    return [
        source.weight,
        _keys(source.before, source.computed_before),
        _keys(source.after, source.computed_after),
    ]


def _keys(keys: tuple[str, ...] | None, computed: bool) -> str:
    if keys is None:
        return "absent"
    return f"computed from {', '.join(keys)}" if computed else " or ".join(keys)


MOST_CELLS = 100_000
NEW_NAN, NEW_INF = "new NaN", "new Inf"
MARKS = (
    Mark(NEW_NAN, "NaN", "bad"),
    Mark(NEW_INF, "Inf", "bad"),
    Mark("removed", "\N{MINUS SIGN}"),
    Mark("added", "+"),
    Mark("reshaped", "⊡"),
    Mark("renamed", "→"),
    Mark("retyped", "≈"),
    Mark("changed", "≠"),
)


def change_map(tensors: Sequence[TensorDiff]) -> Block:
    """Return a map with a cell for each tensor, under its later name; or a note if there are none or too many."""
    cells = {tensor.name: _cell(tensor) for tensor in tensors}
    layers = grid(list(cells))
    if not cells:
        return Note("There are no tensors.")
    if len(layers.rows) * len(layers.columns) > MOST_CELLS:
        return Note(f"{len(layers.rows)} layers of {len(layers.columns)} kinds of weights are too many for a map.")
    values = tuple(tuple(cells[name] if name is not None else None for name in names) for names in layers.names)
    return HeatMap(layers.rows, layers.columns, values, "relative change", "log", "", MARKS)


def _cell(tensor: TensorDiff) -> float | str:
    """Return the relative change; or a mark, if it became NaN or Inf, or if values were not compared."""
    change = tensor.change
    if change is None:
        return 0.0 if tensor.status == "same" else tensor.status
    if change.new_nan or change.new_inf:
        return NEW_NAN if change.new_nan else NEW_INF
    return change.rel_change


class Grid(NamedTuple):
    """A grid of weights: `names[row][column]` is the weight in a cell, None if the cell is empty."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]


def grid(names: Sequence[str]) -> Grid:
    """Arrange weights in a grid with a row for each layer: `encoder.layers.0`, column `attn.q.weight`.

    A layer's name ends with its first number. A weight outside numbered layers is in the row of its module.
    """
    positions = {name: _row_and_column(name) for name in sorted(names, key=natural)}
    rows = tuple(dict.fromkeys(row for row, _ in positions.values()))
    columns = tuple(dict.fromkeys(column for _, column in positions.values()))
    names_at = {position: name for name, position in positions.items()}
    return Grid(rows, columns, tuple(tuple(names_at.get((row, column)) for column in columns) for row in rows))


def _row_and_column(name: str) -> tuple[str, str]:
    path, own = split_name(name)
    numbered = next((index for index, part in enumerate(path) if part.isascii() and part.isdecimal()), None)
    if numbered is None:
        return ".".join(path) or "(model)", own
    return ".".join(path[: numbered + 1]), ".".join([*path[numbered + 1 :], own])


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


def artifacts_report(diff: ArtifactsDiff) -> Report:
    """Return a report with the verdict and all differences."""
    facts = [
        fact
        for title, info in (("before", diff.before), ("after", diff.after))
        for fact in ((title, info.where), ("graph id", info.graph_id), ("torch", info.torch))
    ]
    facts += [(f"engine {engine}", what) for engine, what in diff.engines.items()]
    if diff.transforms_changed:
        facts.append(("adapter", "the graph that computes weights from a checkpoint changed"))
    overview = Section("Overview", (Facts(tuple(facts)), *(Note(problem, "bad") for problem in diff.misfits)))
    methods = (Section(f"Method {method.name}", tuple(_method(method))) for method in diff.methods)
    subtitle = f"{diff.before.where} → {diff.after.where}"
    sections = (overview, *methods, *_artifact_tables(diff))
    return Report("What changed in the artifact", subtitle, sections, diff.verdict, diff.fits)


def _method(method: MethodDiff) -> Iterator[Block]:
    if method.same_signature:
        yield Note("The signature is the same.")
    else:
        yield Facts(
            (
                ("before", method_signature(method.name, method.before)),
                ("after", method_signature(method.name, method.after)),
            )
        )
    rows = tuple((count.name, count.before, count.after, count.after - count.before) for count in method.operators)
    if rows:
        heads = (Column("operator"), *columns("before", "after", "difference", kind="number"))
        yield Table(heads, rows, "Calls of operators")
    elif not method.same_graph:
        yield Note("The same operators, in another graph.")


def _artifact_tables(diff: ArtifactsDiff) -> Iterator[Section]:
    yield from _artifact_table(
        "Weights, state and constants", ["table", "name", "before", "after"], map(row_cells, diff.rows)
    )
    yield from _artifact_table("Values of constants and initial state", COLUMNS, map(tensor_cells, diff.constants))
    yield from _artifact_table("Checkpoints", ["weight", "came from", "comes from"], map(source_cells, diff.sources))


def _artifact_table(title: str, heads: list[str], rows: Iterator[list[str]]) -> Iterator[Section]:
    if cells := tuple(map(tuple, rows)):
        yield Section(title, (Table(columns(*heads), cells),))
