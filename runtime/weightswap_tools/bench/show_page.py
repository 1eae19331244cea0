"""Measurements as a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightswap_tools.bench import BenchReport, EngineBench, SwapTimes
from weightswap_tools.reports import Block, Facts, Lane, Note, Report, Section, Span, Table, Timeline

from .rows import CALLS, MEMORY, SWAPS, call_rows, memory_rows, milli, swap_rows
from .show_plots import call_plots


def bench_report(found: BenchReport) -> Report:
    """Calls as plots over the size of a batch and as a table, swaps on a time line, and memory."""
    failures = [f"{result.engine}, {result.residency}: {result.failed}" for result in found.engines if result.failed]
    facts = [("artifact", found.artifact), ("graph id", found.graph_id), ("weights", found.weights)]
    facts.append(("weights id", found.weights_id or "unknown"))
    facts += [("machine", found.machine), *((f"left out: {engine}", why) for engine, why in found.left_out.items())]
    calls: tuple[Block, ...] = (*call_plots(found), Table(CALLS, tuple(call_rows(found.engines)), "Calls"))
    memory = Table(MEMORY, tuple(memory_rows(found.engines)))
    sections = (
        Section("Overview", (Facts(tuple(facts)), *(Note(text, "bad") for text in failures))),
        Section(f"Calls of {found.method}", calls, _CALLS_NOTE),
        Section("Swaps", tuple(_swaps(found.engines)), _SWAPS_NOTE),
        Section("Memory", (memory,), _MEMORY_NOTE),
    )
    verdict = f"{len(failures)} failed" if failures else ""
    return Report("How fast it serves and swaps", found.artifact, sections, verdict, not failures and None)


_CALLS_NOTE = """The time of one call, with inputs that are ready; percentiles over all calls of all threads.
What is told per second is of all threads together."""
_SWAPS_NOTE = "The same file, swapped in again and again. Calls wait for the pause alone."
_MEMORY_NOTE = "Resident memory of a process that has one engine and one model. A load brings in the engine's library."


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
