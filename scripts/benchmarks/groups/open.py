"""From an artifact to a graph that can be called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from exports import ours
from report import Goal, Row, compared
from settings import Settings
from subjects import quiet
from timing import in_turn

from .export import SIZES, Size

ONE = Path(__file__).parents[1] / "openings.py"
AT_ONCE = Goal("median", "at most", 60)
FORTIETH = Goal("ratio", "at most", 1 / 40)
MOST_ROUNDS = 5


def rows(settings: Settings) -> Iterator[Row]:
    """The largest topology that the settings allow; each opening in a process of its own, after `import torch`."""
    size = [size for size in SIZES if size.billions <= settings.billions][-1]
    with TemporaryDirectory(prefix="weightswap-bench-") as folder:
        with quiet():
            ours(size.layers, size.width, Path(folder))
        yield from _one_size(size, Path(folder) / "model.artifact", min(settings.rounds, MOST_ROUNDS))


def _one_size(size: Size, artifact: Path, rounds: int) -> Iterator[Row]:
    taken = in_turn({way: partial(_run, way, artifact) for way in ("ours", "torch")}, rounds)
    millis = {way: [second * 1e3 for second in values] for way, values in taken.items()}
    peer = "torch.export.load().module()"
    for goal in (AT_ONCE, FORTIETH) if size is SIZES[-1] else (None,):
        yield compared(f"open the graph, {size}", "ms", millis["ours"], peer, millis["torch"], goal)


def _run(way: str, artifact: Path) -> float:
    command = [sys.executable, str(ONE), way, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])
