"""Plot of accuracy and latency over time, with every commit, refusal and rollback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from ledger import Ledger, Sample, accuracy, latency
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

mpl.use("Agg")

WINDOW_SECONDS = 0.5
MOST_NAMES = 11  # of generations that have their number and accuracy written beside them
COMMIT, REFUSED, ROLLBACK = "0.55", "tab:red", "tab:purple"


def draw_timeline(path: Path, ledger: Ledger, title: str) -> None:
    """Write a PNG with two panels over the seconds since the first commit."""
    import matplotlib.pyplot as plt

    zero = ledger.generations[0].at
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    _draw_accuracy(top, ledger, zero)
    _draw_latency(bottom, ledger, zero)
    for axes in (top, bottom):
        _mark_events(axes, ledger, zero)
    _name_generations(top, ledger, zero)
    bottom.set_xlabel("seconds since the first commit")
    top.legend(loc="lower right", framealpha=1)
    bottom.legend(loc="upper right", framealpha=1, handles=bottom.lines[:2])
    figure.suptitle(title)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    temporary.replace(path)


def _draw_accuracy(axes: Axes, ledger: Ledger, zero: float) -> None:
    times, values = _windows(ledger.samples, zero, accuracy)
    axes.plot(times, values * 100, ".", color="tab:blue", alpha=0.35, label=f"answers in {WINDOW_SECONDS} s")
    end = max(sample.started for sample in ledger.samples)
    edges = [generation.at - zero for generation in ledger.generations] + [end - zero]
    levels = [accuracy(each.samples) * 100 if each.samples else np.nan for each in ledger.generations]
    axes.stairs(levels, edges, baseline=None, color="tab:blue", linewidth=2, label="answers of a generation")
    for level, start, stop in list(zip(levels, edges, edges[1:], strict=False))[:: _every(ledger)]:
        axes.annotate(
            f"{level:.1f}",
            ((start + stop) / 2, level),
            (0, -15),
            textcoords="offset points",
            ha="center",
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
    axes.set_ylabel("accuracy on held-out digits (%)")
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(axis="y", alpha=0.3)


def _draw_latency(axes: Axes, ledger: Ledger, zero: float) -> None:
    times, p50 = _windows(ledger.samples, zero, lambda samples: latency(samples).p50)
    _, p99 = _windows(ledger.samples, zero, lambda samples: latency(samples).p99)
    axes.plot(times, p99, color="tab:orange", label=f"p99 in {WINDOW_SECONDS} s")
    axes.plot(times, p50, color="tab:green", label=f"p50 in {WINDOW_SECONDS} s")
    axes.set_ylabel("latency of a request (ms)")
    axes.set_yscale("log")
    axes.set_ylim(min(0.1, p50.min() / 2), max(10, p99.max() * 2))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", alpha=0.3)


def _windows(
    samples: list[Sample], zero: float, measure: Callable[[list[Sample]], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean time in seconds and the measure of each window that has answers."""
    windows: dict[int, list[Sample]] = {}
    for sample in samples:
        windows.setdefault(int((sample.started - zero) // WINDOW_SECONDS), []).append(sample)
    times = np.array([np.mean([sample.started for sample in window]) - zero for window in windows.values()])
    return times, np.array([measure(window) for window in windows.values()])


def _mark_events(axes: Axes, ledger: Ledger, zero: float) -> None:
    for number, refusal in enumerate(ledger.refusals):
        label = "refused" if number == 0 else None
        axes.axvline(refusal.at - zero, color=REFUSED, linestyle=":", linewidth=1.5, label=label)
    for generation in ledger.generations:
        back = generation.rolled_back
        first = generation.generation == 0
        axes.axvline(
            generation.at - zero,
            color=ROLLBACK if back else COMMIT,
            linestyle="-." if back else "--",
            linewidth=1.5 if back else 1 / _every(ledger) ** 0.5,
            label="rollback" if back else "commit" if first else None,
        )


def _every(ledger: Ledger) -> int:
    """Return n, so that there is room for the names of every n-th generation."""
    return -(-len(ledger.generations) // MOST_NAMES)


def _name_generations(axes: Axes, ledger: Ledger, zero: float) -> None:
    for generation in ledger.generations[:: _every(ledger)]:
        axes.annotate(
            f"generation {generation.generation}" if generation.generation == 0 else str(generation.generation),
            (generation.at - zero, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=ROLLBACK if generation.rolled_back else "black",
        )
