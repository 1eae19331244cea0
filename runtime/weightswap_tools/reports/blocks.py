"""Blocks of a report. Commands compose these; `page` renders them.

Texts are plain: markup and control characters in them are escaped.
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
    """Names with values: `("weights id", "3f…")`."""

    rows: tuple[tuple[str, str], ...]


class Note(_BlockPart, frozen=True, tag="note"):
    """A paragraph; line breaks are kept. `kind` says whether it is good or bad news."""

    text: str
    kind: Literal["plain", "good", "bad"] = "plain"


class Column(_BlockPart, frozen=True):
    """A column of a table. kind: "bytes" are shown as `1.2 MB`, and sorted as numbers.

    flag: mark rows whose cell is true, nonzero or not empty, and offer to show only these.
    """

    name: str
    kind: ColumnKind = "text"
    flag: bool = False


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
    """A label for cells of a heat map without a number, such as "removed", and the sign to draw in them."""

    text: str
    sign: str
    kind: Literal["plain", "bad"] = "plain"


class HeatMap(_BlockPart, frozen=True, tag="heatmap"):
    """Coloured cells. `values[row][column]` is a number, the text of one of the marks, or None for no cell.

    what: a name for the values, with their unit. scale: of the colours, from the smallest to the largest finite value.
    Values off the scale have their own colour and sign in the legend: marks, values that are not finite, and with "log"
    zero and below.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | str | None, ...], ...]
    what: str
    scale: Scale
    caption: str = ""
    marks: tuple[Mark, ...] = ()


class Histogram(_BlockPart, frozen=True, tag="histogram"):
    """A histogram: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`; there is one more edge than counts.

    what: a name for the values, with their unit. scale: "linear" draws bins to scale, "log" equally wide.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    what: str
    scale: Scale
    caption: str = ""


class Axis(_BlockPart, frozen=True):
    """An axis: a name for its values, and their unit, empty for counts."""

    what: str
    unit: str = ""
    scale: Scale = "linear"


class Line(_BlockPart, frozen=True):
    """Joined points `(x, y)` by rising x. Lines of a `group` share a colour, lines of a `style` a dash pattern."""

    group: str
    points: tuple[tuple[float, float], ...]
    style: str = ""


class LinePlot(_BlockPart, frozen=True, tag="lines"):
    """Lines over one pair of axes. The reader can hide groups and styles.

    Points that are not finite, or not positive on a "log" axis, appear only in the table.
    """

    lines: tuple[Line, ...]
    x: Axis
    y: Axis
    caption: str = ""


class Span(_BlockPart, frozen=True):
    """An event from `start` to `end`, in seconds. Spans of a `kind` share a colour."""

    start: float
    end: float
    label: str
    kind: str


class Lane(_BlockPart, frozen=True):
    """A row of spans, such as those of a thread."""

    name: str
    spans: tuple[Span, ...]


class Timeline(_BlockPart, frozen=True, tag="timeline"):
    """Lanes over one axis of seconds."""

    lanes: tuple[Lane, ...]
    caption: str = ""


class TreemapNode(_BlockPart, frozen=True):
    """An area. `size` includes its children."""

    name: str
    size: int
    detail: str = ""
    children: tuple[TreemapNode, ...] = ()


class Treemap(_BlockPart, frozen=True, tag="treemap"):
    """Nested areas, entered one level at a time. what: a name for the sizes; "bytes" are shown as `1.2 MB`."""

    root: TreemapNode
    what: str
    caption: str = ""


class ModuleNode(_BlockPart, frozen=True):
    """A module of a graph. kind: its class. ops: operators with the number of calls, without those of its children.

    takes, gives: texts about its inputs and outputs.
    """

    name: str
    kind: str
    detail: str
    ops: tuple[tuple[str, int], ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    children: tuple[ModuleNode | ModuleRun, ...] = ()


class ModuleRun(_BlockPart, frozen=True):
    """Equal neighbours with consecutive numbers as names, shown as one entry that the reader can open."""

    modules: tuple[ModuleNode, ...]


class ModuleGraph(_BlockPart, frozen=True, tag="modules"):
    """A graph by module, as a searchable tree."""

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
    """A page. `verdict` is its result in a few words; `good` says whether that is good news; None for neither."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    verdict: str = ""
    good: bool | None = None
