"""Charts: a block becomes an option of ECharts, with its numbers as a table.

Colours are variables of the style sheet, so that a chart follows the page when it turns dark or is printed. The library
passes them on to SVG unread; where a colour has to be computed, CSS does it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from weightswap_tools.tensor_set import natural

from .blocks import (
    Axis,
    ChartBlock,
    Column,
    HeatMap,
    Histogram,
    Line,
    LinePlot,
    Table,
    Treemap,
    TreemapNode,
    columns,
)
from .markup import cut_text, distinct_texts, markup, number_text, short_text, table_markup

__all__ = ["Chart", "chart_of"]
Option = dict[str, Any]
_HUES = 8  # categorical colours of the style sheet
_NO_LINES = {"splitLine": {"show": False}}
_ITEM = {"trigger": "item"}
_CORNERS = {"x": [0, 1], "y": [2, 3]}  # of a bar in a custom series: left, right, bottom, top


class Chart(NamedTuple):
    """A chart of a page."""

    label: str  # for screen readers
    height: int  # in pixels
    option: Option
    table: Table
    before: str = ""  # markup above the drawing
    after: str = ""  # markup below it
    widest: str = "none"  # a width of CSS
    root: Option | None = None  # of a treemap's areas

    def markup(self) -> str:
        """Return the box of the chart with the markup around it and the table."""
        size = f"height: {self.height}px; max-width: {self.widest}"
        box = f'<div class="chart" role="img" aria-label="{markup(self.label)}" style="{size}"></div>'
        numbers = f"<summary>The same as a table</summary>{table_markup(self.table)}"
        return f"{self.before}{box}{self.after}<details>{numbers}</details>"


def chart_of(block: ChartBlock) -> Chart:
    """Return the chart of a block."""
    match block:
        case HeatMap():
            return _heat_map(block)
        case Histogram():
            return _histogram(block)
        case LinePlot():
            return _line_plot(block)
        case Treemap():
            return _treemap(block)


def _hue(number: int) -> str:
    """Return a categorical colour by number from 0 on; colours repeat after _HUES."""
    return f"var(--hue-{number % _HUES + 1})"


def _moves(label: str, buttons: Mapping[str, tuple[float, float]]) -> str:
    """Return buttons that move the visible range, by a fraction of its width, and scale it."""
    markups = (
        f'<button type="button" class="button" data-shift="{shift}" data-scale="{scale}">{name}</button>'
        for name, (shift, scale) in buttons.items()
    )
    return f'<div class="moves" role="group" aria-label="{label}">{"".join(markups)}</div>'


# Histograms.


def _histogram(block: Histogram) -> Chart:
    """Return a chart with a bar for each bin."""
    bins = list(zip(block.edges, block.edges[1:], block.counts, strict=False))
    # a category for each edge: no axis of the library starts at 0 or infinity and has bars of equal width
    across = {"type": "category", "boundaryGap": False, "data": [short_text(edge, 3) for edge in block.edges]}
    bars = [
        {
            "value": [index, index + 1, 0, count],
            "told": [f"{number_text(low)} to {number_text(high)}", f"{count:,} value{'s' * (count != 1)}"],
        }
        for index, (low, high, count) in enumerate(bins)
    ]
    option = {
        "grid": {"left": 28, "right": 32, "top": 30, "bottom": 34, "containLabel": True},
        "tooltip": _ITEM,
        "xAxis": {**across, "name": block.what, "nameLocation": "middle", "nameGap": 30, **_NO_LINES},
        "yAxis": {"type": "value", "minInterval": 1, "name": "count"},
        "series": [{"type": "custom", "data": bars, "encode": _CORNERS, "itemStyle": {"color": _hue(0)}}],
    }
    table = Table(columns("from", "to", "count", kind="number"), tuple(bins))
    return Chart(block.caption or f"Histogram of {block.what}", 280, option, table)


# Lines. A group has a hue and a symbol, a style has a dash pattern. Buttons hide either, which the library's own legend
# cannot: it has a key for each line.

_SYMBOLS = {"circle": "●", "rect": "■", "triangle": "▲", "diamond": "◆"}  # and their characters
_GROUP_HUES = (0, 1, 2, 3, 6, 5, 4, 7)  # groups with the same symbol get hues that differ most
_DASHES = ("solid", "dashed", "dotted")
_MOST_TICKS = 12  # one for each x, up to this many
_Groups = dict[str, tuple[str, str]]  # name -> colour, symbol


def _line_plot(block: LinePlot) -> Chart:
    """Return a chart with lines over a pair of axes."""
    label = block.caption or f"{block.y.what} over {block.x.what}"
    heads = (Column("line"), *columns(_axis_label(block.x), _axis_label(block.y), kind="number"))
    rows = tuple((_line_name(line), x, y) for line in block.lines for x, y in line.points)
    symbols = list(_SYMBOLS)
    groups = {
        name: (_hue(_GROUP_HUES[index % len(_GROUP_HUES)]), symbols[index % len(symbols)])
        for index, name in enumerate(dict.fromkeys(line.group for line in block.lines))
    }
    styles = dict.fromkeys(line.style for line in block.lines)
    dashes = {name: _DASHES[index % len(_DASHES)] for index, name in enumerate(styles)}
    return Chart(
        label, 320, _lines_option(block, groups, dashes), Table(heads, rows), _keys(block, label, groups, dashes)
    )


def _keys(block: LinePlot, label: str, groups: _Groups, dashes: Mapping[str, str]) -> str:
    """Return buttons for each group and style, with the numbers of their lines."""
    keys = [
        (name, "group", f'class="mark" style="color: {colour}"', _SYMBOLS[symbol])
        for name, (colour, symbol) in groups.items()
    ]
    keys += [
        (name, "style", f'class="dash" style="border-top-style: {dash}"', "") for name, dash in dashes.items() if name
    ]
    buttons = []
    for name, kind, look, sign in keys:
        numbers = " ".join(str(index) for index, line in enumerate(block.lines) if getattr(line, kind) == name)
        mark = f'<span {look} aria-hidden="true">{sign}</span>'
        attributes = f'type="button" class="key" aria-pressed="true" data-lines="{numbers}"'
        buttons.append(f"<button {attributes}>{mark}{markup(name)}</button>")
    bar = f'<div class="keys" role="group" aria-label="Lines of: {markup(label)}">{"".join(buttons)}</div>'
    return bar if buttons else ""


def _lines_option(block: LinePlot, groups: _Groups, dashes: Mapping[str, str]) -> Option:
    points = [
        [(x, y) for x, y in line.points if _is_drawable(x, block.x) and _is_drawable(y, block.y)]
        for line in block.lines
    ]
    across, up = (sorted({point[side] for line in points for point in line}) for side in (0, 1))
    x_axis = _axis(block.x, across if len(across) <= _MOST_TICKS else [])
    y_axis = _axis(block.y, _log_ticks(up) if block.y.scale == "log" else [])
    return {
        "grid": {"left": 20, "right": 28, "top": 34, "bottom": 34, "containLabel": True},
        "tooltip": {"trigger": "axis"},
        "legend": {"show": False},
        "xAxis": {**x_axis, "nameLocation": "middle", "nameGap": 30},
        "yAxis": {**y_axis, "nameTextStyle": {"align": "left"}},
        "series": [
            {
                "type": "line",
                "name": str(index),
                "data": [{"value": point, "told": _point_texts(block, line, *point)} for point in drawable],
                "symbol": groups[line.group][1],
                "symbolSize": 8,
                "lineStyle": {"type": dashes[line.style], "width": 2},
                "itemStyle": {"color": groups[line.group][0]},
            }
            for index, (line, drawable) in enumerate(zip(block.lines, points, strict=True))
        ],
    }


def _is_drawable(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (axis.scale == "linear" or value > 0)


def _point_texts(block: LinePlot, line: Line, x: float, y: float) -> list[str]:
    return [f"{block.x.what}: {_with_unit(x, block.x)}", f"{_line_name(line)}: {_with_unit(y, block.y)}"]


def _line_name(line: Line) -> str:
    return ", ".join(filter(None, (line.group, line.style)))


def _axis_label(axis: Axis) -> str:
    return f"{axis.what} ({axis.unit})" if axis.unit else axis.what


def _with_unit(value: float, axis: Axis) -> str:
    return f"{number_text(value)} {axis.unit}" if axis.unit else number_text(value)


def _axis(axis: Axis, ticks: list[float]) -> Option:
    """Return an axis with these ticks and limits; with fewer than two, the library chooses both."""
    option = {"type": "log" if axis.scale == "log" else "value", "name": _axis_label(axis)}
    if len(ticks) < 2:
        return option
    values = {"customValues": ticks}
    return {**option, "axisLabel": values, "axisTick": values, "min": ticks[0], "max": ticks[-1]}


def _log_ticks(values: list[float]) -> list[float]:
    """Return round numbers that enclose rising values: 1, 2, 5, 10, or over a wide range powers of ten alone."""
    if not values:
        return []
    low, high = (math.floor(math.log10(value)) for value in (values[0], values[-1]))
    factors = (1,) if high + 1 - low > 3 else (1, 2, 5)
    stride = math.ceil((high + 1 - low) / _MOST_TICKS)
    steps = [float(f"{factor}e{ten}") for ten in range(low, high + 1 + stride, stride) for factor in factors]
    steps = [step for step in steps if 0 < step < math.inf]
    return steps[max(0, bisect_right(steps, values[0]) - 1) : bisect_left(steps, values[-1]) + 1]


# Treemaps. The page's own script enters areas: it shows two levels at a time, and a list for the keyboard.

_MOST_PARTS = 150  # of an area; more would be slivers
_TRAIL = '<nav aria-label="Path"><ol class="trail"></ol></nav><div class="zoom">'
_PARTS = '<nav class="side" aria-label="What is inside" tabindex="-1"><ul class="parts"></ul></nav></div>'
_TREEMAP_OPTION = {
    "tooltip": _ITEM,
    "series": [
        {
            "type": "treemap",
            "animation": False,  # areas and labels would fly across each other
            **dict.fromkeys(("left", "right", "top", "bottom"), 0),
            "roam": False,
            "nodeClick": False,
            "breadcrumb": {"show": False},
            "visibleMin": 60,
            "label": {"lineHeight": 16, "padding": [4, 3], "position": "insideTopLeft"},
            "upperLabel": {"show": True, "height": 22, "padding": [0, 3]},
            "levels": [
                {
                    "itemStyle": {"gapWidth": 3, "borderWidth": 0, "borderColor": "var(--surface)"},
                    "upperLabel": {"show": False},
                },
                {"itemStyle": {"gapWidth": 1, "borderWidth": 2}},
            ],
        }
    ],
}


def _treemap(block: Treemap) -> Chart:
    """Return a chart with two levels of areas, starting at the root."""
    heads = (Column("name"), Column(block.what, "bytes" if block.what == "bytes" else "number"), Column("detail"))
    label = block.caption or f"Areas of {block.what}"
    table = Table(heads, tuple(_leaves(block.root, "")))
    return Chart(label, 420, _TREEMAP_OPTION, table, _TRAIL, _PARTS, root=_area(block.root))


def _area(node: TreemapNode) -> Option:
    """Return a node with its children by falling size, then by name; the smallest of many are merged."""
    children = sorted(node.children, key=lambda child: (-child.size, natural(child.name)))
    if rest := children[_MOST_PARTS:]:
        size = sum(child.size for child in rest)
        children[_MOST_PARTS:] = [TreemapNode(f"{len(rest):,} more", size, "the smallest ones")]
    return {"name": node.name, "value": node.size, "detail": node.detail, "children": [*map(_area, children)]}


def _leaves(node: TreemapNode, path: str) -> Iterator[tuple[str, int, str]]:
    if not node.children:
        yield path or node.name, node.size, node.detail
    for child in node.children:
        yield from _leaves(child, f"{path}.{child.name}" if path else child.name)


# Heat maps. A cell holds the number of a piece of a piecewise map: first the steps of the scale, then a piece for each
# legend key. The library cannot mix the colours of a continuous scale itself, since it does not know what they are.

_ROWS = 200  # drawn at a time
_ROW_HEIGHT = 18  # pixels
_STEPS = 64  # of the colour scale
_STOPS = 5  # colours of the style sheet, between which the steps are mixed
_ROW_LETTERS = 40  # of a name
_COLUMN_LETTERS, _TILTED_LETTERS = 18, 27  # of a column's name, and of one that is tilted
_MOST_LEVEL_LABELS = 8  # columns; more have tilted labels
_MARK_HUES = (1, 2, 3, 5, 7)  # hues unlike those of the scale
_INFINITE = _hue(6)
_END = 1e9  # widths: far enough for the first and the last rows
_ROW_MOVES = {"First": (-_END, 1), "Previous": (-1, 1), "Next": (1, 1), "Last": (_END, 1)}
_Value = float | str | None
_Key = tuple[str, str, str]  # an entry of the legend: text, sign, colour


def _heat_map(block: HeatMap) -> Chart:
    """Return a chart with a coloured cell for each value."""
    scale = _Scale(block)
    heads = (Column("row"), *columns(*block.columns, kind="number"))
    rows = tuple((name, *map(_cell, row)) for name, row in zip(block.rows, block.values, strict=True))
    tilted = len(block.columns) > _MOST_LEVEL_LABELS
    paged = len(block.rows) > _ROWS
    return Chart(
        block.caption or f"Heat map of {block.what}",
        _ROW_HEIGHT * min(_ROWS, len(block.rows)) + (160 if tilted else 50),
        _heat_option(block, scale, tilted, paged),
        Table(heads, rows),
        _legend(block, scale),
        _moves("Rows of the heat map", _ROW_MOVES) if paged else "",
        f"{320 + 110 * len(block.columns)}px",
    )


def _cell(value: _Value) -> _Value:
    """Return the value that the table shows."""
    infinite = isinstance(value, float) and math.isinf(value)
    return value if not infinite else "infinite" if value == math.inf else "infinite, negative"


class _Scale:
    """The colour scale of a heat map: its ends, and by name the legend keys of values off the scale."""

    def __init__(self, block: HeatMap) -> None:
        present = {value for row in block.values for value in row if value is not None}
        plain = [value for value in present if not isinstance(value, str) and self._key_name(value) is None]
        self._ends = [min(plain), max(plain)] if plain else []
        names = {self._key_name(value) for value in present}
        below = any(not isinstance(value, str) and value < 0 for value in present)
        self.keys = {name: key for name, key in _possible_keys(block, below) if name in names}
        self._pieces = {name: _STEPS + 1 + index for index, name in enumerate(self.keys)}

    def _key_name(self, value: float | str) -> str | None:
        """Return the name of a value's legend key; None for a value on the scale."""
        if isinstance(value, str):
            return value
        if not math.isfinite(value):
            return str(value)
        return "0" if value <= 0 else None

    def piece(self, value: float | str) -> int:
        """Return the number of the piece that a value is in."""
        name = self._key_name(value)
        if name is not None:
            return self._pieces[name]
        low, high = map(math.log10, self._ends)
        return _STEPS // 2 if low == high else round((math.log10(float(value)) - low) / (high - low) * _STEPS)

    def ticks(self) -> list[str]:
        """Return labels for the ends and the middle of the scale: one if they are equal, none without values."""
        if len(set(self._ends)) < 2:
            return distinct_texts(self._ends[:1])
        middle = sum(map(math.log10, self._ends)) / 2
        return distinct_texts([self._ends[0], 10**middle, self._ends[1]])


def _possible_keys(block: HeatMap, below: bool) -> Iterator[tuple[str, _Key]]:
    """Yield all possible keys by name: the block's marks, zero, and values that are not finite."""
    plain = [mark for mark in block.marks if mark.kind == "plain"]
    for mark in block.marks:
        hue = "var(--bad)" if mark.kind == "bad" else _hue(_MARK_HUES[plain.index(mark) % len(_MARK_HUES)])
        yield mark.text, (mark.text, mark.sign, hue)
    yield "0", ("zero or less" if below else "zero", "0", "var(--raised)")
    yield "nan", ("NaN", "?", "var(--bad)")
    yield "inf", ("infinite", "∞", _INFINITE)
    yield "-inf", ("infinite, negative", "-∞", _INFINITE)


def _legend(block: HeatMap, scale: _Scale) -> str:
    ramp = ""
    if ticks := scale.ticks():
        texts = "".join(f'<span class="number">{text}</span>' for text in ticks)
        one = ' style="background: var(--heat-3)"' if len(ticks) == 1 else ""
        colours = f'<span class="colours"{one} aria-hidden="true"></span>'
        ramp = f'<span class="ramp">{colours}<span class="ticks">{texts}</span></span>'
    keys = (
        f'<span class="mark-key"><span class="swatch" aria-hidden="true" style="--fill: {colour}">'
        f"{markup(sign)}</span>{markup(text)}</span>"
        for text, sign, colour in scale.keys.values()
    )
    return f'<div class="legend"><span>{markup(block.what)}</span>{ramp}{"".join(keys)}</div>'


def _heat_option(block: HeatMap, scale: _Scale, tilted: bool, paged: bool) -> Option:
    letters = _TILTED_LETTERS if tilted else _COLUMN_LETTERS
    tilt = {"rotate": 45 if tilted else 0, "width": 200 if tilted else 140, "overflow": "truncate"}
    category = {"type": "category", "axisTick": {"show": False}, **_NO_LINES}
    names = [cut_text(name, _ROW_LETTERS) for name in block.rows]
    pieces: list[Option] = [{"value": step, "color": _step_colour(step)} for step in range(_STEPS + 1)]
    pieces += [
        {"value": index, "color": colour, "sign": sign}
        for index, (_, sign, colour) in enumerate(scale.keys.values(), start=len(pieces))
    ]
    data = [
        (column, row, scale.piece(value))
        for row, values in enumerate(block.values)
        for column, value in enumerate(values)
        if value is not None
    ]
    slider = {"type": "slider", "yAxisIndex": 0, "startValue": 0, "endValue": _ROWS - 1, "zoomLock": True, "width": 14}
    slider |= {"right": 2, "showDetail": False, "showDataShadow": False, "brushSelect": False}
    labels_within = {"outerBoundsMode": "same", "outerBoundsContain": "axisLabel"}
    return {
        "grid": {"left": 4, "right": 24 if paged else 16, "top": 8, "bottom": 4, **labels_within},
        "tooltip": _ITEM,
        "dataZoom": [slider] if paged else [],
        "xAxis": {**category, "data": [cut_text(name, letters) for name in block.columns], "axisLabel": tilt},
        "yAxis": {**category, "data": names, "inverse": True, "axisLabel": {"interval": 0}},
        "visualMap": {"type": "piecewise", "show": False, "dimension": 2, "pieces": pieces},
        "series": [
            {
                "type": "heatmap",
                "data": data,
                "itemStyle": {"borderWidth": 1, "borderColor": "var(--surface)"},
                "labelLayout": {"hideOverlap": True},
            }
        ],
    }


def _step_colour(step: int) -> str:
    """Return the colour of a step: one of the style sheet, or a mixture of two."""
    stop, part = divmod(step * (_STOPS - 1) / _STEPS, 1)
    near = f"var(--heat-{int(stop) + 1})"
    return f"color-mix(in srgb, {near}, var(--heat-{int(stop) + 2}) {part:.0%})" if part else near
