"""A heat map of layers and weights: how much each tensor changed, or its status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightswap_tools.diff import TensorDiff
from weightswap_tools.module_tree import natural, split_name
from weightswap_tools.reports.blocks import Block, HeatMap, Mark, Note

MOST_CELLS = 100_000
NEW_NAN, NEW_INF = "new NaN", "new Inf"
MARKS = (
    Mark(NEW_NAN, "NaN", "bad"),
    Mark(NEW_INF, "Inf", "bad"),
    Mark("removed", "\N{MINUS SIGN}"),
    Mark("added", "+"),
    Mark("reshaped", "⊡"),
    Mark("renamed", "→"),
    Mark("retyped", "≈"),
    Mark("changed", "≠"),
)


def change_map(tensors: Sequence[TensorDiff]) -> Block:
    """Return a map with a cell for each tensor, under its later name; or a note if there are none or too many."""
    cells = {tensor.name: _cell(tensor) for tensor in tensors}
    layers = grid(list(cells))
    if not cells:
        return Note("There are no tensors.")
    if len(layers.rows) * len(layers.columns) > MOST_CELLS:
        return Note(f"{len(layers.rows)} layers of {len(layers.columns)} kinds of weights are too many for a map.")
    values = tuple(tuple(cells[name] if name is not None else None for name in names) for names in layers.names)
    return HeatMap(layers.rows, layers.columns, values, "relative change", "log", "", MARKS)


def _cell(tensor: TensorDiff) -> float | str:
    """Return the relative change; or a mark, if it became NaN or Inf, or if values were not compared."""
    change = tensor.change
    if change is None:
        return 0.0 if tensor.status == "same" else tensor.status
    if change.new_nan or change.new_inf:
        return NEW_NAN if change.new_nan else NEW_INF
    return change.rel_change


class Grid(NamedTuple):
    """A grid of weights: `names[row][column]` is the weight in a cell, None if the cell is empty."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]


def grid(names: Sequence[str]) -> Grid:
    """Arrange weights in a grid with a row for each layer: `encoder.layers.0`, column `attn.q.weight`.

    A layer's name ends with its first number. A weight outside numbered layers is in the row of its module.
    """
    positions = {name: _row_and_column(name) for name in sorted(names, key=natural)}
    rows = tuple(dict.fromkeys(row for row, _ in positions.values()))
    columns = tuple(dict.fromkeys(column for _, column in positions.values()))
    names_at = {position: name for name, position in positions.items()}
    return Grid(rows, columns, tuple(tuple(names_at.get((row, column)) for column in columns) for row in rows))


def _row_and_column(name: str) -> tuple[str, str]:
    path, own = split_name(name)
    numbered = next((index for index, part in enumerate(path) if part.isascii() and part.isdecimal()), None)
    if numbered is None:
        return ".".join(path) or "(model)", own
    return ".".join(path[: numbered + 1]), ".".join([*path[numbered + 1 :], own])
