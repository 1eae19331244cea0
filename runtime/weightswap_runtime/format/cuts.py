"""The part of a weight that one rank has, as bytes of the whole.

A cut goes along one dimension, so that the rank's bytes come again and again: of each `period` bytes of the row-major
whole those from `low` on, `width` of them. They are in the same order in its part: a contiguous range of the whole is a
contiguous range of the part, or nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from weightswap_runtime.byte_ranges import ByteRanges, gather
from weightswap_runtime.tensors import BLOCK, DTYPES

from .manifest import Cut, NamedTensor, Split

_AT_ONCE = 8 << 20  # bytes that a rank tells the others at once
_DIGEST = 32  # bytes


class Share(NamedTuple):
    """The bytes of a weight that a rank has."""

    period: int
    low: int
    width: int

    @classmethod
    def of(cls, weight: NamedTensor, cut: Cut, size: int, rank: int) -> Share:
        """Return the share of a rank, of `size`, in a weight with a valid cut."""
        inner = prod(weight.shape[cut.dim + 1 :]) * DTYPES[weight.dtype].bits // 8
        period = weight.shape[cut.dim] // cut.groups * inner
        width = period // (size // cut.repeat)
        return cls(period, rank // cut.repeat * width, width)

    def before(self, place: int) -> int:
        """Return how many bytes of the part come from bytes of the whole before a place: the place in the part."""
        if not self.period:
            return 0
        periods, rest = divmod(place, self.period)
        return periods * self.width + min(max(0, rest - self.low), self.width)

    def gather(self, begin: int, data: memoryview, part: memoryview) -> None:
        """Fill `part` with the rank's bytes of `data`, which are those of the whole from `begin` on."""
        for whole, mine in self._views(begin, data, part):
            mine[...] = whole

    def spread(self, begin: int, part: memoryview, data: memoryview) -> None:
        """Write the rank's bytes into `data`, which are those of the whole from `begin` on: the reverse of `gather`."""
        for whole, mine in self._views(begin, data, part):
            whole[...] = mine

    def _views(self, begin: int, data: memoryview, part: memoryview) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield views of the same bytes in both: of a period that has begun before, of whole ones, and of the last."""
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(part, np.uint8)
        head = min(len(source), -begin % self.period)
        body = (len(source) - head) // self.period * self.period
        done = self.before(begin + head) - self.before(begin)
        low = max(0, self.low - begin % self.period)  # of the head
        yield source[low : low + done], target[:done]
        rows = source[head : head + body].reshape(-1, self.period)[:, self.low : self.low + self.width]
        yield rows, target[done : done + rows.size].reshape(rows.shape)
        done += rows.size
        tail = head + body + self.low
        yield source[tail : tail + len(target) - done], target[done:]

    def cut(self, ranges: ByteRanges) -> ByteRanges:
        """Return the rank's bytes of ranges of the whole, at their places in its part, with the data end to end."""
        if not self.period:
            return ranges
        first = ranges.begins // self.period
        counts = (ranges.ends - 1) // self.period - first + 1
        steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        periods = np.repeat(first, counts) + steps
        lows = periods * self.period + self.low
        begins = np.maximum(np.repeat(ranges.begins, counts), lows)
        ends = np.minimum(np.repeat(ranges.ends, counts), lows + self.width)
        kept = begins < ends
        begins, lengths = begins[kept], (ends - begins)[kept]
        data = memoryview(bytearray(int(lengths.sum())))
        if data:
            sources = begins + np.repeat(ranges.offsets - ranges.begins, counts)[kept]
            gather(ranges.data, ByteRanges.of(np.stack([sources, sources + lengths], axis=1), data))
        places = begins - lows[kept] + periods[kept] * self.width
        return ByteRanges.of(np.stack([places, places + lengths], axis=1), data)


class Rank(NamedTuple):
    """One of the ranks that share weights."""

    split: Split
    number: int

    def share(self, weight: NamedTensor) -> Share | None:
        """Return the bytes of a weight that this rank has; None for the whole."""
        cut = self.split.cuts.get(weight.name)
        return None if cut is None else Share.of(weight, cut, self.split.size, self.number)

    def shares(self, weight: NamedTensor) -> list[Share]:
        """Return the bytes that each rank has of a weight that is cut."""
        cut, size = self.split.cuts[weight.name], self.split.size
        return [Share.of(weight, cut, size, rank) for rank in range(size)]

    def part(self, weight: NamedTensor) -> NamedTensor:
        """Return a weight as this rank has it."""
        cut = self.split.cuts.get(weight.name)
        return weight if cut is None else part_of_rank(weight, cut, self.split.size)


def part_of_rank(weight: NamedTensor, cut: Cut, size: int) -> NamedTensor:
    """Return a weight as one rank, of `size`, has it: with the shape of the part."""
    shape = list(weight.shape)
    shape[cut.dim] //= size // cut.repeat
    return msgspec.structs.replace(weight, shape=tuple(shape))


class SharedChange:
    """Change of a weight of which each rank has a part, whose digests no rank can tell alone.

    Of a changed block that one rank has as a whole, the first that has it tells the digest; of any other each tells
    what it has, but ranks that have the same, of which one does; the others hold what it tells against what they have.
    """

    def __init__(self, shares: Sequence[Share], rank: int, nbytes: int, blocks: Sequence[int]) -> None:
        """shares: of all ranks. nbytes: of the whole weight. blocks: the numbers of those that change, ascending."""
        self._shares, self._nbytes = shares, nbytes
        self.blocks = blocks
        self._first = shares.index(shares[rank])  # the rank that tells what this one has
        self._tells = self._first == rank
        self._mine: dict[int, bytes] = {}

    def note(self, block: int, content: Callable[[int, int], memoryview]) -> None:
        """Keep what is to tell of a block. content: returns new bytes of this rank's part, between two places there."""
        spans = self._spans(block)
        if self._first in spans:
            begin, end = self._range(block)
            share = self._shares[self._first]
            data = content(share.before(begin), share.before(end))
            self._mine[block] = blake3(data).digest() if spans[self._first] == end - begin else bytes(data)

    def told(self, block: int) -> bytes:
        """Return what this rank tells of a block."""
        return self._mine.get(block, b"") if self._tells else b""

    def lengths(self, block: int) -> dict[int, int]:
        """Return how many bytes each rank tells of a block, for those that do."""
        begin, end = self._range(block)
        return {rank: _DIGEST if span == end - begin else span for rank, span in self._spans(block).items()}

    def digest(self, block: int, told: Mapping[int, memoryview]) -> bytes:
        """Return the digest of a block from what ranks have told; for what this rank has, too, from that."""
        begin, end = self._range(block)
        if block in self._mine:
            told = {**told, self._first: memoryview(self._mine[block])}
        spans = self._spans(block)
        if any(span == end - begin for span in spans.values()):
            [digest] = told.values()
            return bytes(digest)
        whole = memoryview(bytearray(end - begin))
        for rank, part in told.items():
            self._shares[rank].spread(begin, part, whole)
        return blake3(whole).digest()

    def _range(self, block: int) -> tuple[int, int]:
        return block * BLOCK, min((block + 1) * BLOCK, self._nbytes)

    def _spans(self, block: int) -> dict[int, int]:
        """Return how many of a block's bytes those ranks have that tell of it."""
        begin, end = self._range(block)
        spans = {rank: share.before(end) - share.before(begin) for rank, share in enumerate(self._shares)}
        for rank, span in spans.items():
            if span == end - begin:
                return {rank: span}
        return {rank: span for rank, span in spans.items() if span and self._shares.index(self._shares[rank]) == rank}


def digests_together(
    changes: Mapping[str, SharedChange], exchange: Callable[[bytes], Sequence[bytes]]
) -> dict[str, dict[int, bytes]]:
    """Return the digests of the changed blocks, by weight and number. All ranks call this with the same changes.

    exchange: tells all ranks bytes, as many on each, and returns those of all, by rank.
    """
    found: dict[str, dict[int, bytes]] = {name: {} for name in changes}
    for items, most in _rounds(changes):
        mine = b"".join(changes[name].told(block) for name, block in items)
        rest = [memoryview(each) for each in exchange(mine.ljust(most, b"\0"))]
        for name, block in items:
            told = {}
            for rank, length in changes[name].lengths(block).items():
                told[rank], rest[rank] = rest[rank][:length], rest[rank][length:]
            found[name][block] = changes[name].digest(block, told)
    return found


def _rounds(changes: Mapping[str, SharedChange]) -> Iterator[tuple[list[tuple[str, int]], int]]:
    """Yield groups of blocks, and how many bytes a rank tells of them at most: about _AT_ONCE."""
    items: list[tuple[str, int]] = []
    size = 0
    for name, change in changes.items():
        for block in change.blocks:
            more = max(change.lengths(block).values())
            if items and size + more > _AT_ONCE:
                yield items, size
                items, size = [], 0
            items.append((name, block))
            size += more
    if items:
        yield items, size
