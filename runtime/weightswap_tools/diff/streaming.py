"""Two sets of tensors side by side: under which names, which tensors are a pair, and what both hold.

Tensors are read in pieces, so that memory does not grow with them. Only what a conversion computes, or a file cannot
give in pieces, is in memory as a whole.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightswap_runtime.errors import OutOfMemory, Unsupported, WeightFileError, WeightsMismatch
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.delta import delta_stamp
from weightswap_runtime.format.goldens import record_of
from weightswap_runtime.format.names import KEYS, NAMES, UNAMBIGUOUS, Keys, Match, Readings, resolve
from weightswap_runtime.memory.arena import allocate
from weightswap_runtime.tensors import (
    DTYPES,
    Blocks,
    TensorBytes,
    TensorType,
    Typed,
    block_digests,
    digest_of,
    tensor_digest,
)
from weightswap_runtime.threads import WorkerThreads
from weightswap_tools.tensor_set import SetTensor, TensorSet, natural

from .documents import SetInfo, Status
from .statistics import Summary, Tally, same_bytes, summary, tally

if TYPE_CHECKING:
    import torch

    from weightswap_runtime.staging.transforms import Transforms


PIECE = 1 << 20  # elements; a multiple of the blocks of statistics and, whatever the dtype, of those of digests
_FEWEST_COMMON = 0.1  # of the smaller set's names; with fewer, a notice advises --artifact
READINGS: dict[Keys | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}
Progress = Callable[[int, int], None]


class Readable(Typed, Protocol):
    """A tensor whose bytes several threads may read concurrently."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, memory: memoryview, begin: int) -> None:
        """Fill the memory with the tensor's row-major bytes from `begin` on. Raises WeightswapError."""
        ...


class Computed(NamedTuple):
    """A tensor that is in memory as a whole: one that a conversion computes, or that can only be read whole."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    compute: Callable[[], TensorBytes]


Tensor = SetTensor | TensorBytes | Computed


# The sides of a comparison.


class Side(NamedTuple):
    """One set of tensors under the names to compare."""

    info: SetInfo
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, str]  # the recorded ones, by name
    sources: tuple[str, ...] = ()  # the names in the file that the tensors are made of
    ties: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # the other names of each tensor


def side(weights: TensorSet, artifact: Artifact | None, keys: Keys | None) -> Side:
    """Return the tensors of an open set under their own names, or, with an artifact, as its weights under their FQNs.

    Raises Unsupported for a delta file and for goldens. Raises WeightsMismatch if the set does not fit the artifact, or
    has different values for tied tensors.
    """
    if weights.weights and delta_stamp(weights.weights):
        raise Unsupported(f"{weights.where}: is a delta file; compare the weight files that it was made from")
    if weights.weights and record_of(weights.weights):
        raise Unsupported(f"{weights.where}: holds goldens, not weights; compare the weight files beside them")
    stamp = weights.weights.stamp if weights.weights else None
    digests = stamp.digests if stamp else {}
    if artifact is None:
        tensors = {name: _stored(tensor) for name, tensor in weights.tensors.items()}
        return Side(_info(weights, tensors), tensors, digests, tuple(tensors), weights.ties)
    readings = NAMES if stamp else READINGS[keys]
    advice = weights.weights.advice if weights.weights else ""
    match = resolve(weights.tensors, artifact.manifest, weights.full_where, readings=readings, advice=advice)
    _check_ties(weights, match)
    tensors = {name: _stored(weights.tensors[names[0]]) for name, names in match.found.items()}
    tensors |= _computed(weights, match, artifact)
    own = {name: digests[names[0]] for name, names in match.found.items() if names[0] in digests}
    sources = chain(*match.found.values(), *(keys.values() for keys in match.computed.values()))
    return Side(_info(weights, tensors, match.ignored), tensors, own, tuple(sources))


def _check_ties(weights: TensorSet, match: Match) -> None:
    """Raise WeightsMismatch if tied names have different values."""
    several = [names for names in match.found.values() if len({weights.tensors[name].tie_key for name in names}) > 1]
    digests = _digests_of({name: _stored(weights.tensors[name]) for names in several for name in names})
    problems = [
        f"{' and '.join(names)} are one tensor in the graph, but the checkpoint has different values for them"
        for names in several
        if len({digests[name] for name in names}) > 1
    ]
    if problems:
        advice = "Save the checkpoint from a model whose tied tensors are tied."
        raise WeightsMismatch(weights.full_where, problems, advice)


def _info(weights: TensorSet, tensors: Mapping[str, Tensor], ignored: tuple[str, ...] = ()) -> SetInfo:
    stamp = weights.weights.stamp if weights.weights else None
    return SetInfo(
        where=weights.where,
        level=weights.level,
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        weights_id=stamp.weights_id if stamp else None,
        graph_id=stamp.graph_id if stamp else None,
        labels=stamp.labels if stamp else {},
        ignored=ignored,
    )


def _stored(tensor: SetTensor) -> Tensor:
    if not tensor.whole:
        return tensor
    return Computed(tensor.dtype, tensor.shape, tensor.nbytes, partial(_read_whole, tensor))


def _read_whole(tensor: SetTensor) -> TensorBytes:
    try:
        memory = memoryview(allocate(tensor.nbytes))
        tensor.read_into(memory, 0)
    except MemoryError as error:
        raise OutOfMemory(f"{tensor.file}: a tensor that can only be read whole takes {tensor.nbytes} bytes") from error
    return TensorBytes(tensor.dtype, tensor.shape, memory)


def _computed(weights: TensorSet, match: Match, artifact: Artifact) -> dict[str, Tensor]:
    if not match.computed:
        return {}
    from weightswap_runtime.staging.transforms import Transforms  # needs torch

    compute = partial(_compute, weights, Transforms(artifact))
    return {
        row.name: Computed(row.dtype, row.shape, row.nbytes, partial(compute, row.name, match.computed[row.name]))
        for row in artifact.manifest.weights
        if row.name in match.computed
    }


def _compute(weights: TensorSet, transforms: Transforms, name: str, keys: Mapping[str, str]) -> TensorBytes:
    from weightswap_runtime.torch_tensors import as_tensor, tensor_content

    def read(key: str) -> torch.Tensor:
        content = _read_whole(weights.tensors[keys[key]])
        return as_tensor(content.data, content.dtype, content.shape)

    try:
        ((_, value),) = transforms.compute([name], read)
    except Exception as error:
        raise WeightFileError(f"{weights.where}: {name} cannot be computed from it ({error})") from error
    return tensor_content(value)


# Pairs of tensors.


class TensorPair(NamedTuple):
    """A tensor of one or both sets."""

    name: str
    before: Tensor | None
    after: Tensor | None
    renamed_from: str | None = None  # its earlier name

    @property
    def present(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.before, self.after) if tensor is not None)

    @property
    def comparable(self) -> bool:
        """True if the two tensors can be compared element by element."""
        if self.before is None or self.after is None or self.before.shape != self.after.shape:
            return False
        whole = all(DTYPES[tensor.dtype].bits % 8 == 0 for tensor in self.present)
        return whole or self.before.dtype == self.after.dtype

    @property
    def is_computed(self) -> bool:
        return any(isinstance(tensor, Computed) for tensor in self.present)

    @property
    def status(self) -> Status:
        """The status that types and names alone determine."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "removed"
        if self.before.shape != self.after.shape:
            return "reshaped"
        if self.before.dtype != self.after.dtype:
            return "retyped"
        return "renamed" if self.renamed_from else "same"


def pair(before: Side, after: Side) -> tuple[list[TensorPair], list[dict[str, str]]]:
    """Match tensors by name, then by content: a removed and an added tensor with equal bytes are a renamed one.

    A tied tensor is compared under the names that both sets have. Several tensors with the same bytes, such as zero
    biases, are matched in the natural order of their names. Raises WeightFileError.

    Returns every tensor of either set once: the common ones, the renamed, the removed and the added, each ordered by
    name. Returns also, for each set, the additional names of its tied tensors that the other set lacks, mapped to a
    common name.
    """
    common = sorted(before.tensors.keys() & after.tensors.keys(), key=natural)
    pairs = [TensorPair(name, before.tensors[name], after.tensors[name]) for name in common]
    aliases = [_aliases(side, set(common)) for side in (before, after)]
    old, new = (side.tensors.keys() - {*common, *names} for side, names in zip((before, after), aliases, strict=True))
    renames = dict(_renames(before, after, old, new))
    pairs += [TensorPair(to, before.tensors[name], after.tensors[to], name) for name, to in renames.items()]
    removed, added = (sorted(names, key=natural) for names in (old - renames.keys(), new - set(renames.values())))
    pairs += [TensorPair(name, before.tensors[name], None) for name in removed]
    pairs += [TensorPair(name, None, after.tensors[name]) for name in added]
    return pairs, aliases


def _aliases(side: Side, common: Set[str]) -> dict[str, str]:
    names = sorted(side.ties.keys() - common, key=natural)
    known = ((name, next((other for other in side.ties[name] if other in common), None)) for name in names)
    return {name: other for name, other in known if other is not None}


def _renames(before: Side, after: Side, old: Collection[str], new: Collection[str]) -> Iterator[tuple[str, str]]:
    types = {TensorType.of(before.tensors[name]) for name in old} & {TensorType.of(after.tensors[name]) for name in new}
    removed, added = (
        {name: side.tensors[name] for name in names if TensorType.of(side.tensors[name]) in types}
        for side, names in ((before, old), (after, new))
    )
    old_names, new_names = _by_content(removed, before.digests), _by_content(added, after.digests)
    for content, names in old_names.items():
        yield from zip(names, new_names.get(content, ()), strict=False)


def _by_content(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> dict[object, list[str]]:
    """Return names, in natural order, by type and digest. Digests that the file does not record are computed."""
    unknown = {name: tensor for name, tensor in tensors.items() if name not in digests}
    known = {name: digests[name] for name in tensors if name in digests} | _digests_of(unknown)
    groups: dict[object, list[str]] = defaultdict(list)
    for name in sorted(known, key=natural):
        groups[(TensorType.of(tensors[name]), known[name])].append(name)
    return groups


def strangers(before: Side, after: Side) -> bool:
    """Return whether two sets have almost no names in common."""
    fewest = min(len(before.tensors), len(after.tensors))
    return len(before.tensors.keys() & after.tensors.keys()) < _FEWEST_COMMON * fewest


# Reading tensors piece by piece.


class Scan:
    """A scan of one tensor, or of two of the same shape, piece by piece. Several threads may work on it.

    The results are set when all pieces are done.
    """

    equal: bool  # whether the bytes of both sides are
    digests: tuple[str, ...]  # of each side; empty unless they were requested
    summary: Summary | None  # None for dtypes whose elements do not fill whole bytes

    def __init__(self, sides: Sequence[Readable], *, hashed: bool) -> None:
        """hashed: whether to compute digests."""
        self._sides: tuple[Readable, ...] = tuple(sides)
        self._hashed = hashed
        self._shape = sides[0].shape
        self._whole = all(DTYPES[side.dtype].bits % 8 == 0 for side in sides)
        self._parts = any(side.dtype.startswith("C") for side in sides)
        self._elements = math.prod(self._shape) if self._whole else sides[0].nbytes
        self._remaining = max(1, -(-self._elements // PIECE))
        self._pieces: list[tuple[bool, list[Blocks], Tally | None] | None] = [None] * self._remaining
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def work(self, index: int, buffers: _ReadBuffers) -> int:
        """Read one piece and tally it; the last piece completes the results. Returns the number of bytes read."""
        begin = index * PIECE
        count = min(PIECE, self._elements - begin)
        contents = [self._read(number, begin, count, buffers) for number in range(len(self._sides))]
        self._pieces[index] = (
            same_bytes(contents[0], contents[-1]),
            [block_digests(content.data) for content in contents] if self._hashed else [],
            tally(contents, self._shape, begin, parts=self._parts) if self._whole else None,
        )
        with self._lock:
            self._remaining -= 1
            last = not self._remaining
        if last:
            self._finish()
        return sum(len(content.data) for content in contents)

    def _read(self, number: int, begin: int, count: int, buffers: _ReadBuffers) -> TensorBytes:
        side = self._sides[number]
        size = side.nbytes // max(1, self._elements)
        memory = buffers.take(number, count * size)
        side.read_into(memory, begin * size)
        return TensorBytes(side.dtype, (count,), memory)

    def _finish(self) -> None:
        equal, blocks, tallies = zip(*(piece for piece in self._pieces if piece is not None), strict=True)
        self.equal = all(equal)
        self.digests = tuple(tensor_digest(tuple(chain(*side))) for side in zip(*blocks, strict=True))
        self.summary = summary(tallies, self._shape, parts=self._parts) if self._whole else None
        self._pieces = [None] * len(self._pieces)
        self._sides = ()  # free computed tensors


class _ReadBuffers(threading.local):
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
        self._buffers = _ReadBuffers()

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


def _digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor, by name. Raises WeightswapError."""
    digests: dict[str, str] = {}
    readable = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Computed)}
    buffers = _ReadBuffers()

    def work(name: str) -> None:
        digests[name] = digest_of(_pieces(readable[name], buffers))

    WorkerThreads().run_all(work, readable)
    for name, tensor in tensors.items():
        if isinstance(tensor, Computed):  # one at a time, as each is in memory
            digests[name] = digest_of([tensor.compute().data])
    return digests


def _pieces(tensor: Readable, buffers: _ReadBuffers) -> Iterator[memoryview]:
    for begin in range(0, tensor.nbytes, PIECE):
        memory = buffers.take(0, min(PIECE, tensor.nbytes - begin))
        tensor.read_into(memory, begin)
        yield memory
