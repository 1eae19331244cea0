"""The HTML report of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weightswap_tools.bench import BenchReport, CallTimes, EngineBench, SwapTimes
from weightswap_tools.reports.blocks import (
    Axis,
    Block,
    Facts,
    Lane,
    Line,
    LinePlot,
    Note,
    Report,
    Scale,
    Section,
    Span,
    Table,
    Timeline,
)

from .rows import CALLS, MEMORY, SWAPS, call_rows, memory_rows, milli, swap_rows


def bench_report(report: BenchReport) -> Report:
    """Return a report: calls as plots over the batch size and as a table, swaps on a timeline, and memory."""
    failures = [f"{result.engine}, {result.residency}: {result.failed}" for result in report.engines if result.failed]
    facts = [("artifact", report.artifact), ("graph id", report.graph_id), ("weights", report.weights)]
    facts.append(("weights id", report.weights_id or "unknown"))
    facts += [("machine", report.machine), *((f"left out: {engine}", why) for engine, why in report.left_out.items())]
    calls: tuple[Block, ...] = (*call_plots(report), Table(CALLS, tuple(call_rows(report.engines)), "Calls"))
    memory = Table(MEMORY, tuple(memory_rows(report.engines)))
    sections = (
        Section("Overview", (Facts(tuple(facts)), *(Note(text, "bad") for text in failures))),
        Section(f"Calls of {report.method}", calls, _CALLS_NOTE),
        Section("Swaps", tuple(_swaps(report.engines)), _SWAPS_NOTE),
        Section("Memory", (memory,), _MEMORY_NOTE),
    )
    verdict = f"{len(failures)} failed" if failures else ""
    return Report("How fast it serves and swaps", report.artifact, sections, verdict, not failures and None)


_CALLS_NOTE = """The latency of one call with prepared inputs; percentiles over all calls of all threads.
Calls and samples per second are of all threads together."""
_SWAPS_NOTE = "The same file, swapped in again and again. Calls wait for the pause alone."
_MEMORY_NOTE = "Resident memory of a process with one engine and one model. The load includes the engine's library."


def _swaps(results: Sequence[EngineBench]) -> Iterator[Block]:
    lanes = tuple(
        Lane(f"{result.engine}, {result.residency}", tuple(_spans(result.swaps))) for result in results if result.swaps
    )
    if lanes:
        yield Timeline(lanes, "Swaps, one after another")
    yield Table(SWAPS, tuple(swap_rows(results)))


def _spans(swaps: Sequence[SwapTimes]) -> Iterator[Span]:
    now = 0.0
    for number, swap in enumerate(swaps, start=1):
        for kind, seconds in (("staged", swap.staged), ("verified", swap.verified), ("paused", swap.paused)):
            yield Span(now, now + seconds, f"swap {number}: {kind}, {milli(seconds)} ms", kind)
            now += seconds


WIDE = 20  # the ratio from which a linear axis would squeeze the smallest values together


class _Quantity(NamedTuple):
    """A quantity to plot: its axis, and for each line style the function that gives its value."""

    caption: str
    label: str
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


def call_plots(report: BenchReport) -> Iterator[LinePlot]:
    """Yield plots over the batch size of latency, and of calls and samples per second, if there are several sizes."""
    name = report.batch_dimension
    batches = {calls.sizes[name] for result in report.engines for calls in result.calls} if name else set()
    if name and len(batches) > 1:
        across = Axis(f"size of {name}", "", fitting_scale([*batches]))
        yield from (_plot(quantity, report.engines, name, across) for quantity in _QUANTITIES)


def fitting_scale(values: Sequence[float]) -> Scale:
    """Return "log" for positive values that span more than a factor of WIDE, else "linear"."""
    return "log" if values and min(values) > 0 and max(values) >= WIDE * min(values) else "linear"


def _plot(quantity: _Quantity, results: Sequence[EngineBench], dimension: str, across: Axis) -> LinePlot:
    """Return a plot with a line for each engine, residency and figure of the quantity."""
    lines = tuple(
        Line(f"{result.engine}, {result.residency}", _points(result.calls, dimension, figure), style)
        for result in results
        if result.calls
        for style, figure in quantity.figures.items()
    )
    heights = [height for line in lines for _, height in line.points]
    return LinePlot(lines, across, Axis(quantity.label, quantity.unit, fitting_scale(heights)), quantity.caption)


def _points(
    calls: Sequence[CallTimes], dimension: str, figure: Callable[[CallTimes], float | None]
) -> tuple[tuple[float, float], ...]:
    points = ((one.sizes[dimension], figure(one)) for one in calls)
    return tuple(sorted((size, value) for size, value in points if value is not None))
