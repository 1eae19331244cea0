"""Screen output of the demo: a line for each event, and a table that is live on a terminal."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from ledger import Generation, Ledger, accuracy, latency
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

PLAIN_WIDTH = 110
REFRESH_SECONDS = 0.25
MOST_ROWS = 16
HEADINGS = (
    "gener-\nation",
    "weights id",
    "epoch,\nstep",
    "accur-\nacy",
    "requests",
    "latency ms\np50 / p99",
    "commit\npause µs",
    "wrong,\nmixed",
)


def table(ledger: Ledger, title: str) -> Table:
    grid = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading == "weights id" else "right", no_wrap=True)
    for generation in ledger.generations[-MOST_ROWS:]:
        grid.add_row(*_row(generation), style="magenta" if generation.rolled_back else None)
    return grid


def _row(generation: Generation) -> list[str]:
    samples = generation.samples
    times = latency(samples)
    bad = generation.wrong + generation.mixed
    return [
        str(generation.generation),
        generation.weights_id[:12],
        f"{generation.version}{' back' if generation.rolled_back else ''}",
        f"{accuracy(samples):.1%}" if samples else "-",
        str(len(samples)),
        f"{times.p50:.2f} / {times.p99:.2f}" if samples else "-",
        f"{generation.seconds_paused * 1e6:.1f}",
        f"[bold red]{bad}[/]" if bad else "0",
    ]


class Screen(AbstractContextManager["Screen"]):
    """Standard output. `started` is the start of the demo's clock, in seconds of the monotonic clock."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._shown = 0.0
        self._console = Console(highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, soft_wrap=True, width=PLAIN_WIDTH)
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print one line (or a few) about an event."""
        self._console.print(f"[{time.monotonic() - self._started:5.1f} s] {text}", markup=False)

    def show(self, ledger: Ledger) -> None:
        """Update the live table, at most a few times per second."""
        now = time.monotonic()
        if self._live and now > self._shown + REFRESH_SECONDS:
            self._shown = now
            self._live.update(table(ledger, "live: every answer is checked against eager"), refresh=True)

    def close(self, ledger: Ledger) -> None:
        """End the live table, and print the final one."""
        self.__exit__()
        self._console.print()
        self._console.print(table(ledger, f"every answer was checked {ledger.precision} against the eager model"))
