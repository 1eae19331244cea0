"""Hash trees: the digests that the blake3 package gives for whole blocks, whatever was done before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from weightswap_runtime import native
from weightswap_runtime.byte_ranges import ByteRanges, scatter
from weightswap_runtime.errors import StageCancelled
from weightswap_runtime.hash_tree import BLOCK_BYTES, MOST_CHUNKS, HashTree, HashTrees, Offsets, Reader
from weightswap_runtime.tensors import BLOCK, block_digests
from weightswap_runtime.threads import WorkerThreads

WORKERS = WorkerThreads(2)


def reader(memory: memoryview, compact: bool = False) -> Reader:
    if not compact:
        return lambda _: (memory, False)
    chunks = np.frombuffer(memory[: len(memory) // 1024 * 1024], np.uint8).reshape(-1, 1024)
    return lambda numbers: (chunks[numbers].reshape(-1).data, True)


def rows_of(random: np.random.Generator, size: int, width: int, count: int) -> ByteRanges:
    ids = np.sort(random.choice(size // width, min(count, size // width), replace=False)).astype(np.int64)
    return ByteRanges.of_rows(ids, width, memoryview(random.bytes(len(ids) * width)))


def in_blocks(chunks: Offsets, count: int) -> Offsets:
    """Return the chunks of full blocks."""
    return chunks[chunks < count * 1024]


def expected(memory: memoryview, ranges: ByteRanges) -> dict[int, bytes]:
    after = memoryview(bytearray(memory))
    scatter(after, next(iter(ranges.split(len(memory)))))
    return dict(enumerate(block_digests(after)))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK - 1, 2 * BLOCK + 5000]),
    width=st.sampled_from([1, 7, 64, 100, 256, 1024, 1500, 4096, BLOCK // 2, 3 * BLOCK // 2]),
    steps=st.lists(st.sampled_from(["commit", "discard", "roll back", "replace"]), min_size=1, max_size=6),
    compact=st.booleans(),
)
def test_digests_are_those_of_the_blake3_package(
    seed: int, size: int, width: int, steps: list[str], compact: bool
) -> None:
    if width > size:
        return
    random = np.random.default_rng(seed)
    memory = memoryview(bytearray(random.bytes(size)))
    tree, before = HashTree(size), bytes(memory)
    for step in steps:
        ranges = rows_of(random, size, width, int(random.integers(1, 300)))
        chunks = in_blocks(ranges.chunks(), size // BLOCK)
        found = tree.update(chunks, ranges, block_digests(memory), reader(memory, compact), WORKERS, lambda: None)
        after = expected(memory, ranges)
        assert found == {number: after[number] for number in np.unique(chunks // 1024).tolist()}
        match step:
            case "commit":
                before = bytes(memory)
                scatter(memory, next(iter(ranges.split(size))))
            case "roll back":
                memory[:] = before
            case "replace":  # by a full set
                memory[:] = random.bytes(size)
    assert tree.nbytes <= size // BLOCK * BLOCK_BYTES


def test_a_cancelled_update_does_no_harm() -> None:
    random = np.random.default_rng(0)
    memory = memoryview(bytearray(random.bytes(8 * BLOCK)))
    tree, digests = HashTree(8 * BLOCK), block_digests(memory)

    def stops_after(calls: int) -> Callable[[], None]:
        left = iter(range(calls))

        def check() -> None:
            if next(left, None) is None:
                raise StageCancelled

        return check

    for calls in count():
        ranges = rows_of(random, len(memory), 64, 4000)
        try:
            found = tree.update(ranges.chunks(), ranges, digests, reader(memory), WORKERS, stops_after(calls))
        except StageCancelled:
            continue
        break
    assert calls > 2
    assert found == expected(memory, ranges)


def test_which_blocks_have_a_tree(caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(0)
    memory = memoryview(bytearray(random.bytes(4 * BLOCK + 2000)))
    trees = HashTrees(limit=2 * BLOCK_BYTES)
    assert trees.find("small", BLOCK - 1) is None
    tree = trees.find("table", len(memory))
    assert tree is not None
    assert tree is trees.find("table", len(memory))
    many = np.arange(MOST_CHUNKS + 1)
    last = np.array([4 * 1024 + 1])
    assert trees.chosen(tree, np.concatenate([many, [1024], last])).tolist() == [1024]  # few, and in a full block
    with caplog.at_level(logging.WARNING):
        chunks = np.array([0, 1024, 2048, 3072])
        assert trees.chosen(tree, chunks).tolist() == [0, 1024]
        tree.update(chunks[:2], rows_of(random, 10, 1, 0), block_digests(memory), reader(memory), WORKERS, lambda: None)
        assert trees.nbytes == 2 * BLOCK_BYTES
        assert trees.chosen(tree, chunks).tolist() == [0, 1024]
    assert [record.message for record in caplog.records] == [
        "row updates take longer than they could: the hash trees may take 131072 bytes, which is all they have"
    ]
    trees.clear()
    assert trees.nbytes == 0


def test_blocks_that_other_weights_have_replaced_still_count_as_memory() -> None:
    random = np.random.default_rng(0)
    memory = memoryview(bytearray(random.bytes(4 * BLOCK)))
    trees = HashTrees(limit=BLOCK_BYTES)
    tree = trees.find("table", len(memory))
    assert tree is not None
    for block in (0, 1, 2, 3, 1, 0):
        ranges = ByteRanges.of_rows(np.array([block * BLOCK]), 1, memoryview(random.bytes(1)))
        chunks = trees.chosen(tree, ranges.chunks())
        assert chunks.tolist() == ([0] if block == 0 else [])  # the first has taken the memory
        found = tree.update(chunks, ranges, block_digests(memory), reader(memory), WORKERS, lambda: None)
        assert found.items() <= expected(memory, ranges).items()
        assert trees.nbytes == BLOCK_BYTES
        memory[:] = random.bytes(4 * BLOCK)  # a full swap


def test_without_native_code_there_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", None)
    assert HashTrees(None).find("table", 4 * BLOCK) is None


def test_a_tree_takes_a_sixteenth() -> None:
    memory = memoryview(bytearray(4 * BLOCK))
    tree = HashTree(len(memory))
    chunks, digests = np.arange(0, 4096, 1024), block_digests(memory)
    none = ByteRanges.of(np.empty((0, 2), np.int64), memoryview(bytearray(1)))
    found = tree.update(chunks, none, digests, reader(memory), WORKERS, lambda: None)
    assert tuple(found.values()) == digests
    assert tree.nbytes * 16 == len(memory)
    assert blake3(bytes(BLOCK)).digest() == digests[0]
