"""What the demo of row updates shows: AUC, the age of the served weights and latency, by model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

mpl.use("Agg")

MODELS = {"never": "never updated", "full": "full files", "rows": "row deltas"}
"""Name of each model in the server, and in words; it watches the folder of its name."""
_COLORS = {"never": "0.55", "full": "tab:orange", "rows": "tab:blue"}
_WINDOW = 4.0  # seconds of a point


class Published(NamedTuple):
    """A file of the trainer. `at` is when its weights were copied, in seconds of the epoch."""

    folder: str
    at: float
    weights_id: str
    nbytes: int
    file: str


class Answer(NamedTuple):
    """The answer to a request; `at` is when it was sent, `seconds` the latency."""

    at: float
    model: str
    weights_id: str
    seconds: float
    clicks: NDArray[np.float32]
    logits: NDArray[np.float32]


class Measures(NamedTuple):
    """Of some answers: the AUC, the median age of the weights in seconds, and latencies in milliseconds."""

    auc: float
    age: float
    p50: float
    p99: float


def measure(answers: Sequence[Answer], published: Sequence[Published]) -> Measures:
    clicks, logits = (np.concatenate(each) for each in zip(*((a.clicks, a.logits) for a in answers), strict=True))
    copied = {each.weights_id: each.at for each in published}
    age = np.median([answer.at - copied[answer.weights_id] for answer in answers])
    p50, p99 = np.percentile([answer.seconds * 1e3 for answer in answers], [50, 99])
    return Measures(float(roc_auc_score(clicks, logits)), float(age), float(p50), float(p99))


def summarise(published: Sequence[Published], answers: Sequence[Answer]) -> str:
    """Return a table of the last half of the time, and the sizes of what was published."""
    middle = (answers[0].at + answers[-1].at) / 2
    lines = [f"{'the last half':14} {'AUC':>6} {'median age':>11} {'p50':>9} {'p99':>9}"]
    for model, words in MODELS.items():
        found = measure([answer for answer in answers if answer.model == model and answer.at >= middle], published)
        lines.append(
            f"{words:14} {found.auc:6.3f} {found.age:9.1f} s {found.p50:6.1f} ms {found.p99:6.1f} ms",
        )
    first, *deltas = [each.nbytes for each in published if each.folder == "rows"]
    full = sum(each.folder == "full" for each in published)
    lines.append(
        f"{len(deltas)} row deltas, the median of {np.median(deltas or [0]) / 1e6:.1f} MB; "
        f"{full} full files after the first, of {first / 1e6:.1f} MB"
    )
    return "\n".join(lines)


def draw(path: Path, published: Sequence[Published], answers: Sequence[Answer]) -> None:
    """Draw AUC, age and latency over time."""
    import matplotlib.pyplot as plt

    start = answers[0].at
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(10, 9), sharex=True, layout="constrained")
    for model, words in MODELS.items():
        own = [answer for answer in answers if answer.model == model]
        times, found = _windows(own, start, lambda some: measure(some, published))
        color = _COLORS[model]
        top.plot(times, [each.auc for each in found], color=color, label=words)
        copied = {each.weights_id: each.at for each in published}
        ages = [answer.at - copied[answer.weights_id] for answer in own]
        middle.plot([answer.at - start for answer in own], ages, color=color)
        bottom.plot(times, [each.p99 for each in found], color=color)
        bottom.plot(times, [each.p50 for each in found], color=color, linestyle=":")
    top.set_ylabel(f"AUC on fresh events, in {_WINDOW:g} s")
    top.legend(loc="lower left")
    middle.set_ylabel("age of the served weights (s)")
    bottom.set_ylabel("latency (ms): p99, and p50 dotted")
    bottom.set_yscale("log")
    bottom.yaxis.set_major_formatter("{x:g}")
    bottom.set_xlabel("seconds")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _windows(
    answers: Sequence[Answer], start: float, found: Callable[[list[Answer]], Measures]
) -> tuple[list[float], list[Measures]]:
    """Return the middle of each window of time, and what is found of its answers."""
    windows: dict[int, list[Answer]] = {}
    for answer in answers:
        windows.setdefault(int((answer.at - start) // _WINDOW), []).append(answer)
    return [(number + 0.5) * _WINDOW for number in windows], [found(window) for window in windows.values()]
