"""The map of a comparison: every tensor of either file has a cell with its change."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from weightswap_tools.diff import WeightsDiff, compare_weights
from weightswap_tools.diff import show as mapping
from weightswap_tools.diff.documents import Status, TensorDiff
from weightswap_tools.diff.show import MARKS, change_map, weights_report
from weightswap_tools.reports.blocks import HeatMap, Note, Table

Tensors = dict[str, torch.Tensor]
Compared = Callable[[Tensors, Tensors], WeightsDiff]
BEFORE = {
    "layers.0.w": torch.ones(4),
    "layers.0.zeros": torch.zeros(2),
    "layers.0.gone": torch.full((3,), 5.0),
    "layers.1.w": torch.ones(4),
    "layers.1.zeros": torch.zeros(2),
    "layers.1.old": torch.full((2,), 7.0),
    "head.weight": torch.ones(2, 2),
    "head.nan": torch.ones(2),
    "head.inf": torch.ones(2),
    "head.both": torch.ones(2),
    "head.half": torch.ones(2),
}
AFTER = {
    "layers.0.w": torch.full((4,), 1.5),
    "layers.0.zeros": torch.zeros(2),
    "layers.0.more": torch.ones(9),
    "layers.1.w": torch.ones(4),
    "layers.1.zeros": torch.ones(2),
    "layers.1.new": torch.full((2,), 7.0),
    "head.weight": torch.ones(4),
    "head.nan": torch.tensor([1.0, math.nan]),
    "head.inf": torch.tensor([1.0, math.inf]),
    "head.both": torch.tensor([math.inf, math.nan]),
    "head.half": torch.ones(2, dtype=torch.bfloat16),
}
CELLS = {
    "layers.0.w": 0.5,
    "layers.0.zeros": 0.0,
    "layers.0.gone": "removed",
    "layers.0.more": "added",
    "layers.1.w": 0.0,
    "layers.1.zeros": math.inf,
    "layers.1.new": "renamed",
    "head.weight": "reshaped",
    "head.nan": "new NaN",
    "head.inf": "new Inf",
    "head.both": "new NaN",
    "head.half": 0.0,
}


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    def compare(before: Tensors, after: Tensors) -> WeightsDiff:
        paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
        for path, tensors in zip(paths, (before, after), strict=True):
            safetensors.torch.save_file(tensors, path)
        return compare_weights(*paths)

    return compare


def cells(found: HeatMap) -> dict[str, float | str]:
    return {
        f"{row}.{column}": value
        for row, values in zip(found.rows, found.values, strict=True)
        for column, value in zip(found.columns, values, strict=True)
        if value is not None
    }


def test_every_tensor_of_either_file_has_a_cell(compared: Compared) -> None:
    found = change_map(compared(BEFORE, AFTER).tensors)
    assert isinstance(found, HeatMap)
    assert cells(found) == CELLS


def test_the_table_says_the_same(compared: Compared) -> None:
    blocks = [block for section in weights_report(compared(BEFORE, AFTER), {}).sections for block in section.blocks]
    (table,) = (block for block in blocks if getattr(block, "caption", "") == "What changed")
    assert isinstance(table, Table)
    told = {str(row[1]): str(row[2]) for row in table.rows}
    assert told.keys() == CELLS.keys()
    assert told["head.weight"] == "F32[2, 2] became F32[4]"
    marked = {name: cell for name, cell in CELLS.items() if cell in ("removed", "added", "renamed")}
    assert {name: told[name].partition(",")[0].split()[0] for name in marked} == marked


def test_every_cell_without_a_number_has_a_mark() -> None:
    statuses = set(Status.__args__) - {"same"}
    assert statuses <= {mark.text for mark in MARKS}
    found = change_map([TensorDiff(name=f"w{status}", status=status) for status in sorted(statuses)])
    assert isinstance(found, HeatMap)
    assert {value for row in found.values for value in row} == statuses


def test_no_tensors_are_no_map() -> None:
    assert change_map([]) == Note("There are no tensors.")


def test_too_many_cells_are_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MOST_CELLS", 3)
    tensors = [TensorDiff(name=f"layers.{layer}.{name}", status="same") for layer in (0, 1) for name in "ab"]
    assert change_map(tensors) == Note("2 layers of 2 kinds of weights are too many for a map.")
