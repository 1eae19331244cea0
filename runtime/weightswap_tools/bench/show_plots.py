"""Calls over the size of a batch: what one takes, and how many there are in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weightswap_tools.bench import BenchReport, CallTimes, EngineBench
from weightswap_tools.reports import Axis, Line, LinePlot
from weightswap_tools.reports.blocks import Scale

WIDE = 20  # times as much: a linear axis would press the least values together


class _Quantity(NamedTuple):
    """What is drawn, and how it follows from the calls of one size, by the style of its line."""

    caption: str
    what: str
    unit: str
    figures: dict[str, Callable[[CallTimes], float | None]]


_QUANTITIES = (
    _Quantity(
        "Latency: median and 99th percentile",
        "time of a call",
        "ms",
        {"p50": lambda calls: calls.p50 * 1e3, "p99": lambda calls: calls.p99 * 1e3},
    ),
    _Quantity("Throughput in calls", "calls per second", "", {"": lambda calls: calls.calls_per_second}),
    _Quantity("Throughput in samples", "samples per second", "", {"": lambda calls: calls.samples_per_second}),
)


def call_plots(found: BenchReport) -> Iterator[LinePlot]:
    """Latency, calls and samples per second over the batch dimension; nothing unless it was measured in two sizes."""
    name = found.batch_dimension
    batches = {calls.sizes[name] for result in found.engines for calls in result.calls} if name else set()
    if name and len(batches) > 1:
        across = Axis(f"size of {name}", "", fitting_scale([*batches]))
        yield from (_plot(quantity, found.engines, name, across) for quantity in _QUANTITIES)


def fitting_scale(values: Sequence[float]) -> Scale:
    """Logarithmic for positive values of which the largest is many times the least."""
    return "log" if values and min(values) > 0 and max(values) >= WIDE * min(values) else "linear"


def _plot(quantity: _Quantity, results: Sequence[EngineBench], dimension: str, across: Axis) -> LinePlot:
    """A line for each engine, residency and figure."""
    lines = tuple(
        Line(f"{result.engine}, {result.residency}", _points(result.calls, dimension, figure), style)
        for result in results
        if result.calls
        for style, figure in quantity.figures.items()
    )
    heights = [height for line in lines for _, height in line.points]
    return LinePlot(lines, across, Axis(quantity.what, quantity.unit, fitting_scale(heights)), quantity.caption)


def _points(
    calls: Sequence[CallTimes], dimension: str, figure: Callable[[CallTimes], float | None]
) -> tuple[tuple[float, float], ...]:
    found = ((one.sizes[dimension], figure(one)) for one in calls)
    return tuple(sorted((size, value) for size, value in found if value is not None))
