"""The tensors of two sets of weights as a map of layers: how much each changed, or what else became of it."""

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
    """A cell for every tensor of either set, under its name in the second; a note where that are too many, or none."""
    cells = {tensor.name: _cell(tensor) for tensor in tensors}
    layers = grid(list(cells))
    if not cells:
        return Note("There are no tensors.")
    if len(layers.rows) * len(layers.columns) > MOST_CELLS:
        return Note(f"{len(layers.rows)} layers of {len(layers.columns)} kinds of weights are too many for a map.")
    values = tuple(tuple(cells[name] if name is not None else None for name in names) for names in layers.names)
    return HeatMap(layers.rows, layers.columns, values, "relative change", "log", "", MARKS)


def _cell(tensor: TensorDiff) -> float | str:
    """The relative change; a mark where there is a graver one, or where nothing was compared by value."""
    change = tensor.change
    if change is None:
        return 0.0 if tensor.status == "same" else tensor.status
    if change.new_nan or change.new_inf:
        return NEW_NAN if change.new_nan else NEW_INF
    return change.rel_change


class Grid(NamedTuple):
    """`names[row][column]`: the weight that is there, None where there is none."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]


def grid(names: Sequence[str]) -> Grid:
    """`encoder.layers.0.attn.q.weight` is `attn.q.weight` of `encoder.layers.0`: the first number ends a layer's name.

    A weight outside of numbered layers is in the row of its module, under its own name.
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
