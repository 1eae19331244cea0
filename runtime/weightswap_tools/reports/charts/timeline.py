"""Timelines: a row for each lane, a colour for each kind of span."""

from __future__ import annotations

from weightswap_tools.reports.blocks import Span, Table, Timeline, columns
from weightswap_tools.reports.texts import seconds_text, time_unit

from .chart import Chart, Option, hue, moves

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
        _option([lane.name for lane in block.lanes], spans, zoomed),
        Table(_COLUMNS, tuple(rows)),
        after=moves("Part of the time", _MOVES) if zoomed else "",
    )


def _option(lanes: list[str], spans: list[tuple[int, Span]], zoomed: bool) -> Option:
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
