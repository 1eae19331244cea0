"""One picture of a report: each subject that has a peer, as its share of the peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from report import Row

mpl.use("Agg")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the throughputs in GB/s, subject beside peer; nothing where no row has any."""
    import matplotlib.pyplot as plt

    bars = [row for row in rows if row.unit == "GB/s" and row.peer]
    if not bars:
        return
    figure, axes = plt.subplots(figsize=(9, 1 + 0.7 * len(bars)), layout="constrained")
    places = range(len(bars))
    axes.barh([place - 0.2 for place in places], [row.median for row in bars], 0.4, label="weightswap")
    axes.barh([place + 0.2 for place in places], [row.peer_median or 0 for row in bars], 0.4, label="peer")
    axes.set_yticks(places, [f"{row.what}\npeer: {row.peer}" for row in bars])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
