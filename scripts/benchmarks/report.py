"""Rows of figures, and the table and the document made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from rich import box
from rich.table import Table
from timing import Pairs, percentile


@dataclass(frozen=True)
class Goal:
    """A limit for one figure of a row, in the row's unit (a ratio has none)."""

    figure: Literal["median", "p99", "ratio"]
    sense: Literal["at least", "at most"]
    limit: float

    def __str__(self) -> str:
        return f"{self.figure} {self.sense} {self.limit:g}"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.sense == "at least" else value <= self.limit


@dataclass(frozen=True)
class Row:
    """One measured thing. `ratio` is the median of subject / peer over neighbouring rounds, in `unit` on both sides."""

    what: str
    unit: str
    median: float
    samples: int
    p99: float | None = None
    goal: Goal | None = None
    peer: str | None = None
    peer_median: float | None = None
    ratio: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None where there is none."""
        if self.goal is None:
            return None
        value: float | None = getattr(self, self.goal.figure)
        return value is not None and self.goal.met(value)


def compared(what: str, unit: str, peer: str, pairs: Pairs, goal: Goal | None = None) -> Row:
    """A row for a subject and a peer; `pairs` in `unit`."""
    return Row(
        what=what,
        unit=unit,
        median=median(pairs.subject),
        samples=len(pairs.subject),
        goal=goal,
        peer=peer,
        peer_median=median(pairs.peer),
        ratio=median(s / p for s, p in zip(*pairs, strict=True)),
    )


def spread(what: str, unit: str, values: list[float], goal: Goal | None = None) -> Row:
    """A row for one subject with its 99th percentile; `values` in `unit`."""
    return Row(what, unit, median(values), len(values), p99=percentile(values, 0.99), goal=goal)


def table(rows: Iterable[Row], title: str) -> Table:
    """The rows as a table that is Markdown too."""
    made = Table(title=title, title_justify="left", box=box.MARKDOWN)
    made.add_column("what")
    for heading in ("median", "p99"):
        made.add_column(heading, justify="right")
    for heading in ("unit", "goal", "met", "peer"):
        made.add_column(heading)
    for heading in ("peer's median", "ratio"):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(
            row.what,
            _figure(row.median),
            _figure(row.p99),
            row.unit,
            str(row.goal or ""),
            {True: "yes", False: "NO", None: ""}[row.met],
            row.peer or "",
            _figure(row.peer_median),
            _figure(row.ratio),
        )
    return made


def document(groups: dict[str, list[Row]], machine: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What `bench.json` holds."""
    rows = [
        {"group": group, **asdict(row), "goal": str(row.goal) if row.goal else None, "met": row.met}
        for group, members in groups.items()
        for row in members
    ]
    return {"machine": machine, "settings": settings, "rows": rows}


def _figure(value: float | None) -> str:
    """Three significant digits, never in powers of ten."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.2g}"
