"""Rows of measurements for the tables on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from weightswap_tools.bench import EngineBench
from weightswap_tools.reports.blocks import Cell, Column, columns

from .report import sizes_text

CALLS = (
    *columns("engine", "residency", "sizes"),
    *columns("threads", "calls", "p50 (ms)", "p90 (ms)", "p99 (ms)", "calls/s", "samples/s", kind="number"),
)
SWAPS = (
    *columns("engine", "residency"),
    *columns("swaps", "staged (ms)", "verified (ms)", "paused (µs)", "longest pause (µs)", kind="number"),
    Column("read", "bytes"),
)
MEMORY = (
    *columns("engine", "residency"),
    Column("load (s)", "number"),
    *columns("before the load", "after it", "at most while swapping", kind="bytes"),
)
Row = tuple[Cell, ...]


def call_rows(results: Sequence[EngineBench]) -> list[Row]:
    """Return the rows of the table CALLS."""
    return [
        (
            result.engine,
            result.residency,
            sizes_text(calls.sizes) or "as exported",
            calls.threads,
            calls.calls,
            *(milli(seconds) for seconds in (calls.p50, calls.p90, calls.p99)),
            round(calls.calls_per_second, 1),
            None if calls.samples_per_second is None else round(calls.samples_per_second, 1),
        )
        for result in results
        for calls in result.calls
    ]


def swap_rows(results: Sequence[EngineBench]) -> list[Row]:
    """Return the rows of the table SWAPS: medians, and the longest pause."""
    return [
        (
            result.engine,
            result.residency,
            len(result.swaps),
            milli(median(swap.staged for swap in result.swaps)),
            milli(median(swap.verified for swap in result.swaps)),
            micro(median(swap.paused for swap in result.swaps)),
            micro(max(swap.paused for swap in result.swaps)),
            result.swaps[0].bytes_read,
        )
        for result in results
        if result.swaps
    ]


def memory_rows(results: Sequence[EngineBench]) -> list[Row]:
    """Return the rows of the table MEMORY."""
    return [
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
    ]


def milli(seconds: float) -> float:
    """Return seconds as milliseconds, rounded to a microsecond."""
    return round(seconds * 1e3, 3)


def micro(seconds: float) -> float:
    """Return seconds as microseconds, rounded to a tenth."""
    return round(seconds * 1e6, 1)
