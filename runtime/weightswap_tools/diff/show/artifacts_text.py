"""The terminal output of a comparison of artifacts."""

from __future__ import annotations

from weightswap_runtime.format.signature import Signature
from weightswap_tools.diff import ArtifactsDiff
from weightswap_tools.diff.artifacts import MethodDiff, RowDiff, SourceDiff
from weightswap_tools.terminal import print_table, say
from weightswap_tools.wording import signature_text

from .weights_text import COLUMNS, tensor_cells


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
