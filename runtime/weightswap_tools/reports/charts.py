"""Charts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
    Span,
    Table,
    Timeline,
    Treemap,
    TreemapNode,
    columns,
)
from .markup import cut_text, distinct_texts, markup, number_text, seconds_text, short_text, table_markup, time_unit

Option = dict[str, Any]
HUES = 8
NO_LINES = {"splitLine": {"show": False}}


class Chart(NamedTuple):
    """A chart. label: for screen readers. before, after: markup around it. root: of a treemap's areas."""

    label: str
    height: int
    option: Option
    table: Table
    before: str = ""
    after: str = ""
    widest: str = "none"
    root: Option | None = None

    def markup(self) -> str:
        """Return the box of the chart with the markup around it and the table."""
        size = f"height: {self.height}px; max-width: {self.widest}"
        box = f'<div class="chart" role="img" aria-label="{markup(self.label)}" style="{size}"></div>'
        numbers = f"<summary>The same as a table</summary>{table_markup(self.table)}"
        return f"{self.before}{box}{self.after}<details>{numbers}</details>"


def hue(number: int) -> str:
    """Return a categorical colour by number from 0 on; colours repeat after HUES."""
    return f"var(--hue-{number % HUES + 1})"


def moves(label: str, buttons: Mapping[str, tuple[float, float]]) -> str:
    """Return buttons that move the visible range, by a fraction of its width, and scale it."""
    markups = (
        f'<button type="button" class="button" data-shift="{shift}" data-scale="{scale}">{name}</button>'
        for name, (shift, scale) in buttons.items()
    )
    return f'<div class="moves" role="group" aria-label="{label}">{"".join(markups)}</div>'


def histogram(block: Histogram) -> Chart:
    """Return a chart with a bar for each bin."""
    bins = list(zip(block.edges, block.edges[1:], block.counts, strict=False))
    equal = block.scale == "log" or not all(map(math.isfinite, block.edges))
    bars = [
        {
            "value": [*((index, index + 1) if equal else (low, high)), 0, count],
            "told": [f"{number_text(low)} to {number_text(high)}", f"{count:,} value{'s' * (count != 1)}"],
        }
        for index, (low, high, count) in enumerate(bins)
    ]
    option = {
        "grid": {"left": 28, "right": 32, "top": 30, "bottom": 34, "containLabel": True},
        "tooltip": {"trigger": "item"},
        "xAxis": {**_across(block, equal), "name": block.what, "nameLocation": "middle", "nameGap": 30, **NO_LINES},
        "yAxis": {"type": "value", "minInterval": 1, "name": "count"},
        "series": [
            {"type": "custom", "data": bars, "encode": {"x": [0, 1], "y": [2, 3]}, "itemStyle": {"color": hue(0)}}
        ],
    }
    table = Table(columns("from", "to", "count", kind="number"), tuple(bins))
    return Chart(block.caption or f"Histogram of {block.what}", 280, option, table)


def _across(block: Histogram, equal: bool) -> Option:
    if equal:
        return {"type": "category", "boundaryGap": False, "data": [short_text(edge, 3) for edge in block.edges]}
    return {"type": "value", "min": block.edges[0], "max": block.edges[-1]}


SYMBOLS = {"circle": "●", "rect": "■", "triangle": "▲", "diamond": "◆"}  # and their characters
_GROUP_HUES = (0, 1, 2, 3, 6, 5, 4, 7)  # groups with the same symbol get hues that differ most
DASHES = ("solid", "dashed", "dotted")
MOST_TICKS = 12  # one for each x, up to this many
Points = list[tuple[float, float]]


def lines(block: LinePlot) -> Chart:
    """Return a chart with lines over a pair of axes."""
    label = block.caption or f"{block.y.what} over {block.x.what}"
    heads = (Column("line"), *columns(_axis_label(block.x), _axis_label(block.y), kind="number"))
    rows = tuple((_name(line), x, y) for line in block.lines for x, y in line.points)
    return Chart(label, 320, _option(block), Table(heads, rows), _keys(block, label))


def _groups_and_styles(block: LinePlot) -> tuple[list[str], list[str]]:
    """Return the groups and the styles, in the order of their first lines."""
    groups = dict.fromkeys(line.group for line in block.lines)
    return list(groups), list(dict.fromkeys(line.style for line in block.lines))


def _keys(block: LinePlot, label: str) -> str:
    """Return buttons for each group and style, with the numbers of their lines."""
    groups, styles = _groups_and_styles(block)
    symbols = list(SYMBOLS.values())
    keys = [
        (name, f'class="mark" style="color: {_colour(index)}"', symbols[index % len(symbols)], "group")
        for index, name in enumerate(groups)
    ]
    keys += [
        (name, f'class="dash" style="border-top-style: {_dash(index)}"', "", "style")
        for index, name in enumerate(styles)
        if name
    ]
    buttons = []
    for name, look, sign, kind in keys:
        numbers = " ".join(str(index) for index, line in enumerate(block.lines) if getattr(line, kind) == name)
        mark = f'<span {look} aria-hidden="true">{sign}</span>'
        attributes = f'type="button" class="key" aria-pressed="true" data-lines="{numbers}"'
        buttons.append(f"<button {attributes}>{mark}{markup(name)}</button>")
    bar = f'<div class="keys" role="group" aria-label="Lines of: {markup(label)}">{"".join(buttons)}</div>'
    return bar if buttons else ""


def _option(block: LinePlot) -> Option:
    groups, styles = _groups_and_styles(block)
    points = [_drawable(line.points, block) for line in block.lines]
    across, up = (sorted({point[side] for line in points for point in line}) for side in (0, 1))
    return {
        "grid": {"left": 20, "right": 28, "top": 34, "bottom": 34, "containLabel": True},
        "tooltip": {"trigger": "axis"},
        "legend": {"show": False},
        "xAxis": {
            **_axis(block.x, across if len(across) <= MOST_TICKS else []),
            "nameLocation": "middle",
            "nameGap": 30,
        },
        "yAxis": {**_axis(block.y, _steps(up) if block.y.scale == "log" else []), "nameTextStyle": {"align": "left"}},
        "series": [
            {
                "type": "line",
                "name": str(index),
                "data": [{"value": point, "told": _tooltip(block, line, *point)} for point in drawable],
                "symbol": list(SYMBOLS)[groups.index(line.group) % len(SYMBOLS)],
                "symbolSize": 8,
                "lineStyle": {"type": _dash(styles.index(line.style)), "width": 2},
                "itemStyle": {"color": _colour(groups.index(line.group))},
            }
            for index, (line, drawable) in enumerate(zip(block.lines, points, strict=True))
        ],
    }


def _tooltip(block: LinePlot, line: Line, x: float, y: float) -> list[str]:
    return [f"{block.x.what}: {_with_unit(x, block.x)}", f"{_name(line)}: {_with_unit(y, block.y)}"]


def _colour(group: int) -> str:
    return hue(_GROUP_HUES[group % len(_GROUP_HUES)])


def _dash(style: int) -> str:
    return DASHES[style % len(DASHES)]


def _name(line: Line) -> str:
    return ", ".join(filter(None, (line.group, line.style)))


def _axis_label(axis: Axis) -> str:
    return f"{axis.what} ({axis.unit})" if axis.unit else axis.what


def _with_unit(value: float, axis: Axis) -> str:
    return f"{number_text(value)} {axis.unit}" if axis.unit else number_text(value)


def _drawable(points: Sequence[tuple[float, float]], block: LinePlot) -> Points:
    """Return the points that both axes can show."""

    def placed(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (axis.scale == "linear" or value > 0)

    return [(x, y) for x, y in points if placed(x, block.x) and placed(y, block.y)]


def _axis(axis: Axis, ticks: list[float]) -> Option:
    """Return an axis with these ticks and limits; without ticks, the library chooses both."""
    option = {"type": "log" if axis.scale == "log" else "value", "name": _axis_label(axis)}
    if len(ticks) < 2:
        return option
    values = {"customValues": ticks}
    return {**option, "axisLabel": values, "axisTick": values, "min": ticks[0], "max": ticks[-1]}


def _steps(values: list[float]) -> list[float]:
    """Return round numbers that enclose rising values, for a logarithmic axis; fewer if the range is wide."""
    if not values:
        return []
    low, high = (math.floor(math.log10(value)) for value in (values[0], values[-1]))
    factors = (1,) if high + 1 - low > 3 else (1, 2, 5)
    stride = math.ceil((high + 1 - low) / MOST_TICKS)
    steps = [float(f"{factor}e{ten}") for ten in range(low, high + 1 + stride, stride) for factor in factors]
    steps = [step for step in steps if 0 < step < math.inf]
    return steps[max(0, bisect_right(steps, values[0]) - 1) : bisect_left(steps, values[-1]) + 1]


LANE_HEIGHT = 44
BAR = 0.46  # of a lane's height
MOST_UNZOOMED = 12  # spans
_MOVES = {"Earlier": (-0.5, 1), "Later": (0.5, 1), "Zoom in": (0, 0.5), "Zoom out": (0, 2)}
_BETWEEN = {"type": "value", "inverse": True, "show": False, "axisLabel": {"show": False}, "min": 0}
_COLUMNS = (
    *columns("lane", "label", "kind"),
    *columns("start (s)", "end (s)", "seconds", kind="number"),
)


def timeline(block: Timeline) -> Chart:
    """Return a chart with bars in lanes, which can be zoomed if there are many."""
    spans = [(row, span) for row, lane in enumerate(block.lanes) for span in lane.spans]
    rows = (
        (block.lanes[row].name, span.label, span.kind, span.start, span.end, span.end - span.start)
        for row, span in spans
    )
    zoomed = len(spans) > MOST_UNZOOMED
    return Chart(
        block.caption or "Timeline",
        LANE_HEIGHT * len(block.lanes) + (120 if zoomed else 84),
        _timeline_option([lane.name for lane in block.lanes], spans, zoomed),
        Table(_COLUMNS, tuple(rows)),
        after=moves("Part of the time", _MOVES) if zoomed else "",
    )


def _timeline_option(lanes: list[str], spans: list[tuple[int, Span]], zoomed: bool) -> Option:
    factor, unit = time_unit(max((abs(span.end) for _, span in spans), default=0.0))
    kinds = list(dict.fromkeys(span.kind for _, span in spans))
    return {
        "grid": {"left": 16, "right": 32, "top": 8, "bottom": 84 if zoomed else 48, "containLabel": True},
        "tooltip": {"trigger": "item"},
        "legend": {"bottom": 36 if zoomed else 4, "data": kinds, "type": "scroll", "selectedMode": False},
        "dataZoom": [{"type": "slider", "filterMode": "weakFilter", "bottom": 10, "height": 20, "showDetail": False}]
        if zoomed
        else [],
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "axisLabel": {"formatter": f"{{value}} {unit}", "showMaxLabel": False},
        },
        "yAxis": [
            {
                "type": "category",
                "inverse": True,
                "data": lanes,
                "splitLine": {"show": True},
                "axisLabel": {"width": 160, "overflow": "truncate", "interval": 0},
            },
            {**_BETWEEN, "max": len(lanes)},
        ],
        "series": [_series(kind, number, spans, factor) for number, kind in enumerate(kinds)],
    }


def _series(kind: str, number: int, spans: list[tuple[int, Span]], factor: float) -> Option:
    data = [_bar(row, span, factor) for row, span in spans if span.kind == kind]
    encode = {"x": [0, 1], "y": [2, 3]}
    look = {"color": hue(number)}
    return {"type": "custom", "name": kind, "yAxisIndex": 1, "data": data, "encode": encode, "itemStyle": look}


def _bar(row: int, span: Span, factor: float) -> Option:
    tooltip = [
        span.label,
        span.kind,
        f"{seconds_text(span.start)} to {seconds_text(span.end)}",
        f"lasts {seconds_text(span.end - span.start)}",
    ]
    middle = row + 0.5
    corners = [span.start * factor, span.end * factor, middle + BAR / 2, middle - BAR / 2]
    return {"value": corners, "label": span.label, "told": tooltip}


MOST_PARTS = 150
HEIGHT = 420
_PATH = '<nav aria-label="Path"><ol class="trail"></ol></nav><div class="zoom">'
_LIST = '<nav class="side" aria-label="What is inside" tabindex="-1"><ul class="parts"></ul></nav></div>'
_OPTION = {
    "tooltip": {"trigger": "item"},
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


def treemap(block: Treemap) -> Chart:
    """Return a chart with two levels of areas, starting at the root."""
    columns = (Column("name"), Column(block.what, "bytes" if block.what == "bytes" else "number"), Column("detail"))
    label = block.caption or f"Areas of {block.what}"
    table = Table(columns, tuple(_leaves(block.root, "")))
    return Chart(label, HEIGHT, _OPTION, table, _PATH, _LIST, root=_area(block.root))


def _area(node: TreemapNode) -> Option:
    """Return a node with its children by falling size, then by name; the smallest of many are merged."""
    children = sorted(node.children, key=lambda child: (-child.size, natural(child.name)))
    if rest := children[MOST_PARTS:]:
        size = sum(child.size for child in rest)
        children[MOST_PARTS:] = [TreemapNode(f"{len(rest):,} more", size, "the smallest ones")]
    return {"name": node.name, "value": node.size, "detail": node.detail, "children": [*map(_area, children)]}


def _leaves(node: TreemapNode, path: str) -> Iterator[tuple[str, int, str]]:
    if not node.children:
        yield path or node.name, node.size, node.detail
    for child in node.children:
        yield from _leaves(child, f"{path}.{child.name}" if path else child.name)


ROWS = 200  # drawn at a time
ROW_HEIGHT = 18
SHADES = 64  # steps of the colour scale
STOPS = 5  # colours of the style sheet, between which the steps are mixed
LETTERS = 40  # of a row's name
MOST_LEVEL_LABELS = 8
COLUMN_LETTERS, TILTED_LETTERS = 18, 27
MOST_SIGNED = 4000  # cells
MARK_HUES = (1, 2, 3, 5, 7)  # hues unlike those of the scale
INFINITE = hue(6)
END = 1e9
_ROW_MOVES = {"First": (-END, 1), "Previous": (-1, 1), "Next": (1, 1), "Last": (END, 1)}
Value = float | str | None


class _Key(NamedTuple):
    """A legend entry for cells off the colour scale."""

    text: str
    sign: str
    colour: str


def heatmap(block: HeatMap) -> Chart:
    """Return a chart with a coloured cell for each value."""
    scale = _Scale(block)
    heads = (Column("row"), *columns(*block.columns, kind="number"))
    rows = tuple((name, *map(_cell, row)) for name, row in zip(block.rows, block.values, strict=True))
    tilted = len(block.columns) > MOST_LEVEL_LABELS
    paged = len(block.rows) > ROWS
    return Chart(
        block.caption or f"Heat map of {block.what}",
        ROW_HEIGHT * min(ROWS, len(block.rows)) + (160 if tilted else 50),
        _map_option(block, scale, tilted, paged),
        Table(heads, rows),
        _legend(block, scale),
        moves("Rows of the heat map", _ROW_MOVES) if paged else "",
        f"{320 + 110 * len(block.columns)}px",
    )


def _cell(value: Value) -> Value:
    """Return the value that the table shows."""
    infinite = isinstance(value, float) and math.isinf(value)
    return value if not infinite else "infinite" if value == math.inf else "infinite, negative"


class _Scale:
    """The colour scale of a heat map, and the legend keys of values off the scale."""

    def __init__(self, block: HeatMap) -> None:
        self.log = block.scale == "log"
        present = {value for row in block.values for value in row if value is not None}
        plain = [value for value in present if self.key(value) is None and not isinstance(value, str)]
        self.ends = [min(plain), max(plain)] if plain else []
        names = {self.key(value) for value in present}
        below = any(not isinstance(value, str) and value < 0 for value in present)
        self.keys = {name: key for name, key in _map_keys(block, below) if name in names}

    def key(self, value: float | str) -> str | None:
        """Return the name of a value's legend key; None for a value on the scale."""
        if isinstance(value, str):
            return value
        if not math.isfinite(value):
            return str(value)
        return "0" if self.log and value <= 0 else None

    def scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def shade(self, value: float) -> int:
        """Return the step of the colour scale, from 0 on."""
        low, high = (self.scaled(end) / 2 for end in self.ends)  # halves, as the difference may overflow
        if low == high:
            return SHADES // 2
        return round((self.scaled(value) / 2 - low) / (high - low) * SHADES)

    def ticks(self) -> list[str]:
        """Return labels for the ends and the middle of the scale: one if they are equal, none without values."""
        if len(set(self.ends)) < 2:
            return distinct_texts(self.ends[:1])
        low, high = (self.scaled(end) / 2 for end in self.ends)
        return distinct_texts([self.ends[0], 10 ** (low + high) if self.log else low + high, self.ends[1]])


def _map_keys(block: HeatMap, below: bool) -> Iterator[tuple[str, _Key]]:
    """Yield all possible keys by name: the block's marks, zero, and values that are not finite."""
    plain = [mark for mark in block.marks if mark.kind == "plain"]
    for mark in block.marks:
        bad = mark.kind == "bad"
        colour = "var(--bad)" if bad else hue(MARK_HUES[plain.index(mark) % len(MARK_HUES)])
        yield mark.text, _Key(mark.text, mark.sign, colour)
    yield "0", _Key("zero or less" if below else "zero", "0", "var(--raised)")
    yield "nan", _Key("NaN", "?", "var(--bad)")
    yield "inf", _Key("infinite", "∞", INFINITE)
    yield "-inf", _Key("infinite, negative", "-∞", INFINITE)


def _legend(block: HeatMap, scale: _Scale) -> str:
    ramp = ""
    if ticks := scale.ticks():
        texts = "".join(f'<span class="number">{text}</span>' for text in ticks)
        one = ' style="background: var(--heat-3)"' if len(ticks) == 1 else ""
        colours = f'<span class="colours"{one} aria-hidden="true"></span>'
        ramp = f'<span class="ramp">{colours}<span class="ticks">{texts}</span></span>'
    keys = (
        f'<span class="mark-key"><span class="swatch" aria-hidden="true" style="--fill: {key.colour}">'
        f"{markup(key.sign)}</span>{markup(key.text)}</span>"
        for key in scale.keys.values()
    )
    return f'<div class="legend"><span>{markup(block.what)}</span>{ramp}{"".join(keys)}</div>'


def _map_option(block: HeatMap, scale: _Scale, tilted: bool, paged: bool) -> Option:
    letters = TILTED_LETTERS if tilted else COLUMN_LETTERS
    category = {"type": "category", "axisTick": {"show": False}, **NO_LINES}
    pieces = [_shade(step) for step in range(SHADES + 1)] + [key.colour for key in scale.keys.values()]
    rows = {"type": "slider", "yAxisIndex": 0, "startValue": 0, "endValue": ROWS - 1, "zoomLock": True, "width": 14}
    look = {"right": 2, "showDetail": False, "showDataShadow": False, "brushSelect": False}
    return {
        "grid": {
            "left": 4,
            "right": 24 if paged else 16,
            "top": 8,
            "bottom": 4,
            "outerBoundsMode": "same",
            "outerBoundsContain": "axisLabel",
        },
        "tooltip": {"trigger": "item"},
        "dataZoom": [{**rows, **look}] if paged else [],
        "xAxis": {
            **category,
            "data": [cut_text(name, letters) for name in block.columns],
            "axisLabel": {"rotate": 45 if tilted else 0, "width": 200 if tilted else 140, "overflow": "truncate"},
        },
        "yAxis": {
            **category,
            "data": [cut_text(name, LETTERS) for name in block.rows],
            "inverse": True,
            "axisLabel": {"interval": 0},
        },
        "visualMap": {
            "type": "piecewise",
            "show": False,
            "dimension": 2,
            "pieces": [{"value": index, "color": colour} for index, colour in enumerate(pieces)],
        },
        "series": [
            {
                "type": "heatmap",
                "data": list(_cells(block, scale)),
                "itemStyle": {"borderWidth": 1, "borderColor": "var(--surface)"},
                "labelLayout": {"hideOverlap": True},
            }
        ],
    }


def _shade(step: int) -> str:
    """Return the colour of a step: one of the style sheet, or a mixture of two."""
    stop, part = divmod(step * (STOPS - 1) / SHADES, 1)
    near = f"var(--heat-{int(stop) + 1})"
    return f"color-mix(in srgb, {near}, var(--heat-{int(stop) + 2}) {part:.0%})" if part else near


def _cells(block: HeatMap, scale: _Scale) -> Iterator[list[int] | Option]:
    """Yield column, row and colour number of each cell; cells off the scale have their sign, too."""
    signed = len(block.rows) * len(block.columns) <= MOST_SIGNED
    numbers = {name: SHADES + 1 + index for index, name in enumerate(scale.keys)}
    cells = ((row, column) for row in range(len(block.rows)) for column in range(len(block.columns)))
    for row, column in cells:
        value = block.values[row][column]
        if value is None:
            continue
        name = scale.key(value)
        if name is None:
            yield [column, row, scale.shade(float(value))]
        elif signed:
            yield {"value": [column, row, numbers[name]], "sign": scale.keys[name].sign}
        else:
            yield [column, row, numbers[name]]


__all__ = ["Chart", "chart_of"]


def chart_of(block: ChartBlock) -> Chart:
    """Return the chart of a block."""
    match block:
        case HeatMap():
            return heatmap(block)
        case Histogram():
            return histogram(block)
        case LinePlot():
            return lines(block)
        case Timeline():
            return timeline(block)
        case Treemap():
            return treemap(block)
