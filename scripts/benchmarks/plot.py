"""Plot of subjects compared with their peers. `plot.py FOLDER` redraws those of a `bench.json` there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from report import Goal, Row

OURS, GOAL = "#3b7dd8", "#d1495b"
HEIGHT = 0.42  # inches per row


def plot_groups(groups: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Write `GROUP.svg` for each group with a row that has a ratio; without matplotlib print a note."""
    for name, rows in groups.items():
        try:
            if any(row.ratio is not None for row in rows):
                plot_ratios(rows, folder / f"{name}.svg")
        except ModuleNotFoundError as error:
            print(f"{name}.svg was not drawn, as {error.name} is not installed", file=sys.stderr)


def read_groups(path: Path) -> dict[str, list[Row]]:
    rows = json.loads(path.read_text())["rows"]
    return {name: [_row(each) for each in members] for name, members in groupby(rows, lambda each: str(each["group"]))}


def _row(fields: dict[str, object]) -> Row:
    known = {name: value for name, value in fields.items() if name not in ("group", "met", "goal")}
    goal = fields["goal"]
    return Row(**known, goal=Goal(**goal) if isinstance(goal, dict) else None)  # type: ignore[arg-type]


def plot_ratios(rows: Sequence[Row], path: Path) -> None:
    """Write an SVG with one bar for each row that has a ratio, and a mark at the ratio's goal.

    The bar's length is our time over the peer's; left of 1 we are faster. The scale is logarithmic.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = list({(row.what, row.peer): row for row in rows if row.ratio is not None}.values())[::-1]
    figure = Figure(figsize=(11, 1.2 + HEIGHT * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh(places, [row.ratio - 1 for row in shown if row.ratio is not None], left=1, color=OURS, height=0.6)
    goals = [(place, row.goal.limit) for place, row in enumerate(shown) if row.goal and row.goal.figure == "ratio"]
    if goals:
        numbers, limits = zip(*goals, strict=True)
        axes.scatter(limits, numbers, marker="|", s=220, color=GOAL, label="goal")
        axes.legend(loc="lower right")
    for place, row in enumerate(shown):
        ratio = row.ratio or 1.0
        axes.annotate(f" {ratio:.3g} ", (ratio, place), va="center", ha="right" if ratio < 1 else "left")
    axes.set_yticks(places, [f"{row.what}\nbeside {row.peer}" for row in shown], fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.2)
    axes.set_xlabel("time, as a share of the peer's in the same run (median; left of 1: less)")
    # makes the output deterministic
    with mpl.rc_context({"svg.hashsalt": "weightswap", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    plot_groups(read_groups(Path(sys.argv[1]) / "bench.json"), Path(sys.argv[1]))
