"""Overlay of a delta: its parts of weights are laid over copies of the blocks that they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.nonfinite import Counts, count_nonfinite, element_bytes
from weightswap_runtime.memory.arena import Arena, allocate
from weightswap_runtime.memory.patch import Span
from weightswap_runtime.tensors.digests import BLOCK, Blocks
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .reading import read_rows, write_rows
from .request import Base

MOST_PIECES = 16  # a block with more changed pieces is copied as a whole
Offsets = npt.NDArray[np.int64]
Pieces = Iterable[tuple[int, memoryview]]


class ByteRanges(NamedTuple):
    """Sorted, disjoint ranges of a weight's row-major bytes, and the new bytes of all ranges, end to end.

    `offsets` are the positions in `data` at which the bytes of each range begin.
    """

    begins: Offsets
    ends: Offsets
    offsets: Offsets
    data: memoryview

    @classmethod
    def of(cls, runs: Offsets, data: memoryview) -> ByteRanges:
        """Return the ranges of a delta file; `runs` is int64 of shape [ranges, 2]."""
        lengths = runs[:, 1] - runs[:, 0]
        return cls(runs[:, 0], runs[:, 1], np.cumsum(lengths) - lengths, data)

    def fit(self, size: int) -> bool:
        """Return True if the ranges are in order, within `size` bytes, and together as long as the data."""
        inner = bool((self.begins < self.ends).all() and (self.ends[:-1] <= self.begins[1:]).all())
        outer = not len(self.begins) or bool(self.begins[0] >= 0 and self.ends[-1] <= size)
        return inner and outer and int((self.ends - self.begins).sum()) == len(self.data)

    def blocks(self) -> list[int]:
        """Return the numbers of the blocks in which at least one byte is replaced."""
        if not len(self.begins):
            return []
        steps = np.zeros(int(self.ends[-1] - 1) // BLOCK + 2, np.int64)
        np.add.at(steps, self.begins // BLOCK, 1)
        np.add.at(steps, (self.ends - 1) // BLOCK + 1, -1)
        blocks: list[int] = np.flatnonzero(np.cumsum(steps)).tolist()
        return blocks

    def within(self, low: int, high: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset, counted from `low`, and the bytes of each piece between the bytes `low` and `high`."""
        first = int(np.searchsorted(self.ends, low, "right"))
        last = int(np.searchsorted(self.begins, high, "left"))
        for begin, end, offset in zip(*(side[first:last].tolist() for side in self[:3]), strict=True):
            inner, outer = max(begin, low), min(end, high)
            yield inner - low, self.data[offset + inner - begin : offset + outer - begin]


class Overlay(NamedTuple):
    """Result of laying parts over an arena's blocks: the new bytes, and the block digests of the changed weights.

    `nonfinite` has the counts of all weights that then have non-finite values.
    """

    spans: tuple[Span, ...]
    digests: dict[str, Blocks]
    nonfinite: dict[str, Counts]


class _Change(NamedTuple):
    """Change of one weight: its new block digests, and the differences in its counts of non-finite values.

    `was_finite` means that the replaced bytes need not be counted.
    """

    weight: NamedTensor
    was_finite: bool
    digests: list[bytes]
    differences: list[Counts]

    def record(self, old: memoryview, new: memoryview) -> None:
        """Count the non-finite values of whole elements before and after a replacement."""
        before = None if self.was_finite else count_nonfinite(self.weight.dtype, old)
        after = count_nonfinite(self.weight.dtype, new)
        if before or after:
            self.differences.append(Counts(0, 0).plus(after).plus(before, -1))


def overlay(parts: Mapping[str, ByteRanges], base: Base, workers: WorkerThreads, job: Job) -> Overlay:
    """Lay parts over copies of an arena's blocks; the arena is only read. Raises MemoryError and StageCancelled."""
    arena, before = base
    spans: list[Span] = []
    changes: dict[str, _Change] = {}
    tasks: list[Callable[[], None]] = []
    for name, part in parts.items():
        weight = arena.layout.weights[name]
        changes[name] = _Change(weight, name not in before.nonfinite, list(before.digests[name]), [])
        if weight.stride is None:
            tasks += _by_block(changes[name], part, arena, spans)
        else:
            tasks.append(_by_weight(changes[name], part, arena, spans, job))

    def work(task: Callable[[], None]) -> None:
        task()
        job.check()

    workers.run_all(work, tasks)
    nonfinite = dict(before.nonfinite)
    for name, change in changes.items():
        nonfinite[name] = reduce(Counts.plus, change.differences, nonfinite.get(name, Counts(0, 0)))
    return Overlay(
        tuple(spans),
        {name: tuple(change.digests) for name, change in changes.items()},
        {name: counts for name, counts in nonfinite.items() if any(counts)},
    )


def _by_block(change: _Change, part: ByteRanges, arena: Arena, spans: list[Span]) -> Iterator[Callable[[], None]]:
    """Yield the tasks that lay a part over a weight that the arena keeps in row-major order."""
    offset, size = arena.layout.slots[change.weight.name]
    element = element_bytes(change.weight.dtype) or 1
    for index in part.blocks():
        low, high = index * BLOCK, min((index + 1) * BLOCK, size)

        def work(index: int = index, low: int = low, high: int = high) -> None:
            block = arena.fetch(offset + low, high - low)
            pieces = list(part.within(low, low + len(block)))
            change.digests[index] = _digest(pieces, block)
            if len(pieces) > MOST_PIECES or any(begin % element or len(data) % element for begin, data in pieces):
                pieces = [(0, _merged(pieces, block))]
            for begin, data in pieces:
                change.record(block[begin : begin + len(data)], data)
            spans.extend(Span(offset + low + begin, data) for begin, data in pieces)

        yield work


def _digest(pieces: Pieces, block: memoryview) -> bytes:
    """Return the digest of a block with pieces laid over it; nothing is copied."""
    hasher, end = blake3(), 0
    for begin, data in pieces:
        hasher.update(block[end:begin])
        hasher.update(data)
        end = begin + len(data)
    hasher.update(block[end:])
    return hasher.digest()


def _merged(pieces: Pieces, block: memoryview) -> memoryview:
    content = memoryview(bytearray(block))
    _write_pieces(pieces, content)
    return content


def _write_pieces(pieces: Pieces, content: memoryview) -> None:
    for begin, data in pieces:
        content[begin : begin + len(data)] = data


def _by_weight(change: _Change, part: ByteRanges, arena: Arena, spans: list[Span], job: Job) -> Callable[[], None]:
    """Return the task that copies a whole weight whose dimensions the arena keeps in another order."""
    weight = change.weight
    slot = arena.layout.slots[weight.name]

    def work() -> None:
        served = arena.fetch(*slot)
        rows = read_rows(weight, served, job)
        _write_pieces(part.within(0, len(rows)), rows)
        for index in part.blocks():
            job.check()
            change.digests[index] = blake3(rows[index * BLOCK : (index + 1) * BLOCK]).digest()
        change.record(served, rows)
        content = memoryview(allocate(len(rows)))
        write_rows(weight, rows, content, job)
        spans.append(Span(slot.offset, content))

    return work
