"""Parts of weights, laid over copies of the blocks that they change."""

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

MOST_PIECES = 16  # of a block that are copied one by one; with more of them the whole block is
Offsets = npt.NDArray[np.int64]
Pieces = Iterable[tuple[int, memoryview]]


class ByteRanges(NamedTuple):
    """Ranges of a weight's row-major bytes, rising and apart, and the bytes that belong there, end to end.

    `offsets` are where the bytes of each range begin in `data`.
    """

    begins: Offsets
    ends: Offsets
    offsets: Offsets
    data: memoryview

    @classmethod
    def of(cls, runs: Offsets, data: memoryview) -> ByteRanges:
        """runs: int64 of shape [ranges, 2]."""
        lengths = runs[:, 1] - runs[:, 0]
        return cls(runs[:, 0], runs[:, 1], np.cumsum(lengths) - lengths, data)

    def fit(self, size: int) -> bool:
        """Whether the ranges are in order, within `size` bytes, and as long as the data."""
        inner = bool((self.begins < self.ends).all() and (self.ends[:-1] <= self.begins[1:]).all())
        outer = not len(self.begins) or bool(self.begins[0] >= 0 and self.ends[-1] <= size)
        return inner and outer and int((self.ends - self.begins).sum()) == len(self.data)

    def blocks(self) -> list[int]:
        """The blocks of which any byte is replaced."""
        if not len(self.begins):
            return []
        steps = np.zeros(int(self.ends[-1] - 1) // BLOCK + 2, np.int64)
        np.add.at(steps, self.begins // BLOCK, 1)
        np.add.at(steps, (self.ends - 1) // BLOCK + 1, -1)
        blocks: list[int] = np.flatnonzero(np.cumsum(steps)).tolist()
        return blocks

    def within(self, low: int, high: int) -> Iterator[tuple[int, memoryview]]:
        """What belongs into the bytes `low` to `high`: where, counted from `low`, and the bytes."""
        first = int(np.searchsorted(self.ends, low, "right"))
        last = int(np.searchsorted(self.begins, high, "left"))
        for begin, end, offset in zip(*(side[first:last].tolist() for side in self[:3]), strict=True):
            inner, outer = max(begin, low), min(end, high)
            yield inner - low, self.data[offset + inner - begin : offset + outer - begin]


class Laid(NamedTuple):
    """An arena's blocks with parts laid over them: spans, the changed weights' digests, and what is not finite then.

    `nonfinite` is that of all weights.
    """

    spans: tuple[Span, ...]
    digests: dict[str, Blocks]
    nonfinite: dict[str, Counts]


class _Changing(NamedTuple):
    """A weight that changes: its new digests, and by how much the numbers of what is not finite change.

    was_finite: so that there is nothing to count in what is replaced.
    """

    weight: NamedTensor
    was_finite: bool
    digests: list[bytes]
    changes: list[Counts]

    def replace(self, old: memoryview, new: memoryview) -> None:
        """Count what goes and what comes: whole elements."""
        gone = None if self.was_finite else count_nonfinite(self.weight.dtype, old)
        come = count_nonfinite(self.weight.dtype, new)
        if gone or come:
            self.changes.append(Counts(0, 0).plus(come).plus(gone, -1))


def overlay(parts: Mapping[str, ByteRanges], base: Base, workers: WorkerThreads, job: Job) -> Laid:
    """Lay parts over copies of what an arena has, which is only read. Raises MemoryError and StageCancelled."""
    arena, before = base
    spans: list[Span] = []
    changing: dict[str, _Changing] = {}
    tasks: list[Callable[[], None]] = []
    for name, part in parts.items():
        weight = arena.layout.weights[name]
        changing[name] = _Changing(weight, name not in before.nonfinite, list(before.digests[name]), [])
        if weight.stride is None:
            tasks += _by_block(changing[name], part, arena, spans)
        else:
            tasks.append(_relaid(changing[name], part, arena, spans, job))

    def work(task: Callable[[], None]) -> None:
        task()
        job.check()

    workers.run_all(work, tasks)
    nonfinite = dict(before.nonfinite)
    for name, each in changing.items():
        nonfinite[name] = reduce(Counts.plus, each.changes, nonfinite.get(name, Counts(0, 0)))
    return Laid(
        tuple(spans),
        {name: tuple(each.digests) for name, each in changing.items()},
        {name: counts for name, counts in nonfinite.items() if any(counts)},
    )


def _by_block(changing: _Changing, part: ByteRanges, arena: Arena, spans: list[Span]) -> Iterator[Callable[[], None]]:
    offset, size = arena.layout.slots[changing.weight.name]
    whole = element_bytes(changing.weight.dtype) or 1
    for index in part.blocks():
        low, high = index * BLOCK, min((index + 1) * BLOCK, size)

        def work(index: int = index, low: int = low, high: int = high) -> None:
            block = arena.fetch(offset + low, high - low)
            pieces = list(part.within(low, low + len(block)))
            changing.digests[index] = _digest(pieces, block)
            if len(pieces) > MOST_PIECES or any(begin % whole or len(data) % whole for begin, data in pieces):
                pieces = [(0, _merged(pieces, block))]
            for begin, data in pieces:
                changing.replace(block[begin : begin + len(data)], data)
            spans.extend(Span(offset + low + begin, data) for begin, data in pieces)

        yield work


def _digest(pieces: Pieces, block: memoryview) -> bytes:
    """The digest of a block with pieces laid over it; nothing is copied."""
    hasher, end = blake3(), 0
    for begin, data in pieces:
        hasher.update(block[end:begin])
        hasher.update(data)
        end = begin + len(data)
    hasher.update(block[end:])
    return hasher.digest()


def _merged(pieces: Pieces, block: memoryview) -> memoryview:
    content = memoryview(bytearray(block))
    _lay(pieces, content)
    return content


def _lay(pieces: Pieces, content: memoryview) -> None:
    for begin, data in pieces:
        content[begin : begin + len(data)] = data


def _relaid(changing: _Changing, part: ByteRanges, arena: Arena, spans: list[Span], job: Job) -> Callable[[], None]:
    """A weight whose dimensions the arena keeps in another order: as a whole."""
    weight = changing.weight
    slot = arena.layout.slots[weight.name]

    def work() -> None:
        kept = arena.fetch(*slot)
        rows = read_rows(weight, kept, job)
        _lay(part.within(0, len(rows)), rows)
        for index in part.blocks():
            job.check()
            changing.digests[index] = blake3(rows[index * BLOCK : (index + 1) * BLOCK]).digest()
        changing.replace(kept, rows)
        content = memoryview(allocate(len(rows)))
        write_rows(weight, rows, content, job)
        spans.append(Span(slot.offset, content))

    return work
