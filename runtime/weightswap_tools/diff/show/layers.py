"""Names of weights as a grid: layers down, what is in each of them across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightswap_tools.module_tree import natural, split_name


class Grid(NamedTuple):
    """`names[row][column]`: the weight that is there, None where there is none."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]


def grid(names: Sequence[str]) -> Grid:
    """`encoder.layers.0.attn.q.weight` is `attn.q.weight` of `encoder.layers.0`: the first number ends a layer's name.

    A weight outside of numbered layers is in the row of its module, under its own name.
    """
    places = {name: _place(name) for name in sorted(names, key=natural)}
    rows = tuple(dict.fromkeys(row for row, _ in places.values()))
    columns = tuple(dict.fromkeys(column for _, column in places.values()))
    found = {place: name for name, place in places.items()}
    return Grid(rows, columns, tuple(tuple(found.get((row, column)) for column in columns) for row in rows))


def _place(name: str) -> tuple[str, str]:
    path, own = split_name(name)
    numbered = next((place for place, part in enumerate(path) if part.isascii() and part.isdecimal()), None)
    if numbered is None:
        return ".".join(path) or "(model)", own
    return ".".join(path[: numbered + 1]), ".".join([*path[numbered + 1 :], own])
