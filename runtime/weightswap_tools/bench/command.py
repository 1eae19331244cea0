"""`weightswap bench`, on the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from weightswap_tools.bench import BenchReport, CallTimes, EngineBench, SwapTimes, bench, sizes_text
from weightswap_tools.reports.blocks import (
    Axis,
    Cell,
    Column,
    Facts,
    Line,
    LinePlot,
    Note,
    Report,
    Scale,
    Section,
    Table,
    columns,
)
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    ArtifactArgument,
    HtmlOption,
    JsonOption,
    OpLibraryOption,
    errors_as_exit,
    human_bytes,
    print_facts,
    print_json,
    print_table,
    progress_bar,
)

_MOST_SECONDS = 86400.0  # a day
_WIDE = 20  # the ratio from which a linear axis would squeeze the smallest values together
_CALLS_NOTE = """The latency of one call with prepared inputs; percentiles over all calls of all threads.
Calls and samples per second are of all threads together."""
_SWAPS_NOTE = "The same file, swapped in again and again. Calls wait for the pause alone."
_MEMORY_NOTE = "Resident memory of a process with one engine and one model. The load includes the engine's library."
bench_command = typer.Typer(add_completion=False)


@bench_command.command(name="bench")
def bench_(
    artifact: ArtifactArgument,
    weights: Annotated[str, typer.Argument(help="The weight file or checkpoint to serve and to swap in.")],
    engine: Annotated[
        list[str] | None, typer.Option(help="An engine to measure; may be repeated; by default all.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method to call; by default forward, or the first.")] = None,
    batch: Annotated[str, typer.Option(help="Sizes of the dimension `batch`, or of the first dynamic one.")] = "1,8,32",
    size: Annotated[str, typer.Option(help="Sizes of other dynamic dimensions, as length=128,rows=7.")] = "",
    inputs: Annotated[
        Path | None, typer.Option("--input", "-i", help="Inputs by name, a .safetensors or .npz file; not random ones.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="The number of threads that call concurrently.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, max=_MOST_SECONDS, help="How long to call with each size, in each residency.")
    ] = 1.0,
    swaps: Annotated[int, typer.Option(min=0, help="The number of swaps of the file, in each residency.")] = 5,
    html: HtmlOption = None,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure calls and swaps of every engine that the artifact has and this machine can run.

    Each engine runs in its own processes. The exit status is 1 if one of them failed.
    """
    batches, sizes = _parse_batches(batch), _parse_sizes(size)
    with errors_as_exit(as_json):
        with progress_bar("measuring", of_bytes=False) as progress:
            report = bench(
                artifact,
                weights,
                engines=engine or (),
                method=method,
                batches=batches,
                sizes=sizes,
                inputs=inputs,
                threads=threads,
                seconds=seconds,
                swaps=swaps,
                op_libraries=op_library or (),
                progress=progress,
            )
        if html:
            write_report(html, bench_report(report))
        if as_json:
            print_json(report)
        else:
            _print_bench(report)
            print_facts([("report", str(html))] if html else [])
    if any(result.failed for result in report.engines):
        raise typer.Exit(1)


def _parse_batches(text: str) -> list[int]:
    try:
        return [_parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--batch {text!r}: expected numbers, such as 1,8,32") from error


def _parse_sizes(text: str) -> dict[str, int]:
    try:
        pairs = (part.partition("=") for part in text.split(",") if part)
        return {name: _parse_size(value) for name, _, value in pairs}
    except ValueError as error:
        raise typer.BadParameter(f"--size {text!r}: expected names and numbers, such as length=128,rows=7") from error


def _parse_size(text: str) -> int:
    """Parse a size. Raises ValueError."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _print_bench(report: BenchReport) -> None:
    """Print tables of calls, swaps and memory, and what was not measured."""
    print_facts(
        (
            ("artifact", f"{report.artifact}, graph id {report.graph_id[:12]}"),
            ("weights", f"{report.weights}, weights id {report.weights_id[:12] or 'unknown'}"),
            ("machine", report.machine),
        )
    )
    _print_table(f"calls of {report.method}", call_table(report.engines))
    _print_table("swaps of the same file (medians)", _swap_table(report.engines))
    _print_table("resident memory", _memory_table(report.engines))
    print_facts(("left out", f"{engine}: {reason}") for engine, reason in report.left_out.items())
    print_facts(("failed", text) for text in _failures(report))


def _print_table(title: str, table: Table) -> None:
    def text(cell: Cell, column: Column) -> str:
        if cell is None:
            return ""
        return human_bytes(int(cell)) if column.kind == "bytes" else str(cell)

    if table.rows:
        rows = [[text(*item) for item in zip(row, table.columns, strict=True)] for row in table.rows]
        print_table(title, [column.name for column in table.columns], rows)


def bench_report(report: BenchReport) -> Report:
    """Return a report: calls as plots over the batch size and as a table, swaps likewise, and memory."""
    failures = _failures(report)
    facts = (
        ("artifact", report.artifact),
        ("graph id", report.graph_id),
        ("weights", report.weights),
        ("weights id", report.weights_id or "unknown"),
        ("machine", report.machine),
        *((f"left out: {engine}", reason) for engine, reason in report.left_out.items()),
    )
    sections = (
        Section("Overview", (Facts(facts), *(Note(text, "bad") for text in failures))),
        Section(f"Calls of {report.method}", (*call_plots(report), call_table(report.engines)), _CALLS_NOTE),
        Section("Swaps", (*swap_plots(report.engines), _swap_table(report.engines)), _SWAPS_NOTE),
        Section("Memory", (_memory_table(report.engines),), _MEMORY_NOTE),
    )
    verdict = f"{len(failures)} failed" if failures else ""
    return Report("How fast it serves and swaps", report.artifact, sections, verdict, not failures and None)


def _failures(report: BenchReport) -> list[str]:
    return [f"{_name(result)}: {result.failed}" for result in report.engines if result.failed]


def _name(result: EngineBench) -> str:
    return f"{result.engine}, {result.residency}"


# The tables, which the terminal and the page show.


def call_table(results: Sequence[EngineBench]) -> Table:
    """Return a table with a row for each engine, residency and set of sizes."""
    heads = (
        *columns("engine", "residency", "sizes"),
        *columns("threads", "calls", "p50 (ms)", "p90 (ms)", "p99 (ms)", "calls/s", "samples/s", kind="number"),
    )
    rows = (
        (
            result.engine,
            result.residency,
            sizes_text(calls.sizes) or "as exported",
            calls.threads,
            calls.calls,
            *(_milli(seconds) for seconds in (calls.p50, calls.p90, calls.p99)),
            round(calls.calls_per_second, 1),
            None if calls.samples_per_second is None else round(calls.samples_per_second, 1),
        )
        for result in results
        for calls in result.calls
    )
    return Table(heads, tuple(rows), "Calls")


def _swap_table(results: Sequence[EngineBench]) -> Table:
    """Return a table of medians, and of the longest pause."""
    heads = (
        *columns("engine", "residency"),
        *columns("swaps", "staged (ms)", "verified (ms)", "paused (µs)", "longest pause (µs)", kind="number"),
        Column("read", "bytes"),
    )
    rows = (
        (
            result.engine,
            result.residency,
            len(result.swaps),
            _milli(median(swap.staged for swap in result.swaps)),
            _milli(median(swap.verified for swap in result.swaps)),
            _micro(median(swap.paused for swap in result.swaps)),
            _micro(max(swap.paused for swap in result.swaps)),
            result.swaps[0].bytes_read,
        )
        for result in results
        if result.swaps
    )
    return Table(heads, tuple(rows))


def _memory_table(results: Sequence[EngineBench]) -> Table:
    heads = (
        *columns("engine", "residency"),
        Column("load (s)", "number"),
        *columns("before the load", "after it", "at most while swapping", kind="bytes"),
    )
    rows = (
        (
            result.engine,
            result.residency,
            round(result.load_seconds, 3),
            result.memory.before_load,
            result.memory.after_load,
            result.memory.peak_swapping,
        )
        for result in results
        if result.memory
    )
    return Table(heads, tuple(rows))


def _milli(seconds: float) -> float:
    """Return seconds as milliseconds, rounded to a microsecond."""
    return round(seconds * 1e3, 3)


def _micro(seconds: float) -> float:
    """Return seconds as microseconds, rounded to a tenth."""
    return round(seconds * 1e6, 1)


# The charts of the page.


# to plot: a caption, the label of the axis, its unit, and for each line style what gives the value
_Quantity = tuple[str, str, str, dict[str, Callable[[CallTimes], float | None]]]
_QUANTITIES: tuple[_Quantity, ...] = (
    (
        "Latency: median and 99th percentile",
        "time of a call",
        "ms",
        {"p50": lambda calls: calls.p50 * 1e3, "p99": lambda calls: calls.p99 * 1e3},
    ),
    ("Throughput in calls", "calls per second", "", {"": lambda calls: calls.calls_per_second}),
    ("Throughput in samples", "samples per second", "", {"": lambda calls: calls.samples_per_second}),
)


def call_plots(report: BenchReport) -> Iterator[LinePlot]:
    """Yield plots over the batch size of latency, and of calls and samples per second, if there are several sizes."""
    name = report.batch_dimension
    batches = {calls.sizes[name] for result in report.engines for calls in result.calls} if name else set()
    if name and len(batches) > 1:
        across = Axis(f"size of {name}", "", fitting_scale([*batches]))
        yield from (_plot(quantity, report.engines, name, across) for quantity in _QUANTITIES)


def fitting_scale(values: Sequence[float]) -> Scale:
    """Return "log" for positive values that span more than a factor of _WIDE, else "linear"."""
    return "log" if values and min(values) > 0 and max(values) >= _WIDE * min(values) else "linear"


def _plot(quantity: _Quantity, results: Sequence[EngineBench], dimension: str, across: Axis) -> LinePlot:
    """Return a plot with a line for each engine, residency and figure of the quantity."""
    caption, label, unit, figures = quantity
    lines = tuple(
        Line(_name(result), _points(result.calls, dimension, figure), style)
        for result in results
        if result.calls
        for style, figure in figures.items()
    )
    heights = [height for line in lines for _, height in line.points]
    return LinePlot(lines, across, Axis(label, unit, fitting_scale(heights)), caption)


def _points(
    calls: Sequence[CallTimes], dimension: str, figure: Callable[[CallTimes], float | None]
) -> tuple[tuple[float, float], ...]:
    points = ((one.sizes[dimension], figure(one)) for one in calls)
    return tuple(sorted((size, value) for size, value in points if value is not None))


def swap_plots(results: Sequence[EngineBench]) -> Iterator[LinePlot]:
    """Yield a plot of the phases of swaps, if there were any; a pause is far shorter than the rest, hence the scale."""
    phases: dict[str, Callable[[SwapTimes], float]] = {
        "staged": lambda swap: swap.staged,
        "verified": lambda swap: swap.verified,
        "paused": lambda swap: swap.paused,
    }
    lines = tuple(
        Line(_name(result), tuple((number, _milli(seconds(swap))) for number, swap in enumerate(result.swaps, 1)), name)
        for result in results
        if result.swaps
        for name, seconds in phases.items()
    )
    if lines:
        yield LinePlot(lines, Axis("swap"), Axis("time", "ms", "log"), "The phases of each swap")
