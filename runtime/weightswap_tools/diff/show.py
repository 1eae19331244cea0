"""What `weightswap diff` shows: on the terminal and on a page the same facts and tables, in the same words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from weightswap_runtime.errors import listed, percent, plural
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
from weightswap_tools.terminal import human_bytes, print_facts, print_table, say, signature_text

from .artifacts import MethodDiff
from .documents import LEVELS

MOST_CELLS = 100_000  # of the map
_MOST_NAMED = 20  # tensors that meet a condition
_MOST_HISTOGRAMS = 6  # of single tensors, those that changed most
_NEW_NAN, _NEW_INF = "new NaN", "new Inf"
MARKS = (
    Mark(_NEW_NAN, "NaN", "bad"),
    Mark(_NEW_INF, "Inf", "bad"),
    Mark("removed", "\N{MINUS SIGN}"),
    Mark("added", "+"),
    Mark("reshaped", "⊡"),
    Mark("renamed", "→"),
    Mark("retyped", "≈"),
    Mark("changed", "≠"),
)
_TENSOR_HEADS = ["level", "tensor", "what", "relative change", "largest change", "elements changed", "cosine"]
_CHANGE_COLUMNS = (
    *columns("level", "tensor", "what"),
    Column("relative change", "number"),
    Column("largest change"),
    Column("elements changed", "percent"),
    *columns("cosine", "sign flips", kind="number"),
    *columns("new NaN", "new Inf", "new dead rows", kind="number", flag=True),
)
_VALUE_COLUMNS = (
    *columns("tensor", "type in A", "type in B"),
    *columns("mean of A", "mean of B", "std of A", "std of B", "largest relative change", kind="number"),
)
_MAP_NOTE = """Relative change ‖B - A‖ / ‖A‖, with a row for each layer and a column for each kind of weight.
It is 0 if nothing changed, and infinite if all of A is zero."""
_TABLE_NOTE = "The most alarming tensors first. A is before, B is after."
_CONDITIONS_NOTE = "Conditions of --fail-if. The exit status is 1 if a tensor meets one."
_HISTOGRAMS_NOTE = "Changed elements by the absolute size of the change, in all tensors and in those that changed most."
_ANOTHER_CONVERSION = "conversion", "the graph that computes weights from a checkpoint changed"
Failures = Mapping[str, Sequence[str]]  # a condition -> the names of the tensors that meet it


def print_weights(diff: WeightsDiff, failures: Failures, most: int | None) -> None:
    """Print a summary, the `most` alarming changed tensors, and which tensors meet each condition.

    most: None prints all tensors, also unchanged ones.
    """
    print_facts(_weights_facts(diff, _verdict(diff)))
    print_facts(("note", notice) for notice in diff.notices)
    differing = [tensor for tensor in diff.tensors if tensor.level != "same"]
    shown = differing[:most] if most is not None else diff.tensors
    if shown:
        title = f"{len(shown)} of {len(diff.tensors)} tensors, the most alarming first"
        print_table(title, _TENSOR_HEADS, [_tensor_cells(tensor) for tensor in shown])
    if len(shown) < len(differing):
        say(f"{len(differing) - len(shown)} more differ; --all shows them")
    for condition, names in failures.items():
        print_facts([("failed", _failure(condition, names)) if names else ("passed", condition)])


def weights_report(diff: WeightsDiff, failures: Failures) -> Report:
    """Return a report: facts, conditions, a map and histograms of the changes, and tables of all tensors."""
    counts = ", ".join(f"{count} {status}" for status, count in diff.counts.items())
    facts = Facts(tuple(_weights_facts(diff, counts)))
    tables = (
        Table(_CHANGE_COLUMNS, tuple(map(_change_row, diff.tensors)), "What changed"),
        Table(_VALUE_COLUMNS, tuple(map(_value_row, diff.tensors)), "What they hold"),
    )
    sections = [Section("Overview", (facts, *(Note(notice, "bad") for notice in diff.notices)))]
    if failures:
        conditions = (
            Note(_failure(condition, names), "bad") if names else Note(f"{condition}: no tensor", "good")
            for condition, names in failures.items()
        )
        sections.append(Section("Conditions", tuple(conditions), _CONDITIONS_NOTE))
    sections.append(Section("Where the change is", (change_map(diff.tensors),), _MAP_NOTE))
    if histograms := tuple(_histograms(diff)):
        sections.append(Section("How large the changes are", histograms, _HISTOGRAMS_NOTE))
    sections.append(Section("Tensors", tables, _TABLE_NOTE))
    good = diff.level != "alarm" and not any(failures.values())
    subtitle = f"{diff.before.where} → {diff.after.where}"
    return Report("What changed in the weights", subtitle, tuple(sections), _verdict(diff), good)


def print_artifacts(diff: ArtifactsDiff) -> None:
    """Print the verdict and all differences."""
    for title, info in (("before", diff.before), ("after", diff.after)):
        print_facts([(title, f"{info.where}, graph id {info.graph_id[:12]}, torch {info.torch}")])
    print_facts([("verdict", diff.verdict), *(("misfit", problem) for problem in diff.misfits)])
    for method in diff.methods:
        _print_method(method)
    for title, _, heads, rows in _artifact_tables(diff):
        print_table(title, heads, rows)
    print_facts([_ANOTHER_CONVERSION] if diff.transforms_changed else [])
    print_facts(("engine", f"{engine}: {what}") for engine, what in diff.engines.items())


def artifacts_report(diff: ArtifactsDiff) -> Report:
    """Return a report with the verdict and all differences."""
    facts: list[tuple[str, str]] = []
    for title, info in (("before", diff.before), ("after", diff.after)):
        facts += [(title, info.where), ("graph id", info.graph_id), ("torch", info.torch)]
    facts += [(f"engine {engine}", what) for engine, what in diff.engines.items()]
    facts += [_ANOTHER_CONVERSION] if diff.transforms_changed else []
    sections = (
        Section("Overview", (Facts(tuple(facts)), *(Note(problem, "bad") for problem in diff.misfits))),
        *(Section(f"Method {method.name}", tuple(_method_blocks(method))) for method in diff.methods),
        *(
            Section(title, (Table(columns(*heads), tuple(map(tuple, rows))),))
            for _, title, heads, rows in _artifact_tables(diff)
        ),
    )
    subtitle = f"{diff.before.where} → {diff.after.where}"
    return Report("What changed in the artifact", subtitle, sections, diff.verdict, diff.fits)


# Weights in words.


def _weights_facts(diff: WeightsDiff, tensors: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of both sets and of the change. tensors: their numbers, in words."""
    yield from _set_facts("before", diff.before)
    yield from _set_facts("after", diff.after)
    yield "tensors", tensors
    yield "change", _overall(diff)


def _set_facts(title: str, info: SetInfo) -> Iterator[tuple[str, str]]:
    level = f", level {info.level}" if info.level else ""
    yield title, f"{info.where}{level} ({info.tensors} tensors, {human_bytes(info.nbytes)})"
    if info.weights_id:
        yield "weights id", info.weights_id
    yield from (("label", f"{label} = {text}") for label, text in info.labels.items())
    if info.ignored:
        yield "left out", ", ".join(info.ignored)


def _verdict(diff: WeightsDiff) -> str:
    """Return the number of tensors by level, as `1 alarm, 2 notices, 3 changed, 4 the same`."""
    counts = Counter(tensor.level for tensor in diff.tensors)
    words = {
        "alarm": plural(counts["alarm"], "alarm"),
        "notice": plural(counts["notice"], "notice"),
        "changed": f"{counts['changed']} changed",
        "same": f"{counts['same']} the same",
    }
    return ", ".join(words[level] for level in LEVELS if counts[level]) or "no tensors"


def _overall(diff: WeightsDiff) -> str:
    whole = diff.overall
    if not whole.tensors:
        return "no value changed"
    change = "infinite" if math.isinf(whole.rel_change) else f"{whole.rel_change:.3g}"
    share = percent(whole.changed / max(1, whole.elements))
    tensors = plural(whole.tensors, "tensor")
    return f"{change} (relative, of {tensors} with other values); {share} of the elements"


def _failure(condition: str, names: Sequence[str]) -> str:
    return f"{condition}: {listed(names, _MOST_NAMED)}"


def _largest_change(tensor: TensorDiff) -> str:
    """Return the largest change of an element, as `0.5 at [3, 128]`."""
    if tensor.change is None or tensor.change.largest is None:
        return ""
    largest = tensor.change.largest
    return f"{largest.change:.3g} at {list(largest.index)}" if largest.index else f"{largest.change:.3g}"


def _tensor_cells(tensor: TensorDiff) -> list[str]:
    """Return the cells of a tensor, in the order of _TENSOR_HEADS."""
    change = tensor.change
    return [
        tensor.level,
        tensor.name,
        "; ".join(tensor.reasons),
        f"{change.rel_change:.3g}" if change else "",
        _largest_change(tensor),
        percent(change.share_changed) if change else "",
        f"{change.cosine:.6f}" if change and change.cosine is not None else "",
    ]


def _change_row(tensor: TensorDiff) -> tuple[Cell, ...]:
    what = "; ".join(tensor.reasons) if tensor.level != "changed" else ""
    change = tensor.change
    if change is None:
        return tensor.level, tensor.name, what, None, "", *([None] * 6)
    counts = (change.sign_flips, change.new_nan, change.new_inf, change.new_dead_rows)
    shares = (change.share_changed, change.cosine)
    return tensor.level, tensor.name, what, change.rel_change, _largest_change(tensor), *shares, *counts


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


# The map of the change, and its histograms.


def change_map(tensors: Sequence[TensorDiff]) -> Block:
    """Return a map with a cell for each tensor, under its later name; or a note if there are none or too many."""
    cells = {tensor.name: _cell(tensor) for tensor in tensors}
    layers, kinds, names = grid(list(cells))
    if not cells:
        return Note("There are no tensors.")
    if len(layers) * len(kinds) > MOST_CELLS:
        return Note(f"{len(layers)} layers of {len(kinds)} kinds of weights are too many for a map.")
    values = tuple(tuple(cells[name] if name is not None else None for name in row) for row in names)
    return HeatMap(layers, kinds, values, "relative change", "", MARKS)


def _cell(tensor: TensorDiff) -> float | str:
    """Return the relative change; or a mark, if it became NaN or Inf, or if values were not compared."""
    change = tensor.change
    if change is None:
        return 0.0 if tensor.status == "same" else tensor.status
    if change.new_nan or change.new_inf:
        return _NEW_NAN if change.new_nan else _NEW_INF
    return change.rel_change


def grid(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str | None, ...], ...]]:
    """Arrange weights in a grid with a row for each layer: `encoder.layers.0`, column `attn.q.weight`.

    A layer's name ends with its first number. A weight outside numbered layers is in the row of its module. Returns the
    rows, the columns, and by row the weight in each cell, None for an empty cell.
    """
    positions = {name: _row_and_column(name) for name in sorted(names, key=natural)}
    rows = tuple(dict.fromkeys(row for row, _ in positions.values()))
    columns = tuple(dict.fromkeys(column for _, column in positions.values()))
    names_at = {position: name for name, position in positions.items()}
    return rows, columns, tuple(tuple(names_at.get((row, column)) for column in columns) for row in rows)


def _row_and_column(name: str) -> tuple[str, str]:
    path, own = split_name(name)
    numbered = next((index for index, part in enumerate(path) if part.isascii() and part.isdecimal()), None)
    if numbered is None:
        return ".".join(path) or "(model)", own
    return ".".join(path[: numbered + 1]), ".".join([*path[numbered + 1 :], own])


def _histograms(diff: WeightsDiff) -> Iterator[Histogram]:
    """Yield a histogram of all tensors, and of those that changed most."""
    compared = sorted((tensor for tensor in diff.tensors if tensor.change), key=lambda tensor: -tensor.rel_change)
    changed = [(tensor.name, tensor.change.histogram) for tensor in compared if tensor.change and tensor.change.changed]
    shown: list[tuple[str, Changes]] = [("All tensors", diff.overall.histogram), *changed[:_MOST_HISTOGRAMS]]
    if changed:
        for caption, changes in shown:
            yield Histogram(changes.edges, changes.counts, "absolute change", caption)


# Artifacts.


def _print_method(method: MethodDiff) -> None:
    if not method.same_signature:
        print_facts(_signatures(method))
    if not method.operators and not method.same_graph:
        print_facts([("method", f"{method.name}: the same operators, in another graph")])
    if rows := [[count.name, str(count.before), str(count.after)] for count in method.operators]:
        print_table(f"{method.name}: calls of operators", ["operator", "before", "after"], rows)


def _method_blocks(method: MethodDiff) -> Iterator[Block]:
    yield Note("The signature is the same.") if method.same_signature else Facts(_signatures(method))
    rows = tuple((count.name, count.before, count.after, count.after - count.before) for count in method.operators)
    if rows:
        heads = (Column("operator"), *columns("before", "after", "difference", kind="number"))
        yield Table(heads, rows, "Calls of operators")
    elif not method.same_graph:
        yield Note("The same operators, in another graph.")


def _signatures(method: MethodDiff) -> tuple[tuple[str, str], ...]:
    def text(signature: Signature | None) -> str:
        return signature_text(method.name, signature) if signature else f"no method {method.name}"

    return ("before", text(method.before)), ("after", text(method.after))


def _artifact_tables(diff: ArtifactsDiff) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Yield the tables that have rows: their titles on the terminal and on the page, columns, and rows."""
    rows = [[row.kind, row.name, str(row.before or "absent"), str(row.after or "absent")] for row in diff.rows]
    constants = [_tensor_cells(tensor) for tensor in diff.constants]
    sources = [
        [source.weight, _keys(source.before, source.computed_before), _keys(source.after, source.computed_after)]
        for source in diff.sources
    ]
    ranks = [[share.weight or "all", share.before, share.after] for share in diff.ranks]
    if rows:
        yield "tables", "Weights, state and constants", ["table", "name", "before", "after"], rows
    if constants:
        yield "constants and initial state", "Values of constants and initial state", _TENSOR_HEADS, constants
    if ranks:
        yield "ranks", "Ranks", ["weight", "before", "after"], ranks
    if sources:
        yield "checkpoints", "Checkpoints", ["weight", "came from", "comes from"], sources


def _keys(keys: tuple[str, ...] | None, computed: bool) -> str:
    if keys is None:
        return "absent"
    return f"computed from {', '.join(keys)}" if computed else " or ".join(keys)
