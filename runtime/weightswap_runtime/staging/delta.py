"""Deltas: their parts are laid over the weights that they start from, and must lead to the weights that they claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec.structs import replace

from weightswap_runtime.errors import BaseMismatch, DamagedFile, DigestMismatch, Unsupported, WeightsMismatch, listed
from weightswap_runtime.format.delta import DATA, RUNS, DeltaStamp, delta_stamp
from weightswap_runtime.format.identity import Counts, Identity, count_nonfinite, element_bytes, identify
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, HostPatch, Span, allocate
from weightswap_runtime.tensors import BLOCK, Blocks, describe, nbytes, same_type
from weightswap_runtime.threads import WorkerThreads

from .reading import read_rows, read_scratch, write_rows
from .request import (
    BaseFile,
    Staging,
    StagingReport,
    check_expected,
    check_finite,
    check_graph,
    digest_problems,
)
from .sets import plan, stage_full

MOST_PIECES = 16  # a block with more changed pieces is copied as a whole
Offsets = npt.NDArray[np.int64]
Pieces = Iterable[tuple[int, memoryview]]


def stage_delta(
    weights: WeightSet, stamp: DeltaStamp, arena: Arena, served: Identity, staging: Staging
) -> tuple[Identity, StagingReport, HostPatch]:
    """Lay a delta file's parts over copies of the served blocks that they change, and prove the result's weights id.

    Raises BaseMismatch, GraphMismatch, WeightsMismatch, WeightFileError, DigestMismatch, UnexpectedWeights, MemoryError
    and StageCancelled. No arena is written to.
    """
    _check_header(stamp, weights.where, staging)
    if stamp.base != served.weights_id:
        raise BaseMismatch(
            f"{weights.where}: a delta from the weights {stamp.base[:12]}, but {served.weights_id[:12]} are served. "
            "Apply the deltas of a chain in order, each to the weights that it starts from, or swap a full weight file."
        )
    start = time.perf_counter()
    parts = _read_parts(weights, stamp, staging)
    weights.check_unchanged(proven=True)
    staged = time.perf_counter()
    staging.job.begin("verifying")
    changed = overlay(parts, arena, served, staging.workers, staging.job)
    digests = {**served.digests, **changed.digests}
    identity = identify(staging.manifest.weights, digests, stamp.labels, changed.nonfinite)
    if identity.weights_id != stamp.weights_id:
        text = f"leads to the weights {identity.weights_id[:12]}, not to {stamp.weights_id[:12]} as it claims"
        raise DigestMismatch(weights.where, [text], "Write the delta again, or copy it again.")
    report = StagingReport(
        weights_id=identity.weights_id,
        labels=dict(identity.labels),
        kind="delta",
        source=weights.where,
        nonfinite=check_finite(identity, weights.where, staging),
        bytes_read=sum(tensor.nbytes for tensor in weights.tensors.values()),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
        base=stamp.base,
    )
    return identity, report, HostPatch(changed.spans)


def stage_chain(
    weights: WeightSet, stamp: DeltaStamp, arena: Arena, staging: Staging
) -> tuple[Identity, StagingReport]:
    """Fill an arena with the weights of a delta, from the files of `request.onto`; served weights are not read.

    Raises what `stage_full` and `stage_delta` raise; the arena's content is then undefined.
    """
    _check_header(stamp, weights.where, staging)  # before large files are read
    full, *deltas = staging.request.onto
    first = _staging_of(full, staging)
    most = staging.manifest.most_header
    with open_weights(full.path, staging.job.check, most) as opened:
        identity, report = stage_full(plan(opened, first.manifest, first.request), arena, first)
    for delta in deltas:
        with open_weights(delta.path, staging.job.check, most) as opened:
            step = _staging_of(delta, staging)
            identity, report = _lay_delta(opened, delta_stamp(opened), arena, identity, report, step)
    return _lay_delta(weights, stamp, arena, identity, report, staging)


def _staging_of(base: BaseFile, staging: Staging) -> Staging:
    """Return the staging of an earlier file, which must give the stated weights; non-finite values are allowed."""
    request = staging.request._replace(path=base.path, expect=base.weights_id, allow_nonfinite=None)
    return staging._replace(request=request)


def _lay_delta(
    weights: WeightSet,
    stamp: DeltaStamp | None,
    arena: Arena,
    identity: Identity,
    before: StagingReport,
    staging: Staging,
) -> tuple[Identity, StagingReport]:
    """Lay a delta over the arena's weights; return their new identity, and a report that includes what was before."""
    if stamp is None:
        raise BaseMismatch(f"{weights.where}: is no longer a delta; restore it, or swap a full file")
    identity, report, patch = stage_delta(weights, stamp, arena, identity, staging)
    patch.write_to(arena, staging.workers, staging.job)
    return identity, replace(
        report,
        bytes_read=before.bytes_read + report.bytes_read,
        seconds_staged=before.seconds_staged + report.seconds_staged,
        seconds_verified=before.seconds_verified + report.seconds_verified,
    )


def _check_header(stamp: DeltaStamp, where: str, staging: Staging) -> None:
    """Check a delta by its header alone, without its base.

    Raises Unsupported, GraphMismatch, UnexpectedWeights and WeightsMismatch.
    """
    if staging.request.only:
        raise Unsupported(f"{where}: a delta is applied as a whole; `only` is for files that hold full tensors")
    rows = {weight.name: weight for weight in staging.manifest.weights}
    problems = []
    for name, changed in stamp.changes.items():
        row = rows.get(name)
        if row is None:
            problems.append(f"{name}: unexpected")
        elif not same_type(row, changed):
            problems.append(f"{name}: expected {describe(row)}, found {changed}")
    check_graph(stamp.graph_id, staging.manifest, where, staging.request, problems)
    check_expected(stamp.weights_id, where, staging.request)
    if problems:
        raise WeightsMismatch(where, problems, "Write the delta between two weight files of this artifact.")


def _read_parts(weights: WeightSet, stamp: DeltaStamp, staging: Staging) -> dict[str, ByteRanges]:
    """Read the parts of each weight that the file changes. Raises WeightFileError and DigestMismatch."""
    names = list(weights.tensors)
    staging.job.begin("reading", sum(tensor.nbytes for tensor in weights.tensors.values()))
    scratch, blocks = read_scratch(weights, names, staging.workers, staging.job)
    read = {name: scratch.part(index) for index, name in enumerate(names)}
    if wrong := digest_problems(stamp, blocks.digests):
        raise DigestMismatch(weights.where, wrong, "The file is damaged: copy it again, or write the delta again.")
    parts, problems = {}, []
    for name, changed in stamp.changes.items():
        runs = np.frombuffer(read[RUNS + name], "<i8").reshape(-1, 2)
        parts[name] = ByteRanges.of(runs, read[DATA + name])
        if not parts[name].fit(nbytes(changed.dtype, changed.shape) or 0):
            problems.append(name)
    if problems:
        raise DamagedFile(f"{weights.where}: the ranges of {listed(problems)} do not fit its data")
    return parts


class Overlay(NamedTuple):
    """Result of laying parts over an arena's blocks: the new bytes, and the block digests of the changed weights.

    `nonfinite` has the counts of all weights that then have non-finite values.
    """

    spans: tuple[Span, ...]
    digests: dict[str, Blocks]
    nonfinite: dict[str, Counts]


def overlay(
    parts: Mapping[str, ByteRanges], arena: Arena, before: Identity, workers: WorkerThreads, job: Job
) -> Overlay:
    """Lay parts over copies of an arena's blocks; the arena is only read. Raises MemoryError and StageCancelled."""
    spans: list[Span] = []
    changes: dict[str, _Change] = {}
    tasks: list[Callable[[], None]] = []
    for name, part in parts.items():
        weight = arena.layout.weights[name]
        changes[name] = _Change(weight, name not in before.nonfinite, list(before.digests[name]), [])
        if weight.stride is None:
            tasks += _by_block(changes[name], part, arena, spans)
        else:
            tasks.append(_by_weight(changes[name], part, arena, spans, job))

    def work(task: Callable[[], None]) -> None:
        task()
        job.check()

    workers.run_all(work, tasks)
    nonfinite = dict(before.nonfinite)
    for name, change in changes.items():
        nonfinite[name] = reduce(Counts.plus, change.differences, nonfinite.get(name, Counts(0, 0)))
    return Overlay(
        tuple(spans),
        {name: tuple(change.digests) for name, change in changes.items()},
        {name: counts for name, counts in nonfinite.items() if any(counts)},
    )


class _Change(NamedTuple):
    """Change of one weight: its new block digests, and the differences in its counts of non-finite values.

    `was_finite` means that the replaced bytes need not be counted.
    """

    weight: NamedTensor
    was_finite: bool
    digests: list[bytes]
    differences: list[Counts]

    def record(self, old: memoryview, new: memoryview) -> None:
        """Count the non-finite values of whole elements before and after a replacement."""
        before = None if self.was_finite else count_nonfinite(self.weight.dtype, old)
        after = count_nonfinite(self.weight.dtype, new)
        if before or after:
            self.differences.append(Counts(0, 0).plus(after).plus(before, -1))


def _by_block(change: _Change, part: ByteRanges, arena: Arena, spans: list[Span]) -> Iterator[Callable[[], None]]:
    """Yield the tasks that lay a part over a weight that the arena keeps in row-major order."""
    offset, size = arena.layout.slots[change.weight.name]
    element = element_bytes(change.weight.dtype) or 1
    for index in part.blocks():
        low, high = index * BLOCK, min((index + 1) * BLOCK, size)

        def work(index: int = index, low: int = low, high: int = high) -> None:
            block = arena.fetch(offset + low, high - low)
            pieces = list(part.within(low, low + len(block)))
            change.digests[index] = _digest(pieces, block)
            if len(pieces) > MOST_PIECES or any(begin % element or len(data) % element for begin, data in pieces):
                pieces = [(0, _merged(pieces, block))]
            for begin, data in pieces:
                change.record(block[begin : begin + len(data)], data)
            spans.extend(Span(offset + low + begin, data) for begin, data in pieces)

        yield work


def _digest(pieces: Pieces, block: memoryview) -> bytes:
    """Return the digest of a block with pieces laid over it; nothing is copied."""
    hasher, end = blake3(), 0
    for begin, data in pieces:
        hasher.update(block[end:begin])
        hasher.update(data)
        end = begin + len(data)
    hasher.update(block[end:])
    return hasher.digest()


def _merged(pieces: Pieces, block: memoryview) -> memoryview:
    content = memoryview(bytearray(block))
    _write_pieces(pieces, content)
    return content


def _write_pieces(pieces: Pieces, content: memoryview) -> None:
    for begin, data in pieces:
        content[begin : begin + len(data)] = data


def _by_weight(change: _Change, part: ByteRanges, arena: Arena, spans: list[Span], job: Job) -> Callable[[], None]:
    """Return the task that copies a whole weight whose dimensions the arena keeps in another order."""
    weight = change.weight
    slot = arena.layout.slots[weight.name]

    def work() -> None:
        served = arena.fetch(*slot)
        rows = read_rows(weight, served, job)
        _write_pieces(part.within(0, len(rows)), rows)
        for index in part.blocks():
            job.check()
            change.digests[index] = blake3(rows[index * BLOCK : (index + 1) * BLOCK]).digest()
        change.record(served, rows)
        content = memoryview(allocate(len(rows)))
        write_rows(weight, rows, content, job)
        spans.append(Span(slot.offset, content))

    return work


class ByteRanges(NamedTuple):
    """Sorted, disjoint ranges of a weight's row-major bytes, and the new bytes of all ranges, end to end.

    `offsets` are the positions in `data` at which the bytes of each range begin.
    """

    begins: Offsets
    ends: Offsets
    offsets: Offsets
    data: memoryview

    @classmethod
    def of(cls, runs: Offsets, data: memoryview) -> ByteRanges:
        """Return the ranges of a delta file; `runs` is int64 of shape [ranges, 2]."""
        lengths = runs[:, 1] - runs[:, 0]
        return cls(runs[:, 0], runs[:, 1], np.cumsum(lengths) - lengths, data)

    def fit(self, size: int) -> bool:
        """Return True if the ranges are in order, within `size` bytes, and together as long as the data."""
        inner = bool((self.begins < self.ends).all() and (self.ends[:-1] <= self.begins[1:]).all())
        outer = not len(self.begins) or bool(self.begins[0] >= 0 and self.ends[-1] <= size)
        return inner and outer and int((self.ends - self.begins).sum()) == len(self.data)

    def blocks(self) -> list[int]:
        """Return the numbers of the blocks in which at least one byte is replaced."""
        if not len(self.begins):
            return []
        steps = np.zeros(int(self.ends[-1] - 1) // BLOCK + 2, np.int64)
        np.add.at(steps, self.begins // BLOCK, 1)
        np.add.at(steps, (self.ends - 1) // BLOCK + 1, -1)
        blocks: list[int] = np.flatnonzero(np.cumsum(steps)).tolist()
        return blocks

    def within(self, low: int, high: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset, counted from `low`, and the bytes of each piece between the bytes `low` and `high`."""
        first = int(np.searchsorted(self.ends, low, "right"))
        last = int(np.searchsorted(self.begins, high, "left"))
        for begin, end, offset in zip(*(side[first:last].tolist() for side in self[:3]), strict=True):
            inner, outer = max(begin, low), min(end, high)
            yield inner - low, self.data[offset + inner - begin : offset + outer - begin]
