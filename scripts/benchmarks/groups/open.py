"""From an artifact to a callable graph, and from the shell to a first answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from exports import ours
from report import Goal, Row, compared
from settings import Settings
from subjects import quiet
from timing import in_turn, seconds
from torch import nn

from weightswap_exporter import export, pack

from .export import SIZES, Size

ONE = Path(__file__).parents[1] / "openings.py"
AT_ONCE = Goal("median", "at most", 60)
FORTIETH = Goal("ratio", "at most", 1 / 40)
SOON = Goal("median", "at most", 250)
MOST_ROUNDS = 5


def rows(settings: Settings) -> Iterator[Row]:
    """Measure the largest topology that the settings allow, each in a process of its own, after `import torch`."""
    size = [size for size in SIZES if size.billions <= settings.billions][-1]
    with TemporaryDirectory(prefix="weightswap-bench-") as folder:
        with quiet():
            ours(size.layers, size.width, Path(folder))
        yield from _one_size(size, Path(folder) / "model.artifact", min(settings.rounds, MOST_ROUNDS))
        yield from _cold_start(Path(folder), min(settings.rounds, MOST_ROUNDS))


def _one_size(size: Size, artifact: Path, rounds: int) -> Iterator[Row]:
    timings = in_turn({way: partial(_run, way, artifact) for way in ("ours", "torch")}, rounds)
    millis = {way: [second * 1e3 for second in values] for way, values in timings.items()}
    peer = "torch.export.load().module()"
    for goal in (AT_ONCE, FORTIETH) if size is SIZES[-1] else (None,):
        yield compared(f"open the graph, {size}", "ms", millis["ours"], peer, millis["torch"], goal)


def _cold_start(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure `weightswap run` of a small model, against a process that only imports torch."""
    model, x = nn.Linear(16, 16).eval(), torch.zeros(1, 16)
    with quiet():
        pack(model, export(model, (x,), out=folder / "small.artifact"), out=folder / "small.safetensors")
    np.savez(folder / "inputs.npz", input=x.numpy())
    program = "from weightswap_tools.program import main; main()"
    files = [str(folder / name) for name in ("small.artifact", "small.safetensors", "inputs.npz")]
    commands = {
        "run": ["-c", program, "run", files[0], "-w", files[1], "-i", files[2]],
        "torch": ["-c", "import torch"],
    }
    timings = in_turn({name: partial(_seconds, command) for name, command in commands.items()}, rounds)
    over = [(one - other) * 1e3 for one, other in zip(timings["run"], timings["torch"], strict=True)]
    bare = median(timings["torch"]) * 1e3
    ratio = median(one / other for one, other in zip(timings["run"], timings["torch"], strict=True))
    what = "weightswap run, start to end, minus import torch"
    yield Row(what, "ms", median(over), rounds, goal=SOON, peer="import torch", peer_median=bare, ratio=ratio)


def _seconds(arguments: list[str]) -> float:
    return seconds(lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=True))


def _run(way: str, artifact: Path) -> float:
    command = [sys.executable, str(ONE), way, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])
