"""Deltas of weights of which each rank has a part: what is laid over the parts, and the digests of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.runtime.format.test_cuts import Meeting
from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.format.cuts import Rank, digests_together
from weightswap_runtime.format.identity import Counts, Identity
from weightswap_runtime.format.manifest import Cut, NamedTensor, Split
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena, HostPatch
from weightswap_runtime.staging.delta import overlay
from weightswap_runtime.tensors import Blocks, block_digests
from weightswap_runtime.threads import WorkerThreads

CUTS = {
    "rows": Cut(dim=0),  # some blocks are of two ranks
    "even": Cut(dim=0),  # each block is of one rank
    "columns": Cut(dim=1),
    "packed": Cut(dim=0, groups=2),
    "heads": Cut(dim=0, repeat=2),  # of two ranks each
}
SHAPES = {
    "rows": (1003 * 4, 300),
    "even": (4096, 256),
    "columns": (900, 1200),
    "packed": (2 * 1204, 300),
    "heads": (2004, 300),
    "whole": (1000, 300),  # every rank has it
}
WEIGHTS = [NamedTensor(name=name, dtype="F32", shape=shape) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("few", [True, False])
def test_ranks_prove_together_what_one_process_proves(seed: int, few: bool) -> None:
    rng = np.random.default_rng(seed)
    before = {weight.name: rng.random(weight.shape, np.float32) for weight in WEIGHTS}
    after = {name: value.copy() for name, value in before.items()}
    names = sorted(before) if few else ["even", "columns"]
    parts = {name: changed(after[name], rng, few) for name in names}
    size = 4
    split = Split(size=size, whole="5" * 64, cuts=CUTS)
    meeting = Meeting(size)

    def run(number: int) -> dict[str, Blocks]:
        arena = arena_of(Rank(split, number), before)
        served = Identity("0" * 64, {name: block_digests(raw(value)) for name, value in before.items()}, {})
        placed, digests, nonfinite, unproven = overlay(
            parts, arena, served, WEIGHTS, HashTrees(None), WorkerThreads(1), Job()
        )
        assert set(unproven) == set(names) - {"whole"}
        found = digests_together(unproven, meeting.of(number))
        HostPatch(placed).write_to(arena, WorkerThreads(1))
        expected = arena_of(Rank(split, number), after)
        assert arena.fetch(*arena.layout.whole) == expected.fetch(*arena.layout.whole)
        mine = {name: expected.view(name) for name in names}
        counts = {name: int(np.isnan(np.frombuffer(view, np.float32)).sum()) for name, view in mine.items()}
        assert nonfinite == {name: Counts(count, 0) for name, count in counts.items() if count}
        return digests | {
            name: tuple(blocks.get(index, old) for index, old in enumerate(digests[name]))
            for name, blocks in found.items()
        }

    with ThreadPoolExecutor(size) as pool:
        proven = list(pool.map(run, range(size)))
    assert proven == [{name: block_digests(raw(after[name])) for name in names}] * size


def arena_of(rank: Rank, values: dict[str, np.ndarray]) -> HostArena:
    arena = HostArena(ArenaLayout(WEIGHTS, rank))
    for name, value in values.items():
        share = arena.layout.shares.get(name)
        if share is None:
            arena.view(name)[:] = raw(value)
        else:
            share.gather(0, raw(value), arena.view(name))
    return arena


def changed(value: np.ndarray, rng: np.random.Generator, few: bool) -> ByteRanges:
    """Change rows of a weight, or runs of its bytes; return these with the new bytes. Some values become NaN."""
    flat = value.reshape(-1)
    width = value.shape[1]
    if few:
        rows = np.sort(rng.choice(len(value), 7, replace=False))
        for row in rows.tolist():
            flat[row * width : (row + 1) * width] = rng.random(width, np.float32)
            flat[row * width] = np.nan
        runs = [(row * width, (row + 1) * width) for row in rows.tolist()]
    else:
        begin, end = sorted(rng.choice(len(flat), 2, replace=False).tolist())
        flat[begin:end] += 1
        runs = [(begin, end)]
    return ranges(value, runs)


def ranges(value: np.ndarray, runs: Sequence[tuple[int, int]]) -> ByteRanges:
    content = raw(value)
    data = b"".join(content[4 * begin : 4 * end] for begin, end in runs)
    return ByteRanges.of(np.array(runs, np.int64) * 4, memoryview(bytearray(data)))


def raw(value: np.ndarray) -> memoryview:
    return memoryview(value.tobytes())
