"""The terminal output of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from weightswap_tools.bench import BenchReport
from weightswap_tools.reports.blocks import Cell, Column
from weightswap_tools.terminal import human_bytes, print_table, say

from .rows import CALLS, MEMORY, SWAPS, Row, call_rows, memory_rows, swap_rows


def print_bench(report: BenchReport) -> None:
    """Print tables of calls, swaps and memory, and what was not measured."""
    say(f"artifact    {report.artifact}, graph id {report.graph_id[:12]}")
    say(f"weights     {report.weights}, weights id {report.weights_id[:12] or 'unknown'}")
    say(f"machine     {report.machine}")
    _table(f"calls of {report.method}", CALLS, call_rows(report.engines))
    _table("swaps of the same file (medians)", SWAPS, swap_rows(report.engines))
    _table("resident memory", MEMORY, memory_rows(report.engines))
    for engine, reason in report.left_out.items():
        say(f"left out    {engine}: {reason}")
    for result in report.engines:
        if result.failed:
            say(f"failed      {result.engine}, {result.residency}: {result.failed}")


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    if rows:
        cells = [[_text(cell, column) for cell, column in zip(row, columns, strict=True)] for row in rows]
        print_table(title, [column.name for column in columns], cells)


def _text(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    return human_bytes(int(cell)) if column.kind == "bytes" else str(cell)
