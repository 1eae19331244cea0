"""Export from a class to an artifact, against the bare capture and `torch.export.save`; small models by family."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import disk_usage
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from typing import NamedTuple

import torch
from families import FAMILIES
from report import Goal, Row, compared
from settings import Settings
from timing import in_turn, seconds

from weightswap_exporter import export

ONE = Path(__file__).parents[1] / "exports.py"
NEARLY_BARE = Goal("ratio", "at most", 1.5)
SMALL = Goal("median", "at most", 1000)
TINY = Goal("median", "at most", 3)
MOST_ROUNDS = 3
GB = 1_000_000_000


class Size(NamedTuple):
    """Llama topology; `billions` of parameters, of two bytes each."""

    billions: float
    layers: int
    width: int

    def __str__(self) -> str:
        return f"Llama, {self.billions:.2g} billion, {self.layers} layers"

    @property
    def nbytes(self) -> float:
        return self.billions * 2 * GB


SIZES = (Size(0.0065, 2, 512), Size(1.1, 16, 2048), Size(3.8, 24, 3072), Size(8.0, 32, 4096))
"""Three of them are measured: the largest that the settings allow."""


class Figures(NamedTuple):
    """Measurements of one process: seconds, peak memory in bytes, bytes written."""

    seconds: float
    peak: int
    written: int


def rows(settings: Settings) -> Iterator[Row]:
    """Measure families in this process, and the others in one each, with `torch.export.save` if memory allows it."""
    for name, build in FAMILIES.items():
        yield _family(name, build, settings.rounds)
    for size in [size for size in SIZES if size.billions <= settings.billions][-3:]:
        yield from _one_size(size, min(settings.rounds, MOST_ROUNDS))


def _family(name: str, build: Callable[[], tuple[torch.nn.Module, torch.Tensor]], rounds: int) -> Row:
    """Measure a model's export and torch's own in turn."""
    model, x = build()
    shapes = ({0: torch.export.Dim("batch", max=32)},)
    with TemporaryDirectory(prefix="weightswap-bench-") as folder:
        out = Path(folder, "a.artifact")

        def ours() -> None:
            shutil.rmtree(out, ignore_errors=True)
            export(model, (x,), out=out, dynamic_shapes=shapes)

        def bare() -> None:
            torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False)

        timings = in_turn({"ours": partial(seconds, ours), "bare": partial(seconds, bare)}, rounds)
    return compared(
        f"{name}: model to artifact, time", "s", timings["ours"], "torch.export.export", timings["bare"], NEARLY_BARE
    )


def _one_size(size: Size, rounds: int) -> Iterator[Row]:
    figures: dict[str, list[Figures]] = {"ours": [], "bare": []}

    def measure(way: str) -> float:
        result = _run(way, size)
        figures[way].append(result)
        return result.seconds

    timings = in_turn({way: partial(measure, way) for way in figures}, rounds)
    what = f"{size}: class to artifact"
    yield compared(f"{what}, time", "s", timings["ours"], "torch.export.export", timings["bare"], NEARLY_BARE)
    saved = _run("saved", size) if _has_room(size) else None
    ours = figures["ours"]
    goals = (SMALL, TINY) if size is SIZES[-1] else (None, None)
    parts = (
        ("time", "s", [item.seconds for item in ours], saved and saved.seconds, None),
        ("peak memory", "MB", [item.peak / 1e6 for item in ours], saved and saved.peak / 1e6, goals[0]),
        ("written", "MB", [item.written / 1e6 for item in ours], saved and saved.written / 1e6, goals[1]),
    )
    for name, unit, values, peer, goal in parts:
        middle = median(values)
        ratio = middle / peer if peer else None
        label = "torch.export.export and save" if saved else "torch.export.save (no room for it)"
        yield Row(f"{what}, {name}", unit, middle, len(values), None, goal, label, peer, ratio)


def _run(way: str, size: Size) -> Figures:
    command = [sys.executable, str(ONE), way, str(size.layers), str(size.width), gettempdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr[-2000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def _has_room(size: Size) -> bool:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes * 1024 > size.nbytes * 1.2 and disk_usage(gettempdir()).free > size.nbytes * 1.5
