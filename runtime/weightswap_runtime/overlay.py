"""Parts of weights, laid over copies of the blocks that they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from .arena import Arena, allocate
from .digests import BLOCK, Blocks
from .job import Job
from .manifest import NamedTensor
from .patches import Span
from .reading import read_rows, write_rows
from .workers import Workers

MOST_PIECES = 16  # of a block that are copied one by one; with more of them the whole block is
Offsets = npt.NDArray[np.int64]
Pieces = Iterable[tuple[int, memoryview]]


class Parts(NamedTuple):
    """Ranges of a weight's row-major bytes, rising and apart, and the bytes that belong there, end to end.

    `places` are where the bytes of each range begin in `data`.
    """

    begins: Offsets
    ends: Offsets
    places: Offsets
    data: memoryview

    @classmethod
    def of(cls, runs: Offsets, data: memoryview) -> Parts:
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
        for begin, end, place in zip(*(side[first:last].tolist() for side in self[:3]), strict=True):
            inner, outer = max(begin, low), min(end, high)
            yield inner - low, self.data[place + inner - begin : place + outer - begin]


def overlay(
    parts: Mapping[str, Parts], arena: Arena, digests: Mapping[str, Blocks], workers: Workers, job: Job
) -> tuple[tuple[Span, ...], dict[str, Blocks]]:
    """Spans for an arena's blocks with the parts laid over them, and the new digests of the weights' blocks.

    The arena is only read. Raises MemoryError and StageCancelled.
    """
    spans: list[Span] = []
    changed = {name: list(digests[name]) for name in parts}
    tasks: list[Callable[[], None]] = []
    for name, part in parts.items():
        if arena.layout.weights[name].stride is None:
            tasks += _by_block(name, part, arena, changed[name], spans)
        else:
            tasks.append(_relaid(name, part, arena, changed[name], spans, job))

    def work(task: Callable[[], None]) -> None:
        task()
        job.check()

    workers.run_all(work, tasks)
    return tuple(spans), {name: tuple(blocks) for name, blocks in changed.items()}


def _by_block(
    name: str, part: Parts, arena: Arena, digests: list[bytes], spans: list[Span]
) -> Iterator[Callable[[], None]]:
    offset, size = arena.layout.slots[name]
    for index in part.blocks():
        low, high = index * BLOCK, min((index + 1) * BLOCK, size)

        def work(index: int = index, low: int = low, high: int = high) -> None:
            block = arena.fetch(offset + low, high - low)
            pieces = list(part.within(low, low + len(block)))
            digests[index] = _digest(pieces, block)
            if len(pieces) > MOST_PIECES:
                pieces = [(0, _merged(pieces, block))]
            spans.extend(Span(offset + low + place, data) for place, data in pieces)

        yield work


def _digest(pieces: Pieces, block: memoryview) -> bytes:
    """The digest of a block with pieces laid over it; nothing is copied."""
    hasher, end = blake3(), 0
    for place, data in pieces:
        hasher.update(block[end:place])
        hasher.update(data)
        end = place + len(data)
    hasher.update(block[end:])
    return hasher.digest()


def _merged(pieces: Pieces, block: memoryview) -> memoryview:
    content = memoryview(bytearray(block))
    _lay(pieces, content)
    return content


def _lay(pieces: Pieces, content: memoryview) -> None:
    for place, data in pieces:
        content[place : place + len(data)] = data


def _relaid(
    name: str, part: Parts, arena: Arena, digests: list[bytes], spans: list[Span], job: Job
) -> Callable[[], None]:
    """A weight whose dimensions the arena keeps in another order: as a whole."""
    weight: NamedTensor = arena.layout.weights[name]

    def work() -> None:
        rows = read_rows(weight, arena.fetch(*arena.layout.slots[name]), job)
        _lay(part.within(0, len(rows)), rows)
        for index in part.blocks():
            job.check()
            digests[index] = blake3(rows[index * BLOCK : (index + 1) * BLOCK]).digest()
        content = memoryview(allocate(len(rows)))
        write_rows(weight, rows, content, job)
        spans.append(Span(arena.layout.slots[name].offset, content))

    return work
