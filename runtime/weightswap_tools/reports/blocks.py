"""Blocks that a report is made of. Commands compose these; `page` renders them.

Texts are plain: whatever they hold (markup, control characters) is shown as itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

Cell = str | int | float | bool | None
Scale = Literal["linear", "log"]
T = TypeVar("T")
ColumnKind = Literal["text", "number", "bytes"]


class _BlockPart(msgspec.Struct, frozen=True):
    pass


class Facts(_BlockPart, frozen=True, tag="facts"):
    """Names and what they are: `("weights id", "3f…")`."""

    rows: tuple[tuple[str, str], ...]


class Note(_BlockPart, frozen=True, tag="note"):
    """A paragraph; lines are kept. `kind` says whether it is good or bad news."""

    text: str
    kind: Literal["plain", "good", "bad"] = "plain"


class Column(_BlockPart, frozen=True):
    """A column of a table. kind: "bytes" are shown as `1.2 MB`, and sorted as numbers.

    flag: cells that are true, not zero or not empty deserve a look; their rows are marked, and can be asked for alone.
    """

    name: str
    kind: ColumnKind = "text"
    flag: bool = False


def columns(*names: str, kind: ColumnKind = "text", flag: bool = False) -> tuple[Column, ...]:
    """Columns that differ in their names alone."""
    return tuple(Column(name, kind, flag) for name in names)


class Table(_BlockPart, frozen=True, tag="table"):
    """Rows with one cell for each column. It can be sorted, and filtered where it has more than ten rows."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


def table_of(items: Iterable[T], columns: Sequence[tuple[Column, Callable[[T], Cell]]]) -> Table:
    """A row for each item, by what gives the cell of each column."""
    rows = tuple(tuple(cell(item) for _, cell in columns) for item in items)
    return Table(tuple(column for column, _ in columns), rows)


class Mark(_BlockPart, frozen=True):
    """What a cell of a heat map says that has no number, such as "removed", and the sign that is drawn in it."""

    text: str
    sign: str
    kind: Literal["plain", "bad"] = "plain"


class HeatMap(_BlockPart, frozen=True, tag="heatmap"):
    """Coloured cells: `values[row][column]`, the text of one of the marks, None where there is no cell.

    `what` the values are, with their unit. scale: of the colours, from the least finite value to the largest. What is
    not on it has a colour and a sign of its own, told in the legend: marks, values that are not finite, and with
    "log" zero and below.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | str | None, ...], ...]
    what: str
    scale: Scale
    caption: str = ""
    marks: tuple[Mark, ...] = ()


class Histogram(_BlockPart, frozen=True, tag="histogram"):
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`; there is one edge more than there are counts.

    `what` the values are, with their unit. scale: "linear" draws bins as wide as they are, "log" all equally wide.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    what: str
    scale: Scale
    caption: str = ""


class Axis(_BlockPart, frozen=True):
    """What runs along an axis, and its unit, which is empty for what is counted."""

    what: str
    unit: str = ""
    scale: Scale = "linear"


class Line(_BlockPart, frozen=True):
    """Points `(x, y)` that are joined, by rising x. Lines of a `group` have one colour, those of a `style` one dash."""

    group: str
    points: tuple[tuple[float, float], ...]
    style: str = ""


class LinePlot(_BlockPart, frozen=True, tag="lines"):
    """Lines over one pair of axes. Groups and styles can be hidden.

    A point that is not finite, or not positive along an axis with the scale "log", is in the table alone.
    """

    lines: tuple[Line, ...]
    x: Axis
    y: Axis
    caption: str = ""


class Span(_BlockPart, frozen=True):
    """What happened from `start` to `end`, in seconds. Spans of one `kind` have one colour."""

    start: float
    end: float
    label: str
    kind: str


class Lane(_BlockPart, frozen=True):
    """Spans one below the other, such as those of a thread."""

    name: str
    spans: tuple[Span, ...]


class Timeline(_BlockPart, frozen=True, tag="timeline"):
    """Lanes over one axis of seconds."""

    lanes: tuple[Lane, ...]
    caption: str = ""


class TreemapNode(_BlockPart, frozen=True):
    """An area. `size` is that of all that is in it, its children included."""

    name: str
    size: int
    detail: str = ""
    children: tuple[TreemapNode, ...] = ()


class Treemap(_BlockPart, frozen=True, tag="treemap"):
    """Nested areas that are zoomed one level at a time. `what` the sizes are: "bytes" are shown as `1.2 MB`."""

    root: TreemapNode
    what: str
    caption: str = ""


class ModuleNode(_BlockPart, frozen=True):
    """A module of a graph. kind: its class. ops: operator -> how often it is called in it, its children excluded.

    takes, gives: what goes in and comes out, in words.
    """

    name: str
    kind: str
    detail: str
    ops: tuple[tuple[str, int], ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    children: tuple[ModuleNode | ModuleRun, ...] = ()


class ModuleRun(_BlockPart, frozen=True):
    """Neighbours that are alike, with consecutive numbers for names: told as one entry, which can be opened."""

    modules: tuple[ModuleNode, ...]


class ModuleGraph(_BlockPart, frozen=True, tag="modules"):
    """A graph by module: a tree that can be searched."""

    root: ModuleNode
    caption: str = ""


ChartBlock = HeatMap | Histogram | LinePlot | Timeline | Treemap
Block = Facts | Note | Table | ModuleGraph | ChartBlock


class Section(_BlockPart, frozen=True):
    """A chapter of a report."""

    title: str
    blocks: tuple[Block, ...]
    note: str = ""


class Report(_BlockPart, frozen=True):
    """A page. `verdict` is its result in a few words; `good` says whether that is good news, None: neither."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    verdict: str = ""
    good: bool | None = None
