"""Counts of dead rows: rows along the first dimension that are all zero. Pieces may begin and end within a row."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.tensors.content import TensorBytes, as_float64

from .moments import BLOCK, cut

Flags = NDArray[np.bool_]


class RowTally(NamedTuple):
    """The dead rows of a piece: how many of its inner rows are dead on each side, and how many are newly dead.

    `parts` are its first and last row, which other pieces may share: the index, and for each side whether it is zero
    here.
    """

    dead: tuple[int, ...]
    new: int
    parts: tuple[tuple[int, tuple[bool, ...]], ...] = ()


def added_up(tallies: Iterable[RowTally]) -> RowTally:
    """Merge the tallies of all pieces of a tensor, including rows that span several pieces."""
    counts, split_rows = [], defaultdict(list)
    for tally in tallies:
        counts.append([*tally.dead, tally.new])
        for row, flags in tally.parts:
            split_rows[row].append(flags)
    for parts in split_rows.values():
        flags = tuple(all(side) for side in zip(*parts, strict=True))
        counts.append([*flags, _is_new(flags)])
    *dead, new = np.sum(counts, axis=0).tolist()
    return RowTally(tuple(dead), new)


def _is_new(flags: tuple[bool, ...]) -> bool:
    return len(flags) > 1 and flags[1] and not flags[0]


def dead_rows(pieces: Sequence[TensorBytes], shape: tuple[int, ...], begin: int) -> RowTally:
    """Count the dead rows in pieces of one tensor, or of two, that start at element `begin`.

    Tensors of fewer than two dimensions have no rows.
    """
    length = math.prod(shape[1:])
    count = math.prod(pieces[0].shape)
    if len(shape) < 2 or not length or not count:
        return RowTally((0,) * len(pieces), 0)
    first, last = begin // length, (begin + count - 1) // length
    after_first = min(count, (first + 1) * length - begin)
    before_last = max(after_first, last * length - begin)
    parts = [(first, _zeros(pieces, 0, after_first))]
    parts += [(last, _zeros(pieces, before_last, count))] if last > first else []
    flags = [_dead(cut(piece, after_first, before_last), length) for piece in pieces]
    new = int((flags[1] & ~flags[0]).sum()) if len(flags) > 1 else 0
    return RowTally(tuple(int(side.sum()) for side in flags), new, tuple(parts))


def _zeros(pieces: Sequence[TensorBytes], start: int, stop: int) -> tuple[bool, ...]:
    return tuple(_is_zero(cut(piece, start, stop)) for piece in pieces)


def _is_zero(piece: TensorBytes) -> bool:
    count = math.prod(piece.shape)
    return not any(as_float64(cut(piece, start, min(start + BLOCK, count))).any() for start in range(0, count, BLOCK))


def _dead(rows: TensorBytes, length: int) -> Flags:
    """Return flags of whole rows that are zero. The first element alone rules out most rows."""
    count = rows.shape[0] // length
    if not count:
        return np.zeros(0, np.bool_)
    table = np.frombuffer(rows.data, np.uint8).reshape(count, -1)
    size = table.shape[1] // length
    dead: Flags = _values(rows.dtype, table[:, :size], size) == 0
    candidates = np.flatnonzero(dead)
    step = max(1, BLOCK // length)
    for start in range(0, len(candidates), step):
        group = candidates[start : start + step]
        dead[group] = ~_values(rows.dtype, table[group], size).reshape(len(group), -1).any(axis=1)
    return dead


def _values(dtype: str, table: NDArray[np.uint8], size: int) -> NDArray[Any]:
    """Return the elements of `size` bytes in a table of bytes, as 64-bit floats."""
    return as_float64(TensorBytes(dtype, (table.size // size,), np.ascontiguousarray(table).reshape(-1).data))
