"""Deltas that name rows wherever they can: most tables of the tests are so small that ranges take fewer bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from weightswap_runtime import write_delta
from weightswap_runtime.format import delta as deltas
from weightswap_runtime.format.delta import ROWS, RUNS, Changed
from weightswap_runtime.native import Offsets

BLOCK = 1 << 20


def prefer_rows(patch: pytest.MonkeyPatch) -> None:
    """Let all writers of deltas write rows of weights of two dimensions and more."""

    def places(change: Changed) -> tuple[str, Offsets]:
        return (ROWS, change.rows()) if change.row else (RUNS, change.runs)

    patch.setattr(Changed, "places", places)
    patch.setattr(deltas, "BLOCK", BLOCK)  # rows are shorter than a block, whatever blocks the test has


def deltas_between(files: Sequence[Path], folder: Path) -> dict[tuple[int, int], Path]:
    """Write the deltas between every two weight files; every second one names rows."""
    paths = {}
    for number, (base, new) in enumerate(itertools.permutations(range(len(files)), 2)):
        with pytest.MonkeyPatch.context() as patch:
            if number % 2:
                prefer_rows(patch)
            paths[base, new] = write_delta(files[base], files[new], folder / f"d{base}{new}.safetensors").path
    return paths
