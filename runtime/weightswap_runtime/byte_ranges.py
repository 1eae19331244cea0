"""Ranges of a memory's bytes, such as the changed rows of a table, with the new bytes of all of them end to end.

There may be millions, so they are arrays, and nothing takes a Python step for each (native.c; numpy, which is slower,
where that was not compiled).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64
from typing import NamedTuple

import numpy as np

from . import native
from .native import Offsets, address
from .tensors import BLOCK

_NO_DATA = memoryview(b"")
CHUNK = 1 << 10  # bytes of a leaf of BLAKE3's tree


class ByteRanges(NamedTuple):
    """Ranges in ascending order, without overlap and not empty, and the new bytes of all of them.

    The arrays and the data are shared, not copied.
    """

    begins: Offsets
    ends: Offsets
    offsets: Offsets  # in `data`, of the bytes of each range
    data: memoryview

    @classmethod
    def of(cls, runs: Offsets, data: memoryview) -> ByteRanges:
        """Return ranges from an array [ranges, 2] of begins and ends; `fit` tells whether they are in order."""
        begins, ends = np.ascontiguousarray(runs[:, 0]), np.ascontiguousarray(runs[:, 1])
        lengths = ends - begins
        return cls(begins, ends, np.cumsum(lengths) - lengths, data)

    @classmethod
    def of_rows(cls, ids: Offsets, width: int, data: memoryview) -> ByteRanges:
        """Return the ranges of a table's rows, of `width` bytes each."""
        begins = ids * width
        return cls(begins, begins + width, np.arange(len(ids), dtype=np.int64) * width, data)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def fit(self, size: int) -> bool:
        """Return True if the ranges are in order, within `size` bytes, and together as long as the data."""
        inner = bool((self.begins < self.ends).all() and (self.ends[:-1] <= self.begins[1:]).all())
        outer = not len(self.begins) or bool(self.begins[0] >= 0 and self.ends[-1] <= size)
        return inner and outer and int((self.ends - self.begins).sum()) == len(self.data)

    @property
    def width(self) -> int | None:
        """The length of all ranges; None if they differ, or if there is none."""
        lengths = self.ends - self.begins
        return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else None

    def rows(self, width: int) -> Offsets:
        """Return the numbers of rows of this width that the ranges are, counted from the first range."""
        numbers: Offsets = (self.begins - self.begins[0]) // width
        return numbers

    def are_multiples(self, unit: int) -> bool:
        """Return True if every range begins and ends at a multiple of `unit` bytes."""
        return not ((self.begins % unit).any() or (self.ends % unit).any())

    def chunks(self) -> Offsets:
        """Return the numbers of the chunks of 1 KiB in which at least one byte is replaced, in ascending order."""
        return _touched(self.begins // CHUNK, (self.ends - 1) // CHUNK)

    def blocks(self) -> Offsets:
        """Return the numbers of the blocks of 1 MiB in which at least one byte is replaced, in ascending order."""
        return _touched(self.begins // BLOCK, (self.ends - 1) // BLOCK)

    def within(self, low: int, high: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset, counted from `low`, and the bytes of each piece between the bytes `low` and `high`."""
        part = self.reaching(low, high)
        for begin, end, offset in zip(*(side.tolist() for side in part[:3]), strict=True):
            inner, outer = max(begin, low), min(end, high)
            yield inner - low, self.data[offset + inner - begin : offset + outer - begin]

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Yield where each range begins, and its bytes."""
        for begin, end, offset in zip(*(side.tolist() for side in self[:3]), strict=True):
            yield begin, self.data[offset : offset + end - begin]

    def reaching(self, low: int, high: int) -> ByteRanges:
        """Return the ranges that have bytes between `low` and `high`, uncut, over the same data."""
        first = int(np.searchsorted(self.ends, low, "right"))
        last = int(np.searchsorted(self.begins, high, "left"))
        return self._replace(
            begins=self.begins[first:last], ends=self.ends[first:last], offsets=self.offsets[first:last]
        )

    def moved(self, offset: int) -> ByteRanges:
        """Return the same bytes for places that are so much further on."""
        return self._replace(begins=self.begins + offset, ends=self.ends + offset)

    def split(self, most: int) -> Iterator[ByteRanges]:
        """Yield consecutive parts of at most `most` bytes, each with its part of the data; a longer range is cut."""
        lengths = self.ends - self.begins
        if (lengths > most).any():
            yield from self._cut(most).split(most)
            return
        stops, first = np.cumsum(lengths), 0
        while first < len(self.begins):
            start = int(stops[first - 1]) if first else 0
            last = int(np.searchsorted(stops, start + most, "right"))
            side = slice(first, last)
            data = self.data[start : int(stops[last - 1])]
            yield ByteRanges(self.begins[side], self.ends[side], stops[side] - lengths[side] - start, data)
            first = last

    def joined(self, apart: int) -> ByteRanges:
        """Return ranges, without data, that cover these and the bytes between any two that are so near or nearer."""
        new = np.flatnonzero(self.begins[1:] - self.ends[:-1] > apart) + 1
        if len(new) >= len(self.begins) - 1:
            return self
        return ByteRanges(
            self.begins[np.append(0, new)],
            self.ends[np.append(new - 1, -1)],
            np.zeros(len(new) + 1, np.int64),
            _NO_DATA,
        )

    def _cut(self, most: int) -> ByteRanges:
        """Return the same ranges in pieces of at most `most` bytes."""
        lengths = self.ends - self.begins
        counts = -(-lengths // most)
        steps = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        begins = np.repeat(self.begins, counts) + steps
        ends = np.minimum(begins + most, np.repeat(self.ends, counts))
        return ByteRanges(begins, ends, np.repeat(self.offsets, counts) + steps, self.data)


class Layers:
    """Changes of several memories that are laid over each other, in their order; of each byte the last is kept."""

    def __init__(self) -> None:
        self._parts: dict[str, list[ByteRanges]] = {}
        self._merged = self._fresh = 0  # bytes

    def add(self, changes: Mapping[str, ByteRanges]) -> None:
        """Lay changes, by the names of what they change, over those before; their data must be end to end."""
        for name, part in changes.items():
            self._parts.setdefault(name, []).append(part)
            self._fresh += part.nbytes
        if self._fresh > self._merged:  # so many changes of the same rows take little memory, and no quadratic time
            self.merged()

    def merged(self) -> dict[str, ByteRanges]:
        """Return what the changes are together, with their data end to end."""
        for parts in self._parts.values():
            parts[:] = [layered(parts)]
        self._fresh, self._merged = 0, sum(parts[0].nbytes for parts in self._parts.values())
        return {name: parts[0] for name, parts in self._parts.items()}


def layered(parts: Sequence[ByteRanges]) -> ByteRanges:
    """Return what is left of parts of one memory that are laid over it in their order, with the data end to end."""
    if len(parts) == 1:
        return parts[0]
    # sides are in order already, which a stable sort uses; np.unique would take ten times as long
    edges = np.sort(np.concatenate([side for part in parts for side in part[:2]]), kind="stable")
    edges = edges[np.diff(edges, prepend=-1) != 0]
    owners = np.full(len(edges), -1)  # which part has the bytes from each edge to the next
    for number, part in enumerate(parts):
        steps = np.zeros(len(edges), np.int64)
        steps[np.searchsorted(edges, part.begins)] += 1
        steps[np.searchsorted(edges, part.ends)] -= 1
        owners[np.cumsum(steps) > 0] = number
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    kept = owners[firsts] >= 0  # after the last edge there is nothing
    begins, ends, owners = edges[firsts[kept]], edges[firsts[1:][kept[:-1]]], owners[firsts[kept]]
    lengths = ends - begins
    whole = ByteRanges.of(np.stack([begins, ends], axis=1), memoryview(bytearray(int(lengths.sum()))))
    for number, part in enumerate(parts):
        mine = np.flatnonzero(owners == number)
        if len(mine):
            source = np.searchsorted(part.begins, begins[mine], "right") - 1
            taken = _from(part.offsets[source] + begins[mine] - part.begins[source], lengths[mine])
            gather(part.data, taken)
            scatter(whole.data, _from(whole.offsets[mine], lengths[mine])._replace(data=taken.data))
    return whole


def _from(begins: Offsets, lengths: Offsets) -> ByteRanges:
    """Return ranges from where they begin, with room for their bytes."""
    runs = np.stack([begins, begins + lengths], axis=1)
    return ByteRanges.of(runs, memoryview(bytearray(int(lengths.sum()))))


def scatter(memory: memoryview, ranges: ByteRanges) -> None:
    """Write the ranges' bytes, which must be end to end in the data, as `split` yields them, into a memory."""
    if native.library is not None:
        native.library.scatter(address(memory), *_sides(ranges), address(ranges.data))
        return
    if (width := ranges.width) is not None:
        _windows(memory, width)[ranges.begins] = np.frombuffer(ranges.data, np.uint8).reshape(-1, width)
        return
    for begin, end, offset in zip(*(side.tolist() for side in ranges[:3]), strict=True):
        memory[begin:end] = ranges.data[offset : offset + end - begin]


def gather(memory: memoryview, ranges: ByteRanges) -> None:
    """Fill the ranges' data, end to end, with the bytes that a memory has there."""
    if native.library is not None:
        native.library.gather(address(memory), *_sides(ranges), address(ranges.data))
        return
    if (width := ranges.width) is not None:
        np.frombuffer(ranges.data, np.uint8).reshape(-1, width)[:] = _windows(memory, width)[ranges.begins]
        return
    for begin, end, offset in zip(*(side.tolist() for side in ranges[:3]), strict=True):
        ranges.data[offset : offset + end - begin] = memory[begin:end]


def copy(target: memoryview, source: memoryview, ranges: ByteRanges) -> None:
    """Copy the ranges from one memory to the same places of another; their data is not used."""
    if native.library is not None:
        native.library.copy(address(target), address(source), *_sides(ranges))
        return
    if (width := ranges.width) is not None:
        _windows(target, width)[ranges.begins] = _windows(source, width)[ranges.begins]
        return
    for begin, end in zip(ranges.begins.tolist(), ranges.ends.tolist(), strict=True):
        target[begin:end] = source[begin:end]


def _sides(ranges: ByteRanges) -> tuple[object, ...]:
    return address(ranges.begins), address(ranges.ends), c_int64(len(ranges.begins))


def _windows(memory: memoryview, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return a view of the `width` bytes that begin at each byte of a memory."""
    flat = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (len(flat) - width + 1, width), (1, 1))


def _touched(first: Offsets, last: Offsets) -> Offsets:
    """Return the ascending numbers from each of `first` to that of `last`, both ascending, each number once."""
    counts = last - first + 1
    steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return distinct(np.repeat(first, counts) + steps if (counts > 1).any() else first)


def distinct(numbers: Offsets) -> Offsets:
    """Return ascending numbers, each once."""
    return numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]
