"""Conversion of blocks to options of the chart library. Colours are variables of the style sheet."""

from __future__ import annotations

from weightswap_tools.reports.blocks import ChartBlock, HeatMap, Histogram, LinePlot, Timeline, Treemap

from .chart import Chart
from .heatmap import heatmap
from .histogram import histogram
from .lines import lines
from .timeline import timeline
from .treemap import treemap

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
