"""Deltas: their parts are laid over the weights that they start from, and must lead to the weights that they claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from weightswap_runtime.byte_ranges import ByteRanges, Layers, scatter
from weightswap_runtime.errors import BaseMismatch, DigestMismatch, Unsupported, WeightsMismatch, listed, plural
from weightswap_runtime.format.cuts import SharedChange
from weightswap_runtime.format.delta import DeltaStamp, delta_stamp, parts_of
from weightswap_runtime.format.identity import Counts, Identity, count_nonfinite, element_bytes, identify
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.hash_tree import LEAST_BLOCKS, HashTrees
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, ByteRange, HostPatch, allocate
from weightswap_runtime.tensors import BLOCK, Blocks, describe, same_type
from weightswap_runtime.threads import WorkerThreads

from .reading import read_rows, read_scratch, write_rows
from .request import (
    BaseFile,
    Staging,
    StagingReport,
    check_expected,
    check_graph,
    digest_problems,
    report_of,
)
from .sets import plan, stage_full

_COUNTED = 4 << 20  # bytes in which a thread counts non-finite values at a time
_TOGETHER = 256 << 20  # bytes of deltas that are laid over each other before an arena that nobody serves gets them
Pieces = Iterable[tuple[int, memoryview]]
Chain = tuple[BaseFile, ...]


def files_after(served: str | None, weights: WeightSet, stamp: DeltaStamp, staging: Staging) -> Chain | None:
    """Return the deltas of `request.onto` that lead from the served weights to a delta; None: a full set comes first.

    Raises what the check of a header raises, and WeightFileError.
    """
    _check_header(stamp, weights.where, staging)  # before large files are read
    onto = staging.request.onto
    if not onto or stamp.base == served:
        return ()
    for index in reversed(range(len(onto))):
        if onto[index][1] == served:
            return onto[index + 1 :]
    with open_weights(onto[0][0], staging.job.check, staging.manifest.most_header) as first:
        return onto if delta_stamp(first) else None


def stage_delta(
    weights: WeightSet, stamp: DeltaStamp, arena: Arena, served: Identity, staging: Staging, through: Chain = ()
) -> tuple[Identity, StagingReport, HostPatch]:
    """Lay a delta file's parts over copies of the served blocks that they change, and prove the result's weights id.

    through: the deltas between the served weights and those that the file starts from; only the result is proven.

    Raises BaseMismatch, GraphMismatch, WeightsMismatch, WeightFileError, DigestMismatch, UnexpectedWeights, MemoryError
    and StageCancelled. No arena is written to.
    """
    _check_header(stamp, weights.where, staging)
    start = time.perf_counter()
    layers, size = Layers(), _size(weights)
    base, said = served.weights_id, f"{served.weights_id[:12]} are served"
    for each in through:
        step = _staging_of(each, staging)
        with open_weights(each[0], staging.job.check, staging.manifest.most_header) as opened:
            between = _stamp_of(opened, step)
            _check_base(between, opened.where, base, said)
            layers.add(_read_parts(opened, between, step))
            opened.check_unchanged(proven=True)
            size += _size(opened)
            base, said = between.weights_id, f"{opened.where} leads to {between.weights_id[:12]}"
    _check_base(stamp, weights.where, base, said)
    layers.add(_read_parts(weights, stamp, staging))
    weights.check_unchanged(proven=True)
    staged = time.perf_counter()
    identity, patch = lay_over(layers.merged(), stamp.labels, arena, served, staging, stamp.weights_id)
    others = f", after {plural(len(through), 'other delta')}" if through else ""
    check_result(identity, stamp.weights_id, weights.where, others)
    return identity, report_of("delta", identity, weights, size, staging, start, staged, base=stamp.base), patch


def check_result(identity: Identity, claimed: str, where: str, others: str = "") -> None:
    """Raise DigestMismatch if a delta leads to other weights than it claims. others: text about deltas before it."""
    if identity.weights_id != claimed:
        text = f"leads to the weights {identity.weights_id[:12]}, not to {claimed[:12]} as it claims{others}"
        raise DigestMismatch(where, [text], "Write the delta again, or copy it again.")


def lay_over(
    parts: Mapping[str, ByteRanges],
    labels: Mapping[str, str],
    arena: Arena,
    served: Identity,
    staging: Staging,
    claimed: str | None = None,
) -> tuple[Identity, HostPatch]:
    """Return the weights that an arena would have with parts laid over it, and the patch. No arena is written to.

    claimed: the id that the result shall have, which ranks prove together if a part changes what they share.

    Raises MemoryError, StageCancelled, and Unsupported for such a part if no id is claimed, and after another one that
    has not been proven.
    """
    staging.job.begin("verifying")
    shared = [name for name in parts if name in arena.layout.shares]
    if shared and (claimed is None or served.unproven):
        raise Unsupported(
            f"{staging.request.where}: changes {listed(shared)}, of which each rank has a part; swap a full set of "
            "weights, or the file of a delta between two full sets"
        )
    placed, digests, nonfinite, unproven = overlay(
        parts, arena, served, staging.manifest.weights, staging.trees, staging.workers, staging.job
    )
    digests = {**served.digests, **digests}
    if claimed is None or not unproven:
        return identify(staging.manifest.weights, digests, labels, nonfinite), HostPatch(placed)
    blank = b""  # which no block has
    for name, change in unproven.items():
        blocks = set(change.blocks)
        digests[name] = tuple(blank if index in blocks else each for index, each in enumerate(digests[name]))
    return Identity(claimed, digests, dict(labels), nonfinite, unproven), HostPatch(placed)


def stage_chain(
    weights: WeightSet, stamp: DeltaStamp, arena: Arena, staging: Staging
) -> tuple[Identity, StagingReport]:
    """Fill an arena with the weights of a delta, from the files of `request.onto`; served weights are not read.

    Raises what `stage_full` and `stage_delta` raise; the arena's content is then undefined.
    """
    full, *deltas = staging.request.onto
    first = _staging_of(full, staging)
    with open_weights(full[0], staging.job.check, staging.manifest.most_header) as opened:
        planned = plan(opened, first.manifest, first.request, arena.layout.shares)
        identity, report = stage_full(planned, arena, first)
    *earlier, through = _groups(deltas, _size(weights), staging)
    for *others, each in earlier:
        step = _staging_of(each, staging)
        with open_weights(each[0], staging.job.check, staging.manifest.most_header) as opened:
            identity, later, patch = stage_delta(opened, _stamp_of(opened, step), arena, identity, step, tuple(others))
        patch.write_to(arena, staging.workers, staging.job)
        report = _added(report, later)
    identity, later, patch = stage_delta(weights, stamp, arena, identity, staging, tuple(through))
    patch.write_to(arena, staging.workers, staging.job)
    return identity, _added(report, later)


def _groups(deltas: Sequence[BaseFile], last: int, staging: Staging) -> list[list[BaseFile]]:
    """Group deltas that are laid over each other before they are laid over an arena; only few bytes are in memory so.

    last: the bytes of the delta after them, which joins the last group, even if that is empty.
    """
    groups: list[list[BaseFile]] = [[]]
    size = 0
    for each in deltas:
        with open_weights(each[0], staging.job.check, staging.manifest.most_header) as opened:
            more = _size(opened)
        if groups[-1] and size + more > _TOGETHER:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += more
    return [*groups, []] if groups[-1] and size + last > _TOGETHER else groups


def _added(before: StagingReport, later: StagingReport) -> StagingReport:
    return replace(
        later,
        bytes_read=before.bytes_read + later.bytes_read,
        seconds_staged=before.seconds_staged + later.seconds_staged,
        seconds_verified=before.seconds_verified + later.seconds_verified,
    )


def _staging_of(base: BaseFile, staging: Staging) -> Staging:
    """Return the staging of an earlier file, which must give the stated weights; non-finite values are allowed."""
    path, weights_id = base
    request = staging.request._replace(source=path, expect=weights_id, allow_nonfinite=None)
    return staging._replace(request=request)


def _stamp_of(weights: WeightSet, staging: Staging) -> DeltaStamp:
    """Return the stamp of a delta that others start from. Raises BaseMismatch, and what `_check_header` raises."""
    stamp = delta_stamp(weights)
    if stamp is None:
        raise BaseMismatch(f"{weights.where}: is no longer a delta; restore it, or swap a full file")
    _check_header(stamp, weights.where, staging)
    return stamp


def _check_base(stamp: DeltaStamp, where: str, base: str, said: str) -> None:
    if stamp.base != base:
        raise BaseMismatch(
            f"{where}: a delta from the weights {stamp.base[:12]}, but {said}. Apply the deltas of a chain in order, "
            "each to the weights that it starts from, or swap a full weight file."
        )


def _size(weights: WeightSet) -> int:
    return sum(tensor.nbytes for tensor in weights.tensors.values())


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
    return parts_of(stamp, read, weights.where)


def overlay(
    parts: Mapping[str, ByteRanges],
    arena: Arena,
    before: Identity,
    weights: Iterable[NamedTensor],
    trees: HashTrees,
    workers: WorkerThreads,
    job: Job,
) -> tuple[tuple[ByteRanges, ...], dict[str, Blocks], dict[str, Counts], dict[str, SharedChange]]:
    """Lay parts over an arena's weights, which is only read. Return the new bytes, with their places in the arena, the
    digests of the changed weights, the counts of all weights that then have non-finite values, and the changes of
    weights that ranks share, whose digests are not known yet.

    weights: as files have them. Raises MemoryError and StageCancelled.
    """
    whole = {weight.name: weight for weight in weights}
    changes: list[_Change] = []
    shared: dict[str, SharedChange] = {}
    tasks: list[Callable[[], None]] = []
    for name, part in parts.items():
        share, was_finite = arena.layout.shares.get(name), name not in before.nonfinite
        change = _Change(
            arena.layout.weights[name],
            part if share is None else share.cut(part),
            arena.layout.slots[name],
            list(before.digests[name]),
        )
        changes.append(change)
        if share is not None:
            assert arena.layout.rank is not None
            rank, blocks = arena.layout.rank, part.blocks().tolist()
            shared[name] = SharedChange(rank.shares(whole[name]), rank.number, whole[name].nbytes, blocks)
            tasks += _notes(change, shared[name], arena)
            tasks += _count_tasks(change, arena, was_finite)
        elif change.weight.stride is not None:
            tasks.append(partial(_lay_over_all, change, arena, was_finite, job))
        else:
            tasks += _hash_tasks(change, arena, trees, workers, job)
            tasks += _count_tasks(change, arena, was_finite)

    def work(task: Callable[[], None]) -> None:
        task()
        job.check()

    workers.run_all(work, tasks)
    nonfinite = dict(before.nonfinite)
    for change in changes:
        name = change.weight.name
        nonfinite[name] = reduce(Counts.plus, change.differences, nonfinite.get(name, Counts(0, 0)))
    return (
        tuple(change.placed() for change in changes),
        {change.weight.name: tuple(change.digests) for change in changes},
        {name: counts for name, counts in nonfinite.items() if any(counts)},
        shared,
    )


def _notes(change: _Change, shared: SharedChange, arena: Arena) -> Iterator[Callable[[], None]]:
    """Yield the tasks that note what this rank tells the others of each block that changes."""

    def content(begin: int, end: int) -> memoryview:
        memory = memoryview(bytearray(arena.fetch(change.slot.offset + begin, end - begin)))
        for at, data in change.part.within(begin, end):
            memory[at : at + len(data)] = data
        return memory

    for block in shared.blocks:
        yield partial(shared.note, block, content)


@dataclass
class _Change:
    """Change of one weight."""

    weight: NamedTensor
    part: ByteRanges
    slot: ByteRange
    digests: list[bytes]  # of the blocks, those that change are replaced
    differences: list[Counts] = field(default_factory=list)  # in its numbers of non-finite values
    content: memoryview | None = None  # of the whole weight, in the arena's order, if that is not row-major

    def record(self, old: memoryview | None, new: memoryview) -> None:
        """Count the non-finite values of whole elements before and after a replacement. old: None for finite ones."""
        before = None if old is None else count_nonfinite(self.weight.dtype, old)
        after = count_nonfinite(self.weight.dtype, new)
        if before or after:
            self.differences.append(Counts(0, 0).plus(after).plus(before, -1))

    def placed(self) -> ByteRanges:
        """Return the new bytes with their places in the arena."""
        if self.content is None:
            return self.part.moved(self.slot.offset)
        return ByteRanges.of(np.array([[self.slot.offset, self.slot.end]], np.int64), self.content)


def _hash_tasks(
    change: _Change, arena: Arena, trees: HashTrees, workers: WorkerThreads, job: Job
) -> Iterator[Callable[[], None]]:
    """Find the digests of blocks by the weight's hash tree; yield the tasks that hash those that it does not have."""
    part, slot = change.part, change.slot
    blocks = part.blocks()
    tree = trees.find(change.weight.name, slot.nbytes) if len(blocks) >= LEAST_BLOCKS else None
    if tree is not None:
        chunks = trees.chosen(tree, part.chunks())
        found = tree.update(chunks, part, change.digests, partial(arena.chunks, slot), workers, job.check)
        for index, digest in found.items():
            change.digests[index] = digest
        blocks = blocks[~np.isin(blocks, list(found))]
    for index in blocks.tolist():

        def work(index: int = index, low: int = index * BLOCK, high: int = (index + 1) * BLOCK) -> None:
            block = arena.fetch(slot.offset + low, min(high, slot.nbytes) - low)
            change.digests[index] = _digest(part.within(low, high), block)

        yield work


def _count_tasks(change: _Change, arena: Arena, was_finite: bool) -> Iterator[Callable[[], None]]:
    """Yield the tasks that count the non-finite values before and after the change of a row-major weight."""
    part, element = change.part, element_bytes(change.weight.dtype)
    if not element:
        return
    if not part.are_multiples(element):
        part = _whole_elements(change, arena, element)
    for piece in part.split(_COUNTED):

        def work(piece: ByteRanges = piece) -> None:
            old = None
            if not was_finite:
                old = memoryview(bytearray(piece.nbytes))
                arena.gather(piece.moved(change.slot.offset)._replace(data=old))
            change.record(old, piece.data)

        yield work


def _whole_elements(change: _Change, arena: Arena, element: int) -> ByteRanges:
    """Return the ranges widened to whole elements, with what these are after the change."""
    part = change.part
    wide = part._replace(begins=part.begins // element * element, ends=-(-part.ends // element) * element).joined(0)
    content = memoryview(bytearray(int((wide.ends - wide.begins).sum())))
    wide = ByteRanges.of(np.stack([wide.begins, wide.ends], axis=1), content)
    arena.gather(wide.moved(change.slot.offset))
    inside = np.searchsorted(wide.begins, part.begins, "right") - 1  # no step of Python for each: there may be millions
    begins = part.begins - wide.begins[inside] + wide.offsets[inside]
    scatter(content, part._replace(begins=begins, ends=begins + part.ends - part.begins))
    return wide


def _digest(pieces: Pieces, block: memoryview) -> bytes:
    """Return the digest of a block with pieces laid over it; nothing is copied."""
    hasher, end = blake3(), 0
    for begin, data in pieces:
        hasher.update(block[end:begin])
        hasher.update(data)
        end = begin + len(data)
    hasher.update(block[end:])
    return hasher.digest()


def _lay_over_all(change: _Change, arena: Arena, was_finite: bool, job: Job) -> None:
    """Lay new bytes over a copy of a weight whose dimensions the arena keeps in another order."""
    served = arena.fetch(*change.slot)
    rows = read_rows(change.weight, served, job)
    scatter(rows, change.part)
    for index in change.part.blocks().tolist():
        job.check()
        change.digests[index] = blake3(rows[index * BLOCK : (index + 1) * BLOCK]).digest()
    change.record(None if was_finite else served, rows)
    change.content = memoryview(allocate(len(rows)))
    write_rows(change.weight, rows, change.content, job)
