"""Digests of tensors: a list of BLAKE3 digests of blocks, and one digest of that list.

A block can be checked, or replaced, without reading the rest of its tensor. That makes a small change of a large
tensor cheap to verify. https://github.com/BLAKE3-team/BLAKE3-specs
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from blake3 import blake3

BLOCK = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")  # as text; graph ids and weights ids are digests, too
Blocks = tuple[bytes, ...]


def block_count(nbytes: int) -> int:
    """Return the number of blocks of a tensor of this size. An empty tensor has one empty block."""
    return max(1, -(-nbytes // BLOCK))


def block_digests(data: memoryview) -> Blocks:
    """Return the digests of a tensor's blocks of 1 MiB, in order. The last block may be shorter."""
    return tuple(blake3(data[start : start + BLOCK]).digest() for start in range(0, max(1, len(data)), BLOCK))


def tensor_digest(blocks: Sequence[bytes]) -> str:
    """Return a tensor's digest, hexadecimal: that of its only block, or the digest of its blocks' digests."""
    return blocks[0].hex() if len(blocks) == 1 else blake3(b"".join(blocks)).hexdigest()


class TensorHasher:
    """Computes the digest of a tensor from pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._block = blake3()
        self._room = BLOCK

    def update(self, piece: memoryview) -> None:
        while len(piece):
            if not self._room:
                self._end_block()
            part = piece[: self._room]
            self._block.update(part)
            self._room -= len(part)
            piece = piece[len(part) :]

    def _end_block(self) -> None:
        self._blocks.append(self._block.digest())
        self._block, self._room = blake3(), BLOCK

    def hexdigest(self) -> str:
        return tensor_digest([*self._blocks, self._block.digest()])


def digest_of(pieces: Iterable[memoryview]) -> str:
    """Return the digest of a tensor whose bytes come in pieces of any size."""
    hasher = TensorHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
