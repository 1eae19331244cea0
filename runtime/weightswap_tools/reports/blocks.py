"""Blocks of a report. Commands compose these; `page` renders them.

Texts are plain: markup and control characters in them are escaped when the page is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

Cell = str | int | float | bool | None
Scale = Literal["linear", "log"]
T = TypeVar("T")
ColumnKind = Literal["text", "number", "bytes", "percent"]


class _BlockPart(msgspec.Struct, frozen=True):
    pass


class Facts(_BlockPart, frozen=True, tag="facts"):
    """Names with values: `("weights id", "3f…")`."""

    rows: tuple[tuple[str, str], ...]


class Note(_BlockPart, frozen=True, tag="note"):
    """A paragraph; line breaks are kept."""

    text: str
    kind: Literal["plain", "good", "bad"] = "plain"  # whether it is good or bad news


class Column(_BlockPart, frozen=True):
    """A column of a table."""

    name: str
    kind: ColumnKind = "text"  # "bytes" are shown as `1.2 MB`, "percent" as `40 %`; sorted as numbers
    flag: bool = False  # mark rows whose cell is true, nonzero or not empty, and offer to show only these


def columns(*names: str, kind: ColumnKind = "text", flag: bool = False) -> tuple[Column, ...]:
    """Return columns that differ only in their names."""
    return tuple(Column(name, kind, flag) for name in names)


class Table(_BlockPart, frozen=True, tag="table"):
    """Rows with one cell for each column. The reader can sort a table, and filter one of more than ten rows."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


def table_of(items: Iterable[T], columns: Sequence[tuple[Column, Callable[[T], Cell]]]) -> Table:
    """Return a table with a row for each item. Each column comes with the function that gives its cells."""
    rows = tuple(tuple(cell(item) for _, cell in columns) for item in items)
    return Table(tuple(column for column, _ in columns), rows)


class Mark(_BlockPart, frozen=True):
    """A label for cells of a heat map without a number, such as "removed"."""

    text: str
    sign: str  # drawn in the cells
    kind: Literal["plain", "bad"] = "plain"


class HeatMap(_BlockPart, frozen=True, tag="heatmap"):
    """Coloured cells, on a logarithmic scale from the smallest to the largest finite value.

    Values off the scale have their own colour and sign in the legend: marks, zero and below, and what is not finite.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | str | None, ...], ...]  # by row: a number, the text of a mark, or None for no cell
    what: str  # a name for the values, with their unit
    caption: str = ""
    marks: tuple[Mark, ...] = ()


class Histogram(_BlockPart, frozen=True, tag="histogram"):
    """A histogram with bars of equal width: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]
    what: str  # a name for the values, with their unit
    caption: str = ""


class Axis(_BlockPart, frozen=True):
    """An axis of numbers."""

    what: str  # a name for them
    unit: str = ""  # empty for counts
    scale: Scale = "linear"


class Line(_BlockPart, frozen=True):
    """Joined points."""

    group: str  # lines of a group share a colour
    points: tuple[tuple[float, float], ...]  # (x, y) by rising x
    style: str = ""  # lines of a style share a dash pattern


class LinePlot(_BlockPart, frozen=True, tag="lines"):
    """Lines over one pair of axes. The reader can hide groups and styles.

    Points that are not finite, or not positive on a "log" axis, appear only in the table.
    """

    lines: tuple[Line, ...]
    x: Axis
    y: Axis
    caption: str = ""


class TreemapNode(_BlockPart, frozen=True):
    """An area."""

    name: str
    size: int  # with that of its children
    detail: str = ""
    children: tuple[TreemapNode, ...] = ()


class Treemap(_BlockPart, frozen=True, tag="treemap"):
    """Nested areas, entered one level at a time."""

    root: TreemapNode
    what: str  # a name for the sizes; "bytes" are shown as `1.2 MB`
    caption: str = ""


class ModuleNode(_BlockPart, frozen=True):
    """A module of a graph."""

    name: str
    kind: str  # its class
    detail: str
    ops: tuple[tuple[str, int], ...]  # operators with the number of calls, without those of its children
    takes: tuple[str, ...]  # texts about its inputs
    gives: tuple[str, ...]  # and about its outputs
    children: tuple[ModuleNode | ModuleRun, ...] = ()


class ModuleRun(_BlockPart, frozen=True):
    """Equal neighbours with consecutive numbers as names, shown as one entry that the reader can open."""

    modules: tuple[ModuleNode, ...]


class ModuleGraph(_BlockPart, frozen=True, tag="modules"):
    """A graph by module, as a searchable tree."""

    root: ModuleNode
    caption: str = ""


ChartBlock = HeatMap | Histogram | LinePlot | Treemap
Block = Facts | Note | Table | ModuleGraph | ChartBlock


class Section(_BlockPart, frozen=True):
    """A chapter of a report."""

    title: str
    blocks: tuple[Block, ...]
    note: str = ""


class Report(_BlockPart, frozen=True):
    """A page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    verdict: str = ""  # the result in a few words
    good: bool | None = None  # whether that is good news; None for neither
