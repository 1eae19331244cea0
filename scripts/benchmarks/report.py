"""Rows of figures, and the table and the document made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from rich import box
from rich.table import Table
from timing import percentile


@dataclass(frozen=True)
class Goal:
    """Limit for one figure of a row, in the row's unit (a ratio has none)."""

    figure: Literal["median", "p99", "ratio"]
    sense: Literal["at least", "at most"]
    limit: float

    def __str__(self) -> str:
        return f"{self.figure} {self.sense} {self.limit:g}"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.sense == "at least" else value <= self.limit


@dataclass(frozen=True)
class Row:
    """One measurement. `median`, `p99` and `peer_median` are in `unit`; `ratio` is subject over peer.

    Without a median nothing was measured, and a goal is not met.
    """

    what: str
    unit: str
    median: float | None
    samples: int
    p99: float | None = None
    goal: Goal | None = None
    peer: str | None = None
    peer_median: float | None = None
    ratio: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the goal was met; None if there is none."""
        if self.goal is None:
            return None
        value: float | None = getattr(self, self.goal.figure)
        return value is not None and self.goal.met(value)


def spread(what: str, unit: str, values: Sequence[float], goal: Goal | None = None) -> Row:
    """Return a row for one subject, with its 99th percentile; `values` in `unit`."""
    return Row(what, unit, median(values), len(values), p99=percentile(values, 0.99), goal=goal)


def compared(
    what: str, unit: str, values: Sequence[float], peer: str, peer_values: Sequence[float], goal: Goal | None = None
) -> Row:
    """Return a row for a subject and its peer, values in `unit`; the ratio is the median over neighbours in time."""
    return Row(
        what=what,
        unit=unit,
        median=median(values),
        samples=len(values),
        goal=goal,
        peer=peer,
        peer_median=median(peer_values),
        ratio=median(one / other for one, other in zip(values, peer_values, strict=True)),
    )


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table that is also Markdown."""
    grid = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for heading in ("what", "median", "p99", "unit", "goal", "met", "peer", "peer's median", "ratio"):
        numeric = heading in {"median", "p99", "peer's median", "ratio"}
        grid.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric)
    for row in rows:
        goal = str(row.goal) if row.goal else ""
        met = {True: "yes", False: "NO", None: ""}[row.met]
        peer, peer_median = row.peer or "", _figure(row.peer_median)
        grid.add_row(
            row.what, _figure(row.median), _figure(row.p99), row.unit, goal, met, peer, peer_median, _figure(row.ratio)
        )
    return grid


def line(row: Row) -> str:
    p99 = f", p99 {_figure(row.p99)}" if row.p99 is not None else ""
    peer = f"; {row.peer}: {_figure(row.peer_median)}, ratio {_figure(row.ratio)}" if row.peer else ""
    return f"{row.what}: {_figure(row.median)}{p99} {row.unit}{peer}"


def document(
    machine: Mapping[str, Any], settings: Mapping[str, Any], groups: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    rows = [{"group": group} | asdict(row) | {"met": row.met} for group, members in groups.items() for row in members]
    return {"machine": dict(machine), "settings": dict(settings), "rows": rows}


def _figure(value: float | None) -> str:
    """Format a number with three significant digits, without powers of ten."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.2g}"
