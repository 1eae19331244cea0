"""Digests of a table's blocks after a few of its rows have changed, at the cost of these rows.

A block's digest is BLAKE3, which is itself a tree over chunks of 1 KiB. With the nodes of that tree in memory, 64 KiB
for each block of 1 MiB, only changed chunks and the ten nodes above each have to be hashed again; the digest is the
same as if the whole block had been. The root of a block's tree tells which content it is of, so nothing has to be kept
in step with commits, rollbacks and cancelled stagings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import c_int64
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from . import native
from .byte_ranges import CHUNK, ByteRanges, distinct
from .native import Offsets, address
from .tensors import BLOCK
from .threads import WorkerThreads

NODES = 2048  # of a block, the last of which is not used
ROOT = 2046  # the last of 1024 + 512 + ... + 1 nodes
BLOCK_BYTES = 32 * NODES  # of the digests of its nodes
# Chunks of a block beyond which the blake3 package hashes all of it in less time: 140 us, against 0.5 us for a chunk
MOST_CHUNKS = 256
LEAST_BLOCKS = 4  # that change: fewer are hashed whole in less time than it takes to find their chunks
_TASK = 1024  # least chunks for a thread: it takes about as long to start as to hash them
_PER_BLOCK = BLOCK // CHUNK
_log = logging.getLogger("weightswap.staging")

Reader = Callable[[Offsets], tuple[memoryview, bool]]
"""Called with numbers of chunks. Returns the tensor's bytes, and False; or those chunks, end to end, and True."""


class HashTrees:
    """The trees of a set of weights, by FQN. Used by one staging at a time."""

    def __init__(self, limit: int | None) -> None:
        """limit: bytes that they may take together; None: as many as the changed blocks need."""
        self._limit = limit
        self._trees: dict[str, HashTree] = {}
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        return sum(tree.nbytes for tree in list(self._trees.values()))

    def clear(self) -> None:
        """Free all trees."""
        self._trees.clear()

    def find(self, name: str, size: int) -> HashTree | None:
        """Return the tree of a weight of so many bytes; None if it cannot have one, as without native code."""
        if native.library is None or size < BLOCK:
            return None
        tree = self._trees.get(name)
        if tree is None:
            try:
                tree = self._trees[name] = HashTree(size)
            except MemoryError:
                self._warn("there is no memory for its hash tree")
        return tree

    def chosen(self, tree: HashTree, chunks: Offsets) -> Offsets:
        """Return those of the changed chunks whose blocks a tree should hash: few in a block, and within the limit."""
        numbers = chunks // _PER_BLOCK
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        blocks, counts = numbers[firsts], np.diff(firsts, append=len(chunks))
        fits = (counts <= MOST_CHUNKS) & (blocks < len(tree.has_memory))
        fresh = np.flatnonzero(fits & ~tree.has_memory[np.minimum(blocks, len(tree.has_memory) - 1)])
        free = len(fresh) if self._limit is None else max(0, self._limit - self.nbytes) // BLOCK_BYTES
        if free < len(fresh):
            self._warn(f"the hash trees may take {self._limit} bytes, which is all they have")
            fits[fresh[free:]] = False
        return chunks[np.repeat(fits, counts)]

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("row updates take longer than they could: %s", why)


class HashTree:
    """The trees of a tensor's full blocks; a last block that is shorter has none."""

    def __init__(self, size: int) -> None:
        """size: the tensor's bytes. Memory is used as blocks are hashed for the first time. Raises MemoryError."""
        self._nodes = np.zeros((size // BLOCK, NODES, 32), np.uint8)
        self.has_memory = np.zeros(size // BLOCK, np.bool_)  # also for nodes that are of no use now
        self.is_built = np.zeros(size // BLOCK, np.bool_)
        self._last: Offsets = np.empty(0, np.int64)  # the chunks that were hashed by the last update

    @property
    def nbytes(self) -> int:
        return int(self.has_memory.sum()) * BLOCK_BYTES

    def update(
        self,
        chunks: Offsets,
        ranges: ByteRanges | None,
        digests: Sequence[bytes],
        read: Reader,
        workers: WorkerThreads,
        check: Callable[[], None],
    ) -> dict[int, bytes]:
        """Return the digests of the blocks of `chunks` with new bytes laid over them, by the number of the block.

        chunks: ascending; all that change in these blocks. ranges: the new bytes; None if `read` returns them already.
        digests: those of all blocks before the change. `check` may raise meanwhile; the tree is then of no less use.
        """
        blocks = distinct(chunks // _PER_BLOCK)
        stale = self._stale(np.union1d(blocks, distinct(self._last // _PER_BLOCK)), digests)
        if len(stale):  # after a rollback, or a staging that was not committed
            again = self._last[np.isin(self._last // _PER_BLOCK, stale)]
            self._rehash(again, None, read, workers, check)
            self.is_built[self._stale(stale, digests)] = False
        fresh = blocks[~self.is_built[blocks]]
        self.has_memory[fresh] = True
        self._rehash((fresh[:, None] * _PER_BLOCK + np.arange(_PER_BLOCK)).reshape(-1), None, read, workers, check)
        self.is_built[fresh] = True
        self._last = chunks
        self._rehash(chunks, ranges, read, workers, check)
        roots = self._nodes[blocks, ROOT]
        return {number: root.tobytes() for number, root in zip(blocks.tolist(), roots, strict=True)}

    def _stale(self, blocks: Offsets, digests: Sequence[bytes]) -> Offsets:
        """Return those of the blocks whose trees are there, but of other content."""
        blocks = blocks[self.is_built[blocks]]
        expected = np.frombuffer(b"".join([digests[number] for number in blocks.tolist()]), np.uint8).reshape(-1, 32)
        differs: npt.NDArray[np.bool_] = (self._nodes[blocks, ROOT] != expected).any(axis=1)
        return blocks[differs]

    def _rehash(
        self,
        chunks: Offsets,
        ranges: ByteRanges | None,
        read: Reader,
        workers: WorkerThreads,
        check: Callable[[], None],
    ) -> None:
        """Hash chunks and all nodes above them. Each block is done by one thread, or is as it was."""
        step = max(_TASK, -(-len(chunks) // workers.threads))
        blocks = chunks[::step] // _PER_BLOCK  # each begins a task, with all of its chunks
        edges = np.unique(np.append(np.searchsorted(chunks, blocks * _PER_BLOCK), len(chunks)))

        def work(edge: tuple[int, int]) -> None:
            check()
            part = chunks[slice(*edge)]
            low, high = int(part[0]) // _PER_BLOCK * BLOCK, (int(part[-1]) // _PER_BLOCK + 1) * BLOCK
            self._hash(part, ranges.reaching(low, high) if ranges is not None else _NONE, *read(part))

        workers.run_all(work, pairwise(edges.tolist()))

    def _hash(self, chunks: Offsets, ranges: ByteRanges, memory: memoryview, is_compact: bool) -> None:
        assert native.library is not None
        space = np.empty(len(chunks), np.int64)
        sides = [np.ascontiguousarray(side) for side in ranges[:3]]
        native.library.rehash(
            address(self._nodes),
            address(memory),
            c_int64(is_compact),
            address(chunks),
            c_int64(len(chunks)),
            *map(address, sides),
            c_int64(len(ranges.begins)),
            address(ranges.data),
            address(space),
        )


_EMPTY = np.empty(0, np.int64)
_NONE = ByteRanges(_EMPTY, _EMPTY, _EMPTY, memoryview(bytearray(1)))
