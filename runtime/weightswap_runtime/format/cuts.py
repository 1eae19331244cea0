"""The part of a weight that one rank has, as bytes of the whole.

A cut goes along one dimension, so that the rank's bytes come again and again: of each `period` bytes of the row-major
whole those from `low` on, `width` of them. They are in the same order in its part: a contiguous range of the whole is a
contiguous range of the part, or nothing of it.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from weightswap_runtime.tensors import DTYPES

from .manifest import Cut, NamedTensor, Split


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
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(part, np.uint8)
        head = min(len(source), -begin % self.period)
        body = (len(source) - head) // self.period * self.period
        done = self.before(begin + head) - self.before(begin)
        low = max(0, self.low - begin % self.period)  # of the head
        target[:done] = source[low : low + done]
        rows = source[head : head + body].reshape(-1, self.period)[:, self.low : self.low + self.width]
        target[done : done + rows.size].reshape(rows.shape)[...] = rows
        done += rows.size
        tail = head + body + self.low
        target[done:] = source[tail : tail + len(target) - done]


class Rank(NamedTuple):
    """One of the ranks that share weights."""

    split: Split
    number: int

    def share(self, weight: NamedTensor) -> Share | None:
        """Return the bytes of a weight that this rank has; None for the whole."""
        cut = self.split.cuts.get(weight.name)
        return None if cut is None else Share.of(weight, cut, self.split.size, self.number)

    def part(self, weight: NamedTensor) -> NamedTensor:
        """Return a weight as this rank has it."""
        cut = self.split.cuts.get(weight.name)
        return weight if cut is None else part_of_rank(weight, cut, self.split.size)


def part_of_rank(weight: NamedTensor, cut: Cut, size: int) -> NamedTensor:
    """Return a weight as one rank, of `size`, has it: with the shape of the part."""
    shape = list(weight.shape)
    shape[cut.dim] //= size // cut.repeat
    return msgspec.structs.replace(weight, shape=tuple(shape))
