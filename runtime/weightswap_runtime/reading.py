"""Staging: bytes from weight files into an arena, hashed on the same pass."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from .arena import HostArena
from .errors import WeightFileError
from .manifest import NamedTensor
from .weightfile import WeightFile
from .weightset import WeightSet
from .workers import Workers

CHUNK = 1 << 20  # small enough that the hasher finds a chunk still in the cache
LARGE = 64 << 20  # at most; smaller tensors are never worth the threads' meeting at every window
MOST_BUFFERS = 512  # below the kernel's IOV_MAX of 1024


class Piece(NamedTuple):
    """A tensor of a file and the memory it goes to; both have the same size. `begin` counts from the file's start."""

    key: str
    file: WeightFile
    begin: int
    target: memoryview


def read_tensors(
    weights: WeightSet, found: Mapping[str, tuple[str, ...]], arena: HostArena, workers: Workers
) -> dict[str, str]:
    """Read each weight from its first name in `found` into the arena; returns BLAKE3 digests by name in the set.

    Further names of a tied weight are read too, into scratch memory, for their digests. Raises WeightFileError for
    a file that ends early, that cannot be read, or that was written to meanwhile; the arena's content is then
    undefined, but nothing writes to it any more.
    """
    digests: dict[str, str] = {}
    rows = arena.layout.weights
    pieces = []
    relayouts: list[tuple[NamedTensor, bytearray]] = []
    for name, keys in found.items():
        target = arena.view(name)
        if rows[name].stride is not None:
            scratch = bytearray(len(target))
            relayouts.append((rows[name], scratch))
            target = memoryview(scratch)
        pieces.append(_piece(weights, keys[0], target))
        pieces += [_piece(weights, key, memoryview(bytearray(len(target)))) for key in keys[1:]]
    _read_pieces(pieces, workers, digests)
    weights.check_unchanged()
    for weight, scratch in relayouts:
        write_rows(weight, scratch, arena.view(weight.name))
    return digests


def read_bytes(weights: WeightSet, key: str, workers: Workers) -> mmap.mmap | bytearray:
    """The bytes of one tensor, in memory of its own. Raises WeightFileError and MemoryError."""
    stored = weights.tensors[key]
    try:
        # malloc would keep tens of megabytes of what is freed
        memory = mmap.mmap(-1, stored.nbytes) if stored.nbytes else bytearray()
    except OSError as error:
        raise MemoryError(str(error)) from error
    target = memoryview(memory)

    def read(start: int) -> None:
        _read_full(stored.file, [target[start : start + 8 * CHUNK]], stored.offset + start)

    workers.run_all(read, range(0, stored.nbytes, 8 * CHUNK))
    return memory


def _piece(weights: WeightSet, key: str, target: memoryview) -> Piece:
    stored = weights.tensors[key]
    return Piece(key, stored.file, stored.offset, target)


def _read_pieces(pieces: Iterable[Piece], workers: Workers, digests: dict[str, str]) -> None:
    ordered = sorted(pieces, key=lambda piece: (piece.file.fd, piece.begin))
    share = sum(len(piece.target) for piece in ordered) // workers.threads
    large = [piece for piece in ordered if len(piece.target) > max(share, LARGE)]
    batches = _batches(piece for piece in ordered if len(piece.target) <= max(share, LARGE))
    for piece in large:
        digests[piece.key] = _read_large(piece, workers)
    # biggest first, so that the threads end together
    batches.sort(key=lambda batch: -sum(len(piece.target) for piece in batch))
    workers.run_all(lambda batch: digests.update(_read_batch(batch)), batches)


def _batches(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Groups of neighbours in the file that one scattered read of at most CHUNK bytes fills; big pieces stay alone."""
    batches: list[list[Piece]] = []
    size = end = 0
    for piece in pieces:
        length = len(piece.target)
        follows = batches and piece.file is batches[-1][-1].file and piece.begin == end
        fits = follows and size + length <= CHUNK and len(batches[-1]) < MOST_BUFFERS
        if fits:
            batches[-1].append(piece)
            size += length
        else:
            batches.append([piece])
            size = length
        end = piece.begin + length
    return batches


def _read_batch(batch: Sequence[Piece]) -> dict[str, str]:
    if len(batch) > 1:
        _read_full(batch[0].file, [piece.target for piece in batch], batch[0].begin)
        return {piece.key: blake3(piece.target).hexdigest() for piece in batch}
    piece = batch[0]
    hasher = blake3()
    for start in range(0, len(piece.target), CHUNK):
        part = piece.target[start : start + CHUNK]
        _read_full(piece.file, [part], piece.begin + start)
        hasher.update(part)
    return {piece.key: hasher.hexdigest()}


def _read_large(piece: Piece, workers: Workers) -> str:
    """One tensor that would keep a single thread busy while the others idle: all threads read, then hash, a window."""
    hasher = blake3(max_threads=workers.threads)
    window = CHUNK * 8 * workers.threads
    for start in range(0, len(piece.target), window):
        part = piece.target[start : start + window]

        def read(at: int, part: memoryview = part, start: int = start) -> None:
            _read_full(piece.file, [part[at : at + 8 * CHUNK]], piece.begin + start + at)

        workers.run_all(read, range(0, len(part), 8 * CHUNK))
        hasher.update(part)
    return hasher.hexdigest()


def _read_full(file: WeightFile, buffers: list[memoryview], offset: int) -> None:
    wanted = sum(map(len, buffers))
    try:
        got = os.preadv(file.fd, buffers, offset)
        while got < wanted:
            rest = _after(buffers, got)
            more = os.preadv(file.fd, rest, offset + got)
            if not more:
                raise WeightFileError(
                    f"{file.path}: ends at byte {offset + got}, {wanted - got} bytes early; it was truncated while it "
                    "was read. Replace files (os.replace), never rewrite them."
                )
            got += more
    except OSError as error:
        raise WeightFileError(f"{file.path}: cannot be read at byte {offset} ({error.strerror})") from error


def _after(buffers: list[memoryview], skip: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        rest += [buffer[skip:]] if skip < len(buffer) else []
        skip = max(0, skip - len(buffer))
    return rest


def write_rows(weight: NamedTensor, source: bytearray | memoryview, target: memoryview) -> None:
    """Copy a row-major tensor into an arena's memory, which may keep its dimensions in another order."""
    if weight.stride is None:
        target[:] = source
        return
    size = len(target) // max(1, int(np.prod(weight.shape)))
    element = np.dtype(f"V{size}")
    rows = np.frombuffer(source, element).reshape(weight.shape)
    order = np.frombuffer(target, element)
    strides = [step * size for step in weight.stride]
    np.lib.stride_tricks.as_strided(order, weight.shape, strides)[...] = rows
