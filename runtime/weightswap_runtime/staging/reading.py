"""Reading tensors into an arena, or scratch memory, with digests; computed weights."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from blake3 import blake3

from weightswap_runtime.errors import (
    OutOfMemory,
    StageCancelled,
    WeightsMismatch,
    WeightswapError,
    lacks_memory,
)
from weightswap_runtime.format.identity import Counts, count_nonfinite
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.safetensors import ALIGNMENT
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.jobs import POLL_SECONDS, Job
from weightswap_runtime.memory.arena import (
    Arena,
    ByteRange,
    Content,
    Copy,
    Destination,
    HostArena,
    Inspected,
    Inspection,
    Scratch,
    allocate,
)
from weightswap_runtime.sources.arriving import Arriving
from weightswap_runtime.sources.byte_source import MOST_BUFFERS, ByteSource, LocalFile, between
from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.tensors import BLOCK, Blocks, block_count, block_digests
from weightswap_runtime.threads import WorkerThreads

from .request import Staging

if TYPE_CHECKING:
    import torch


READS, GROUP_BYTES = 8, 8 << 20  # limits of what a thread reads in a row
RUN_BYTES = 128 << 20  # that a thread sends to a device in a row: threads of the application run Python meanwhile
LEAST_MEAN = 64 << 10  # bytes of copies to a device: smaller ones share one, as each costs microseconds of the driver
SCRATCH = 64 << 20  # bytes of scratch memory beside the arena; a larger tensor is read alone
IN_CACHE = 1 << 20  # bytes that are read before they are hashed: a processor's own cache has them still
STEP = 4 << 20  # bytes that are copied or compared between two checks for a cancel
STANDSTILL = 0.05  # seconds; a thread may wait so long for the interpreter or a processor, rarely longer
_BLANK = b""


# a weight and its name in the file; the weight is None if only the digest is needed
Scratched = tuple[NamedTensor | None, str]


class Piece(NamedTuple):
    """Tensor of a file, and the slot to read it into. `begin` is its offset in the file.

    `nonfinite` gets an entry for each part or block that has NaN or infinities. `first`: the index of the first block
    among those that the arena inspects.
    """

    key: str
    dtype: str
    source: ByteSource
    begin: int
    destination: Destination
    slot: ByteRange
    digests: list[bytes]
    nonfinite: list[Counts]
    first: int = 0


class Findings(NamedTuple):
    """Digests of the blocks of tensors, and the counts of their non-finite values, both by tensor name."""

    digests: dict[str, Blocks]
    nonfinite: dict[str, Counts]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Findings:
        findings = cls({}, {})
        for piece in pieces:
            findings.digests[piece.key] = tuple(piece.digests)
            if piece.nonfinite:
                findings.nonfinite[piece.key] = reduce(Counts.plus, piece.nonfinite)
        return findings

    def add(self, other: Findings) -> None:
        self.digests.update(other.digests)
        self.nonfinite.update(other.nonfinite)


class Part(NamedTuple):
    """Contiguous blocks of a piece: bytes `start` to `stop` of the tensor."""

    piece: Piece
    start: int
    stop: int

    @property
    def slot(self) -> ByteRange:
        return ByteRange(self.piece.slot.offset + self.start, self.stop - self.start)


Group = Sequence[list[Part]]  # scattered reads, of adjacent parts each, that a thread does in a row


def read_tensors(
    weights: WeightSet, names: Mapping[str, tuple[str, ...]], arena: Arena, workers: WorkerThreads, job: Job
) -> Findings:
    """Read each weight from its first name in `names` into the arena, and return the findings by name in the file.

    Those that ranks share are left out; `read_shares` reads them. The other names of a tied weight are read too, into
    scratch memory, for their digests. Raises StageCancelled, and WeightFileError for a file that ends early, that
    cannot be read, or that was written to during the read; the arena's content is then undefined, but nothing writes to
    it any more.
    """
    rows = arena.layout.weights
    slots = arena.layout.slots
    firsts = {name: keys[0] for name, keys in names.items() if name not in arena.layout.shares}
    plain = [new_piece(weights, key, arena, slots[name]) for name, key in firsts.items() if rows[name].stride is None]
    _read_plain(plain, arena, workers, job)
    findings = Findings.of(plain)
    others: list[Scratched] = [(rows[name], key) for name, key in firsts.items() if rows[name].stride is not None]
    others += [(None, key) for keys in names.values() for key in keys[1:]]
    for batch in batches(weights, others):
        findings.add(_read_batch(weights, batch, arena, workers, job))
    weights.check_unchanged(proven=weights.stamp is not None)
    return findings


def _read_plain(pieces: Sequence[Piece], arena: Arena, workers: WorkerThreads, job: Job) -> None:
    """Read tensors that the arena keeps in the file's order; if it can, it inspects the bytes that arrived."""
    ordered = _in_file_order(pieces)
    firsts = accumulate((block_count(piece.slot.nbytes) for piece in ordered), initial=0)
    ordered = [piece._replace(first=first) for piece, first in zip(ordered, firsts, strict=False)]
    with arena.inspecting([Content(piece.slot, piece.dtype) for piece in ordered]) as inspection:
        if inspection is not None:
            before = job.progress
            others = [piece for piece in ordered if not _copied_on_device(piece, inspection, job)]
            read_pieces(others, workers, job, inspection)
            found = inspection.results()
            if found is not None:
                _take_over(ordered, found, arena, workers, job)
                return
            job.progress = before
    read_pieces(ordered, workers, job)  # once more, if the arena could not inspect it


def _copied_on_device(piece: Piece, inspection: Inspection, job: Job) -> bool:
    """Copy a tensor that is on the arena's device, and return True; False for all others."""
    if not (isinstance(piece.source, MemorySource) and piece.source.is_torchs):
        return False
    job.check()
    return inspection.copy(piece.slot, piece.source.value, piece.first)


def _take_over(pieces: Sequence[Piece], found: Inspected, arena: Arena, workers: WorkerThreads, job: Job) -> None:
    """Take over what an arena has found; values that are not finite are counted here."""
    for piece in pieces:
        piece.digests[:] = found.digests[piece.first : piece.first + len(piece.digests)]

    def count(index: int) -> None:
        job.check()
        piece = pieces[bisect_right(pieces, index, key=attrgetter("first")) - 1]
        start = (index - piece.first) * BLOCK
        block = arena.fetch(piece.slot.offset + start, min(BLOCK, piece.slot.nbytes - start))
        if counts := count_nonfinite(piece.dtype, block):
            piece.nonfinite.append(counts)

    workers.run_all(count, found.nonfinite)


def batches(weights: WeightSet, items: Iterable[Scratched]) -> Iterator[list[Scratched]]:
    """Yield batches of items that fit into SCRATCH bytes, or of one item."""
    batch: list[Scratched] = []
    size = 0
    for item in items:
        nbytes = weights.tensors[item[1]].nbytes
        if batch and size + nbytes > SCRATCH:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch


def _read_batch(
    weights: WeightSet, batch: Sequence[Scratched], arena: Arena, workers: WorkerThreads, job: Job
) -> Findings:
    """Read tensors into scratch memory, and copy the weights among them into the arena."""
    keys = [key for _, key in batch]
    scratch, findings = read_scratch(weights, keys, workers, job)
    for index, (weight, _) in enumerate(batch):
        if weight is not None:
            lay(arena, weight, scratch.part(index), job)
    return findings


def read_scratch(
    weights: WeightSet, keys: Sequence[str], workers: WorkerThreads, job: Job, most: int | None = None
) -> tuple[Scratch, Findings]:
    """Read tensors into new memory, and return it with the findings. most: as in `read_pieces`.

    Raises WeightFileError, StageCancelled and MemoryError.
    """
    scratch = Scratch([weights.tensors[key].nbytes for key in keys])
    pieces = [new_piece(weights, key, scratch, slot) for key, slot in zip(keys, scratch.slots, strict=True)]
    read_pieces(pieces, workers, job, most=most)
    return scratch, Findings.of(pieces)


def new_piece(weights: WeightSet, key: str, destination: Destination, slot: ByteRange) -> Piece:
    """Return the piece that reads one tensor of a file into a slot of the same size."""
    stored = weights.tensors[key]
    blanks = [_BLANK] * block_count(stored.nbytes)
    return Piece(key, stored.dtype, stored.source, stored.offset, destination, slot, blanks, [])


def read_pieces(
    pieces: Iterable[Piece],
    workers: WorkerThreads,
    job: Job,
    inspection: Inspection | None = None,
    most: int | None = None,
) -> None:
    """Read every piece into its slot. Hash it and count its non-finite values, unless the arena inspects it.

    most: bytes that a thread reads in a row; a few pieces are shared more evenly by fewer. None: as many as suit.
    """

    def unit(piece: Piece) -> int:
        suiting = _unit(piece, job, inspected=inspection is not None)
        return suiting if most is None else min(most, suiting)

    ordered = _in_file_order(pieces)
    arriving = [piece.source for piece in ordered if isinstance(piece.source, Arriving)]
    for source in arriving:
        source.start()
    if arriving:  # one thread, so that nothing is read out of turn
        workers = WorkerThreads(1, yields=workers.yields)
    reads = list(_reads((part for piece in ordered for part in _parts(piece, unit(piece))), unit))
    groups = _groups(reads, most or GROUP_BYTES)
    runs = [[group] for group in groups] if inspection is None else _runs(groups, workers)
    _read_runs(runs, workers, job, inspection)


def _read_runs(runs: Iterable[list[Group]], workers: WorkerThreads, job: Job, inspection: Inspection | None) -> None:
    """Read all runs. After an error none is read to its end, which may take long."""
    work = _reader(job, inspection)
    is_over = False

    def stop() -> None:
        nonlocal is_over
        is_over = True

    def check() -> None:
        job.check()
        if is_over:
            raise StageCancelled("another thread has failed")

    def read(run: Sequence[Group]) -> None:
        if inspection is None or not _upload(run, job, inspection, check):
            for group in run:
                check()
                work(group)

    workers.run_all(read, runs, stop)


def _in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (id(piece.source), piece.begin))


def _unit(piece: Piece, job: Job, inspected: bool) -> int:
    """Return the bytes per read that suit the file, the memory and the job. inspected: not by the thread that reads."""
    # what is hashed by the thread that has read it should still be in its cache
    unit = piece.source.unit or (piece.destination.most if inspected else IN_CACHE)
    return job.unit(min(unit, piece.destination.most))


def _parts(piece: Piece, unit: int) -> Iterator[Part]:
    unit = max(BLOCK, unit // BLOCK * BLOCK)
    size = piece.slot.nbytes
    for start in range(0, max(1, size), unit):
        yield Part(piece, start, min(start + unit, size))


def _reads(parts: Iterable[Part], unit: Callable[[Piece], int]) -> Iterator[list[Part]]:
    """Yield groups of adjacent parts, each for one scattered read of about the preferred size."""
    read: list[Part] = []
    remaining = end = 0
    for part in parts:
        begin, length = part.piece.begin + part.start, part.stop - part.start
        piece, first = part.piece, read[0].piece if read else None
        follows = first and piece.source is first.source and piece.destination is first.destination and begin == end
        if not (follows and length <= remaining and len(read) < MOST_BUFFERS):
            if read:
                yield read
            read, remaining = [], max(unit(part.piece), length)
        read.append(part)
        remaining -= length
        end = begin + length
    if read:
        yield read


def _file(group: Group) -> LocalFile | None:
    """Return the local file of a group, which has parts of no other source then."""
    source = group[0][0].piece.source
    return source if isinstance(source, LocalFile) else None


def _groups(reads: Iterable[list[Part]], most: int) -> Iterator[Group]:
    """Yield groups of reads that a thread does in a row: one large read, or several small ones into one destination.

    Those of a local file are by themselves, so that a device can take them from it.
    """
    group: list[list[Part]] = []
    size = 0
    for read in reads:
        nbytes, destination = sum(part.stop - part.start for part in read), read[0].piece.destination
        full = len(group) == READS or size >= most or size + nbytes > destination.most
        other = group and (destination is not group[0][0].piece.destination or _file([read]) is not _file(group))
        if group and (full or other):
            yield group
            group, size = [], 0
        group.append(read)
        size += nbytes
    if group:
        yield group


def _runs(groups: Iterable[Group], workers: WorkerThreads) -> Iterator[list[Group]]:
    """Yield groups that a thread does in a row: many of a local file, fewer at the end, so that all end together."""
    groups = list(groups)
    sizes = [sum(part.stop - part.start for read in group for part in read) for group in groups]
    remaining, run, size = sum(sizes), list[Group](), 0
    for group, nbytes in zip(groups, sizes, strict=True):
        most = min(RUN_BYTES, remaining // (2 * workers.threads)) if _file(group) else 0
        if run and (_file(group) is not _file(run[0]) or size + nbytes > most):
            yield run
            run, remaining, size = [], remaining - size, 0
        run.append(group)
        size += nbytes
    if run:
        yield run


def _upload(run: Sequence[Group], job: Job, inspection: Inspection, check: Callable[[], None]) -> bool:
    """Read groups at once if they are of a local file without a rate limit. False: they must be read one by one."""
    parts = [part for group in run for read in group for part in read]
    source = _file(run[0])
    if source is None or job.rate_limit is not None:
        return False
    copies: list[Copy] = []
    for piece, start, stop in parts:
        each = Copy(piece.slot.offset + start, piece.begin + start, stop - start)
        last = copies[-1] if copies else None
        # neighbours in one copy, with a gap that belongs to no weight
        gap = each.offset - last.offset - last.nbytes if last else -1
        if last and 0 <= gap < ALIGNMENT and each.begin - last.begin - last.nbytes == gap:
            copies[-1] = last._replace(nbytes=last.nbytes + gap + each.nbytes)
        else:
            copies.append(each)
    nbytes = sum(part.stop - part.start for part in parts)
    if nbytes < len(copies) * LEAST_MEAN:
        return False
    for _ in job.steps(0, nbytes):
        with source.descriptor() as file:
            if not inspection.read(file, copies, check):
                return False
    _note(parts, inspection)
    return True


def _note(parts: Iterable[Part], inspection: Inspection) -> None:
    for piece, start, stop in parts:
        inspection.written(piece.first + start // BLOCK, block_count(stop - start))


def _reader(job: Job, inspection: Inspection | None) -> Callable[[Group], None]:
    def work(reads: Group) -> None:
        first = reads[0][0].piece
        is_slow = first.source.unit is not None or job.rate_limit is not None
        slots = [part.slot for read in reads for part in read]
        with first.destination.buffers(slots, is_slow) as memory:
            buffers = iter(memory)
            for read in reads:
                piece, start, _ = read[0]
                targets = [next(buffers) for _ in read]
                for low, high in job.steps(0, sum(map(len, targets))):
                    piece.source.read_into(between(targets, low, high), piece.begin + start + low)
                if inspection is None:
                    for part, target in zip(read, targets, strict=True):
                        _inspect(part, target)
        if inspection is not None:
            _note((part for read in reads for part in read), inspection)

    return work


def _inspect(part: Part, target: memoryview) -> None:
    """Hash each block of a part that was read, and count its non-finite values while it is in the cache."""
    first = part.start // BLOCK
    for index, start in enumerate(range(0, max(1, len(target)), BLOCK), first):
        part.piece.digests[index] = blake3(target[start : start + BLOCK]).digest()
    if counts := count_nonfinite(part.piece.dtype, target):
        part.piece.nonfinite.append(counts)


def lay(arena: Arena, weight: NamedTensor, rows: memoryview, job: Job) -> None:
    """Copy a row-major tensor into an arena, which may keep its dimensions in another order, or a rank's share of it.

    Raises StageCancelled; the copy is then incomplete.
    """
    share = arena.layout.shares.get(weight.name)
    with arena.buffers([arena.layout.slots[weight.name]]) as (target,):
        if share is None:
            write_rows(weight, rows, target, job)
        else:
            share.gather(0, rows, target)


def write_rows(weight: NamedTensor, source: bytearray | memoryview, target: memoryview, job: Job) -> None:
    """Copy a row-major tensor into the memory of one weight, like `lay`."""
    if weight.stride is None:
        target[:] = source
    else:
        rows, strided = _both_orders(weight, source, target)
        _copy(strided, rows, job)


def read_rows(weight: NamedTensor, source: memoryview, job: Job) -> memoryview:
    """Return the row-major bytes of an arena's tensor: `source` itself, or a copy if the arena's order differs."""
    if weight.stride is None:
        return source
    memory = memoryview(allocate(len(source)))
    rows, strided = _both_orders(weight, memory, source)
    _copy(rows, strided, job)
    return memory


def _copy(target: np.ndarray, source: np.ndarray, job: Job) -> None:
    """Copy an array in steps, each contiguous in the target's memory; a cancel takes effect between two steps."""
    order = np.argsort([-step for step in target.strides], kind="stable")
    _copy_in_order(target.transpose(order), source.transpose(order), job)


def _copy_in_order(target: np.ndarray, source: np.ndarray, job: Job) -> None:
    job.check()
    if target.nbytes <= STEP or not target.ndim:
        target[...] = source
        return
    step = max(1, len(target) * STEP // target.nbytes)
    for start in range(0, len(target), step):
        part = slice(start, start + step) if len(target) > 1 else 0
        _copy_in_order(target[part], source[part], job)


def _both_orders(
    weight: NamedTensor, row_major: bytearray | memoryview, arena: memoryview
) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the memory of a file's and of an arena's tensor, with the same shape."""
    assert weight.stride is not None
    size = len(arena) // max(1, int(np.prod(weight.shape)))
    element = np.dtype(f"V{size}")
    strides = [step * size for step in weight.stride]
    strided = np.lib.stride_tricks.as_strided(np.frombuffer(arena, element), weight.shape, strides)
    return np.frombuffer(row_major, element).reshape(weight.shape), strided


def compute_weights(
    weights: WeightSet, computed: Mapping[str, Mapping[str, str]], arena: Arena, staging: Staging
) -> tuple[Findings, Findings]:
    """Compute each weight of `computed` into the arena; return the findings by weight, and those of the inputs by name.

    `computed` maps each weight to its inputs: checkpoint key -> name in the files. Beside the arena, one weight and its
    inputs are held. Raises WeightFileError, WeightsMismatch, OutOfMemory, StageCancelled, and what opening the
    conversion's graph raises; the arena's content is then undefined.
    """
    transforms = staging.open_transforms()
    from weightswap_runtime.torch_tensors import as_tensor, tensor_bytes  # needs torch

    names = {key: name for keys in computed.values() for key, name in keys.items()}
    findings, inputs = Findings({}, {}), Findings({}, {})

    def read(key: str) -> torch.Tensor:
        stored = weights.tensors[names[key]]
        scratch, found = read_scratch(weights, [names[key]], staging.workers, staging.job)
        inputs.add(found)
        return as_tensor(scratch.memory, stored.dtype, stored.shape)

    try:
        for name, value in transforms.compute(list(computed), read):
            rows = tensor_bytes(value)
            weight = arena.layout.weights[name]
            findings.digests[name] = block_digests(rows)
            if nonfinite := count_nonfinite(weight.dtype, rows):
                findings.nonfinite[name] = nonfinite
            lay(arena, weight, rows, staging.job)
    except (WeightswapError, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{weights.where}: no memory to compute a weight ({error})") from error
        raise WeightsMismatch(
            weights.where,
            [f"the conversion cannot compute its weights: {type(error).__name__}: {error}"],
            "Load the checkpoint into the model on the build side and pack the model.",
        ) from error
    weights.check_unchanged()
    return findings, inputs


def confirm(
    weights: WeightSet,
    digests: Mapping[str, Blocks],
    names: Mapping[str, tuple[str, ...]],
    arena: Arena,
    workers: WorkerThreads,
    job: Job,
    since: float = 0.0,
) -> None:
    """Raise SourceChanged if a tensor of this process no longer has the bytes that were read, which `digests` are of.

    A second look, after all was read, proves that all bytes were there at one moment: between the two. In that moment a
    step of an optimizer may have been half done, if it stood still during both looks: hence these are STANDSTILL apart.

    names: weight -> names of the tensors that it was read from. Where the arena has the first one as it was, bytes are
    compared, which is several times faster than digests. since: the `time.perf_counter()` at which reading began.
    """
    while (left := since + STANDSTILL - time.perf_counter()) > 0:
        job.check()
        time.sleep(min(left, POLL_SECONDS))
    rows = arena.layout.weights
    plain = {
        keys[0]: arena.view(name)
        for name, keys in names.items()
        if isinstance(arena, HostArena) and rows[name].stride is None and name not in arena.layout.shares
    }

    def check(part: tuple[str, int]) -> None:
        job.check()
        (key, start), source = part, weights.tensors[part[0]].source
        assert isinstance(source, MemorySource)
        stop = min(start + STEP, source.size)
        same = (
            source.holds(start, plain[key][start:stop])
            if key in plain
            else source.digests(start, stop) == digests[key][start // BLOCK : block_count(stop)]
        )
        if not same:
            raise source.changed()

    sizes = {key: weights.tensors[key].nbytes for key in digests}
    workers.run_all(check, ((key, start) for key, size in sizes.items() for start in range(0, max(1, size), STEP)))
