"""Line plots: a colour and a symbol for each group, a dash pattern for each style, and buttons to hide both."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from weightswap_tools.reports.blocks import Axis, Column, Line, LinePlot, Table, columns
from weightswap_tools.reports.embedding import markup
from weightswap_tools.reports.texts import number_text

from .chart import Chart, Option, hue

SYMBOLS = {"circle": "●", "rect": "■", "triangle": "▲", "diamond": "◆"}  # and their characters
HUES = (0, 1, 2, 3, 6, 5, 4, 7)  # groups with the same symbol get hues that differ most
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
    return hue(HUES[group % len(HUES)])


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
