"""The HTML report of a comparison of artifacts."""

from __future__ import annotations

from collections.abc import Iterator

from weightswap_tools.diff import ArtifactsDiff
from weightswap_tools.diff.artifacts import MethodDiff
from weightswap_tools.reports.blocks import Block, Column, Facts, Note, Report, Section, Table, columns

from .artifacts_text import method_signature, row_cells, source_cells
from .weights_text import COLUMNS, tensor_cells


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
    sections = (overview, *methods, *_tables(diff))
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


def _tables(diff: ArtifactsDiff) -> Iterator[Section]:
    yield from _table("Weights, state and constants", ["table", "name", "before", "after"], map(row_cells, diff.rows))
    yield from _table("Values of constants and initial state", COLUMNS, map(tensor_cells, diff.constants))
    yield from _table("Checkpoints", ["weight", "came from", "comes from"], map(source_cells, diff.sources))


def _table(title: str, heads: list[str], rows: Iterator[list[str]]) -> Iterator[Section]:
    if cells := tuple(map(tuple, rows)):
        yield Section(title, (Table(columns(*heads), cells),))
