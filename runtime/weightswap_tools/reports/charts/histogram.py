"""Histograms: bins to scale, or equally wide if edges are orders of magnitude or infinite."""

from __future__ import annotations

import math

from weightswap_tools.reports.blocks import Histogram, Table, columns
from weightswap_tools.reports.texts import number_text, short_text

from .chart import NO_LINES, Chart, Option, hue


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
