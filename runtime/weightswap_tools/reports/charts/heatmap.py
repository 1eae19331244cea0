"""Heat maps. Colours are computed here, as the library has only linear scales; the legend is markup that wraps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from weightswap_tools.reports.blocks import Column, HeatMap, Table, columns
from weightswap_tools.reports.embedding import markup
from weightswap_tools.reports.texts import cut_text, distinct_texts

from .chart import NO_LINES, Chart, Option, hue, moves

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
_MOVES = {"First": (-END, 1), "Previous": (-1, 1), "Next": (1, 1), "Last": (END, 1)}
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
        _option(block, scale, tilted, paged),
        Table(heads, rows),
        _legend(block, scale),
        moves("Rows of the heat map", _MOVES) if paged else "",
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
        self.keys = {name: key for name, key in _keys(block, below) if name in names}

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


def _keys(block: HeatMap, below: bool) -> Iterator[tuple[str, _Key]]:
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


def _option(block: HeatMap, scale: _Scale, tilted: bool, paged: bool) -> Option:
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
