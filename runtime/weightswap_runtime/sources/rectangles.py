"""A tensor that lies in several files as rectangles, read as if it were in one.

A rectangle has its elements in row-major order, and so has the whole: the rows of a rectangle that are in some range of
the whole's bytes are next to each other in its file. Hence a range is read with one pass over each file that has a part
of it, scattered to where the rows belong, and nothing is gathered first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby, product, zip_longest
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from weightswap_runtime.tensors import row_major

from .byte_source import MOST_BUFFERS, ByteSource

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, in elements


class Rectangle(NamedTuple):
    """Part of a tensor, none of whose sizes is 0."""

    offsets: tuple[int, ...]  # in the tensor, in elements
    sizes: tuple[int, ...]  # as many
    source: ByteSource
    begin: int  # of its row-major bytes in the source


class Rectangles(ByteSource):
    """A tensor as a ByteSource: its row-major bytes, of rectangles that cover it once (see `grid_problem`).

    Whoever opened the sources of the rectangles closes them.
    """

    def __init__(self, where: str, shape: tuple[int, ...], rectangles: Iterable[Rectangle], itemsize: int) -> None:
        self.where, self.size = where, prod(shape) * itemsize
        self._rows = sorted((_Rows(each, shape, itemsize) for each in rectangles), key=lambda rows: rows.first)

    @property
    def unit(self) -> int | None:
        return self._rows[0].source.unit

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers with the bytes from `offset` on. Raises WeightFileError."""
        for buffer in buffers:
            for rows in self._rows:
                if rows.first < offset + len(buffer) and offset < rows.end:
                    rows.read_into(buffer, offset)
            offset += len(buffer)

    def await_stable_mtime(self) -> None:
        """Do nothing: this was done for each file when it was opened."""

    def check_unchanged(self, *, proven: bool = False) -> None:
        for rows in self._rows:
            rows.source.check_unchanged(proven=proven)


class _Rows:
    """The rows of a rectangle: its longest runs of bytes that are next to each other in the whole tensor, too."""

    def __init__(self, rectangle: Rectangle, shape: tuple[int, ...], itemsize: int) -> None:
        offsets, sizes, self.source, self._begin = rectangle
        cut = max((axis for axis, size in enumerate(shape) if sizes[axis] != size), default=0)
        steps = [step * itemsize for step in row_major(shape)]
        self._dims, self._steps = (1, *sizes[:cut]), (0, *steps[:cut])  # of the index of a row; without axes it is 0
        self._length = prod(sizes[cut:]) * itemsize
        self._rows = range(prod(self._dims))
        self.first = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
        self.end = int(self._start(self._rows[-1])) + self._length

    def _start(self, row: Any) -> Any:
        """Return where a row begins in the bytes of the whole. row: a number, or an array of numbers."""
        index = np.unravel_index(row, self._dims)
        return self.first + sum(place * step for place, step in zip(index, self._steps, strict=True))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill those bytes of a buffer that rows have; it stands for the bytes of the whole from `offset` on."""
        low = bisect_right(self._rows, offset - self._length, key=self._start)
        high = bisect_left(self._rows, offset + len(buffer), key=self._start)
        for first in range(low, high, MOST_BUFFERS):  # few views at a time: a row may have a single byte
            starts = (self._start(np.arange(first, min(first + MOST_BUFFERS, high))) - offset).tolist()
            parts = [buffer[max(0, start) : start + self._length] for start in starts]
            skipped = max(0, -starts[0])
            self.source.read_into(parts, self._begin + first * self._length + skipped)


def grid_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[str, tuple[int, ...]] | None:
    """Return why boxes are no grid over a tensor that has each part once, and the offsets of the part that shows it;
    None if they are one.

    Whoever saves parts cuts each dimension by itself. This takes no longer for many boxes than sorting them.
    """
    grid: list[list[int]] = []
    for axis, size in enumerate(shape):
        begins, end = list[int](), 0
        spans = sorted((offsets[axis], sizes[axis], offsets) for offsets, sizes in boxes)
        for (begin, length), same in groupby(spans, key=itemgetter(0, 1)):
            if begin != end:
                return f"along dimension {axis} parts end at {end}, and one begins at {begin}", next(same)[2]
            begins.append(begin)
            end = begin + length
        if end != size:
            return f"along dimension {axis} parts end at {end}, not at {size}", shape
        grid.append(begins)
    for found, cell in zip_longest(sorted(offsets for offsets, _ in boxes), product(*grid)):
        if found is None or (cell is not None and cell < found):
            return f"the part at {list(cell)} is missing", cell
        if found != cell:
            return f"two parts begin at {list(found)}", found
    return None
