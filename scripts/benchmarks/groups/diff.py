"""Comparison of two weight files, against loading both with safetensors and subtracting."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from report import Row, compared
from settings import Settings
from subjects import Stored, WrongOutput, stored
from timing import in_turn

ONE = Path(__file__).parents[1] / "comparisons.py"
PEERS = {"norms": "load_file, ‖B - A‖ / ‖A‖ alone", "statistics": "load_file, the statistics in torch"}
CLOSE = 1e-3  # torch computes norms of 32-bit floats in 32 bits


def rows(settings: Settings) -> Iterator[Row]:
    """Run each comparison in a process of its own; imports count in its memory, but not in its time."""
    with stored(settings.megabytes * 1_000_000) as large:
        results: dict[str, list[dict[str, Any]]] = {way: [] for way in ("ours", *PEERS)}
        timings = in_turn({way: partial(_measure, way, large, results) for way in results}, settings.rounds)
        for way, peer in PEERS.items():
            _check(results["ours"][0], results[way][0], peer)
            yield compared(f"diff of two files of {large.size}, time", "s", timings["ours"], peer, timings[way])
        for way, peer in PEERS.items():
            ours, theirs = ([item["peak"] / 1e6 for item in results[name]] for name in ("ours", way))
            yield compared(f"diff of two files of {large.size}, peak memory", "MB", ours, peer, theirs)


def _measure(way: str, large: Stored, results: dict[str, list[dict[str, Any]]]) -> float:
    paths = [str(version.path) for version in large.versions]
    done = subprocess.run([sys.executable, str(ONE), way, *paths], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongOutput(f"{way}: {done.stderr.strip()[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    results[way].append(figures)
    return float(figures["seconds"])


def _check(ours: dict[str, Any], theirs: dict[str, Any], peer: str) -> None:
    """Raise WrongOutput unless both report the same changes."""
    for name, value in theirs["found"].items():
        if not math.isclose(ours["found"][name], value, rel_tol=CLOSE):
            raise WrongOutput(f"{name}: a relative change of {ours['found'][name]}, {peer} gives {value}")
