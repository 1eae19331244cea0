"""Reading the bytes that one rank has of weights which it shares with others.

The digest of a tensor is that of all its blocks. Where the file has the digests of the blocks, a rank reads those of
which it has a byte, and takes the others' digests from there: with these the tensor's digest, too, must come out right.
Where it has not, the rank reads and hashes everything, and keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import groupby

from weightswap_runtime.format.cuts import Share
from weightswap_runtime.format.identity import Counts, count_nonfinite
from weightswap_runtime.format.weight_set import StoredTensor, WeightSet
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, ByteRange, allocate
from weightswap_runtime.tensors import BLOCK, block_count, block_digests
from weightswap_runtime.threads import WorkerThreads

from .reading import Findings

_AT_ONCE = 4  # blocks that a thread reads before it hashes them: they are still in its cache


def bytes_to_read(weights: WeightSet, key: str, share: Share) -> int:
    """Return how many bytes of a tensor a rank reads for its share."""
    return sum(end - begin for begin, end in _ranges(weights, key, share))


def read_shares(
    weights: WeightSet, names: Mapping[str, str], arena: Arena, workers: WorkerThreads, job: Job
) -> Findings:
    """Read this rank's shares into an arena; return the digests of the whole tensors, and what its own bytes have that
    is not finite, by name in the file.

    names: weight -> name in the file. Raises what `read_tensors` raises; the arena's content is then undefined.
    """
    shares = arena.layout.shares
    pieces = [  # blocks of a tensor that follow each other: bytes `begin` to `end` of the whole
        (key, name, begin, end) for name, key in names.items() for begin, end in _ranges(weights, key, shares[name])
    ]
    digests = {key: _known(weights, key) for key in names.values()}
    counts: dict[str, list[Counts]] = {key: [] for key in names.values()}
    beside = _Beside()

    def read(piece: tuple[str, str, int, int]) -> None:
        key, name, begin, end = piece
        stored, share = weights.tensors[key], shares[name]
        first, last = share.before(begin), share.before(end)
        slot = ByteRange(arena.layout.slots[name].offset + first, last - first)
        is_slow = stored.source.unit is not None or job.rate_limit is not None
        with arena.buffers([slot], is_slow) as (part,):
            if len(part) == end - begin:
                _fill(part, stored, begin, job)
                blocks = block_digests(part)
            else:
                data = beside.memory()[: end - begin]
                _fill(data, stored, begin, job)
                blocks = block_digests(data)
                share.gather(begin, data, part)
            if found := count_nonfinite(stored.dtype, part):
                counts[key].append(found)
        start = begin // BLOCK
        digests[key][start : start + len(blocks)] = blocks

    workers.run_all(read, pieces)
    return Findings(
        {key: tuple(blocks) for key, blocks in digests.items()},
        {key: reduce(Counts.plus, found) for key, found in counts.items() if found},
    )


class _Beside(threading.local):
    """Memory of each thread for what is not read into its place."""

    _memory: memoryview | None = None

    def memory(self) -> memoryview:
        """Return room for the blocks that are read at once."""
        if self._memory is None:
            self._memory = memoryview(allocate(_AT_ONCE * BLOCK))
        return self._memory


def _known(weights: WeightSet, key: str) -> list[bytes]:
    given = weights.stamp.blocks_of(key) if weights.stamp else None
    return list(given or [b""] * block_count(weights.tensors[key].nbytes))


def _ranges(weights: WeightSet, key: str, share: Share) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a tensor's bytes to be read: whole blocks, few at a time; apart from others those of which
    the rank has every byte, which are read into their place."""
    size = weights.tensors[key].nbytes
    count = block_count(size)
    ends = [min(number * BLOCK, size) for number in range(count + 1)]
    places = [share.before(end) for end in ends]
    needed = list(range(count))
    if weights.stamp and weights.stamp.blocks_of(key):
        needed = [number for number in needed if places[number] < places[number + 1]]

    def kind(item: tuple[int, int]) -> tuple[int, bool]:
        index, number = item
        return number - index, places[number + 1] - places[number] == ends[number + 1] - ends[number]

    for _, run in groupby(enumerate(needed), key=kind):
        following = [number for _, number in run]
        for start in range(0, len(following), _AT_ONCE):
            chosen = following[start : start + _AT_ONCE]
            yield chosen[0] * BLOCK, min((chosen[-1] + 1) * BLOCK, size)


def _fill(memory: memoryview, stored: StoredTensor, begin: int, job: Job) -> None:
    for low, high in job.steps(0, len(memory)):
        stored.source.read_into([memory[low:high]], stored.offset + begin + low)
