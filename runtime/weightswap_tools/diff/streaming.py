"""Reading of two sets of tensors side by side, in pieces, with memory independent of the tensors' sizes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.digests import Blocks, block_digests, digest_of, tensor_digest
from weightswap_runtime.tensors.dtypes import DTYPES, Typed
from weightswap_runtime.threads.worker_threads import WorkerThreads
from weightswap_tools.tensor_set import SetTensor

from .statistics import Summary, Tally, same_bytes, summary, tally


class Readable(Typed, Protocol):
    """A tensor whose bytes several threads may read concurrently."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, memory: memoryview, begin: int) -> None:
        """Fill the memory with the tensor's row-major bytes from `begin` on. Raises WeightswapError."""
        ...


class Computed(NamedTuple):
    """A tensor that is in memory as a whole: one that an adapter computes, or that can only be read whole."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    compute: Callable[[], TensorBytes]


Tensor = SetTensor | TensorBytes | Computed
PIECE = 1 << 20  # elements; a multiple of the blocks of statistics and, whatever the dtype, of those of digests
Progress = Callable[[int, int], None]


class Scanned(NamedTuple):
    """The result of a scan: whether the bytes of both sides are equal, and each side's digest if requested.

    `summary` is None for dtypes whose elements do not fill whole bytes.
    """

    equal: bool
    digests: tuple[str, ...]
    summary: Summary | None


class _ScannedPiece(NamedTuple):
    equal: bool
    digests: tuple[Blocks, ...]
    tally: Tally | None


class Scan:
    """A scan of one tensor, or of two of the same shape, piece by piece. Several threads may work on it."""

    def __init__(self, sides: Sequence[Readable], *, hashed: bool) -> None:
        """hashed: whether to compute digests."""
        self._sides: tuple[Readable, ...] = tuple(sides)
        self._hashed = hashed
        self.result: Scanned  # set when all pieces are done
        self._shape = sides[0].shape
        self._whole = all(DTYPES[side.dtype].bits % 8 == 0 for side in sides)
        self._parts = any(side.dtype.startswith("C") for side in sides)
        self._elements = math.prod(self._shape) if self._whole else sides[0].nbytes
        self._remaining = max(1, -(-self._elements // PIECE))
        self._pieces: list[_ScannedPiece | None] = [None] * self._remaining
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def work(self, index: int, buffers: ReadBuffers) -> int:
        """Read one piece and tally it; the last piece completes the result. Returns the number of bytes read."""
        begin = index * PIECE
        count = min(PIECE, self._elements - begin)
        contents = [self._read(number, begin, count, buffers) for number in range(len(self._sides))]
        self._pieces[index] = self._piece(contents, begin)
        with self._lock:
            self._remaining -= 1
            last = not self._remaining
        if last:
            self._finish()
        return sum(len(content.data) for content in contents)

    def _read(self, number: int, begin: int, count: int, buffers: ReadBuffers) -> TensorBytes:
        side = self._sides[number]
        size = side.nbytes // max(1, self._elements)
        memory = buffers.take(number, count * size)
        side.read_into(memory, begin * size)
        return TensorBytes(side.dtype, (count,), memory)

    def _piece(self, contents: Sequence[TensorBytes], begin: int) -> _ScannedPiece:
        return _ScannedPiece(
            equal=same_bytes(contents[0], contents[-1]),
            digests=tuple(block_digests(content.data) for content in contents) if self._hashed else (),
            tally=tally(contents, self._shape, begin, parts=self._parts) if self._whole else None,
        )

    def _finish(self) -> None:
        pieces = [piece for piece in self._pieces if piece is not None]
        tallies = [piece.tally for piece in pieces if piece.tally is not None]
        sides = range(len(self._sides))
        self.result = Scanned(
            equal=all(piece.equal for piece in pieces),
            digests=tuple(tensor_digest(_blocks_of(pieces, side)) for side in sides) if self._hashed else (),
            summary=summary(tallies, self._shape, parts=self._parts) if tallies else None,
        )
        self._pieces = [None] * len(self._pieces)
        self._sides = ()  # free computed tensors


def _blocks_of(pieces: Sequence[_ScannedPiece], side: int) -> Blocks:
    return tuple(block for piece in pieces for block in piece.digests[side])


class ReadBuffers(threading.local):
    """Thread-local buffers that each piece reuses."""

    def __init__(self) -> None:
        self._memory = [memoryview(bytearray()), memoryview(bytearray())]

    def take(self, number: int, nbytes: int) -> memoryview:
        """Return the buffer of a number, 0 or 1. The next call with this number overwrites it."""
        if len(self._memory[number]) < nbytes:
            self._memory[number] = memoryview(bytearray(nbytes))
        return self._memory[number][:nbytes]


class Reader:
    """A thread pool that runs scans, and reports progress as bytes read and bytes in all."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._workers = WorkerThreads()
        self._buffers = ReadBuffers()

    def run(self, scans: Iterable[Scan]) -> None:
        """Run the scans and set their results. Raises WeightFileError."""
        self._workers.run_all(self._work, [(scan, index) for scan in scans for index in range(len(scan))])

    def _work(self, item: tuple[Scan, int]) -> None:
        scan, index = item
        read = scan.work(index, self._buffers)
        with self._lock:
            self._done += read
            if self._progress:
                self._progress(self._done, self._total)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor, by name. Raises WeightswapError."""
    digests: dict[str, str] = {}
    readable = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Computed)}
    buffers = ReadBuffers()

    def work(name: str) -> None:
        digests[name] = digest_of(_pieces(readable[name], buffers))

    WorkerThreads().run_all(work, readable)
    for name, tensor in tensors.items():
        if isinstance(tensor, Computed):  # one at a time, as each is in memory
            digests[name] = digest_of([tensor.compute().data])
    return digests


def _pieces(tensor: Readable, buffers: ReadBuffers) -> Iterator[memoryview]:
    for begin in range(0, tensor.nbytes, PIECE):
        memory = buffers.take(0, min(PIECE, tensor.nbytes - begin))
        tensor.read_into(memory, begin)
        yield memory
