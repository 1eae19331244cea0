"""Staging of a part, or of a delta: some bytes from a file, the others are those that are served."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from .arena import ArenaLayout, HostArena
from .deltafile import DATA, RUNS, DeltaStamp
from .digests import tensor_digest
from .dtypes import describe, nbytes
from .errors import BaseMismatch, DamagedFile, DigestMismatch, Unsupported, WeightsMismatch
from .gate import Version
from .identity import identify
from .job import Job
from .manifest import Manifest
from .overlay import Parts, overlay
from .patches import HostPatch, Span
from .reading import read_scratch
from .session import Session
from .staging import Contents, OpenTransforms, Plan, Request, check_expected, check_finite, check_graph, fill
from .weightset import WeightSet
from .workers import Workers


class Change(NamedTuple):
    """A verified full set of weights, as what changes in the live arena."""

    contents: Contents
    patch: HostPatch


def stage_part(
    plan: Plan,
    live: Version[Session],
    manifest: Manifest,
    workers: Workers,
    job: Job,
    open_transforms: OpenTransforms,
    request: Request,
) -> Change:
    """Read the plan's weights into memory of their own; the rest are the live ones. Raises what `fill` does."""
    part = HostArena(ArenaLayout(plan.manifest.weights))
    filled = fill(plan, part, workers, job, open_transforms)
    start = time.perf_counter()
    read, served = filled.found, live.identity
    kept = {name: counts for name, counts in served.nonfinite.items() if name not in read.digests}
    # most of it is still what the labels say
    identity = identify(manifest.weights, {**served.digests, **read.digests}, live.labels, kept | read.nonfinite)
    check_expected(identity.weights_id, plan.weights.where, request)
    slots = live.session.arena.layout.slots
    contents = Contents(
        identity=identity,
        kind="partial",
        source=plan.weights.where,
        nonfinite=check_finite(manifest, identity, served, plan.weights.where, request),
        only=request.only,
        ignored=(),
        bytes_read=plan.nbytes,
        seconds_staged=filled.seconds_read,
        seconds_verified=filled.seconds_verified + time.perf_counter() - start,
    )
    return Change(contents, HostPatch(Span(slots[name].offset, part.view(name)) for name in read.digests))


def stage_delta(
    weights: WeightSet,
    stamp: DeltaStamp,
    live: Version[Session],
    manifest: Manifest,
    workers: Workers,
    job: Job,
    request: Request,
) -> Change:
    """Put a delta file's parts over copies of the live blocks that they change, and prove the weights id of the result.

    Raises BaseMismatch, GraphMismatch, WeightsMismatch, WeightFileError, DigestMismatch, UnexpectedWeights, MemoryError
    and StageCancelled. Nothing that is served, and no arena, is written to.
    """
    check_delta(stamp, live, manifest, weights.where, request)
    start = time.perf_counter()
    parts = _read_parts(weights, stamp, workers, job)
    weights.check_unchanged(proven=True)
    staged = time.perf_counter()
    job.begin("verifying")
    served = live.identity
    laid = overlay(parts, live.session.arena, served, workers, job)
    identity = identify(manifest.weights, {**served.digests, **laid.digests}, stamp.labels, laid.nonfinite)
    if identity.weights_id != stamp.weights_id:
        text = f"leads to the weights {identity.weights_id[:12]}, not to {stamp.weights_id[:12]} as it says"
        raise DigestMismatch(weights.where, [text], "Write the delta again, or copy it again.")
    contents = Contents(
        identity=identity,
        kind="delta",
        source=weights.where,
        nonfinite=check_finite(manifest, identity, served, weights.where, request),
        ignored=(),
        bytes_read=sum(tensor.nbytes for tensor in weights.tensors.values()),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
    )
    return Change(contents, HostPatch(laid.spans))


def check_delta(stamp: DeltaStamp, live: Version[Session], manifest: Manifest, where: str, request: Request) -> None:
    """Check everything that a delta's header can tell."""
    if request.only:
        raise Unsupported(f"{where}: a delta is taken whole; `only` is for files that hold full tensors")
    check_graph(stamp.graph_id, manifest, where, request)
    if stamp.base != live.weights_id:
        raise BaseMismatch(
            f"{where}: a delta from the weights {stamp.base[:12]}, but {live.weights_id[:12]} are served. Apply the "
            "deltas of a chain in order, each to the weights that it starts from, or swap a full weight file."
        )
    check_expected(stamp.weights_id, where, request)
    rows = {weight.name: weight for weight in manifest.weights}
    problems = []
    for name, changed in stamp.changes.items():
        row, found = rows.get(name), describe(changed.dtype, changed.shape)
        if row is None:
            problems.append(f"{name}: unexpected")
        elif (row.dtype, row.shape) != (changed.dtype, changed.shape):
            problems.append(f"{name}: expected {describe(row.dtype, row.shape)}, found {found}")
    if problems:
        raise WeightsMismatch(where, problems, "Write the delta between two weight files of this artifact.")


def _read_parts(weights: WeightSet, stamp: DeltaStamp, workers: Workers, job: Job) -> dict[str, Parts]:
    """The parts of each weight that the file changes. Raises WeightFileError and DigestMismatch."""
    names = list(weights.tensors)
    job.begin("reading", sum(tensor.nbytes for tensor in weights.tensors.values()))
    scratch, blocks = read_scratch(weights, names, workers, job)
    found = {name: tensor_digest(blocks.digests[name]) for name in names}
    read = {name: scratch.part(index) for index, name in enumerate(names)}
    wrong = [
        f"{name}: the file records the digest {stamp.digests[name][:12]}, its bytes have {digest[:12]}"
        for name, digest in found.items()
        if digest != stamp.digests[name]
    ]
    if wrong:
        raise DigestMismatch(weights.where, wrong, "The file is damaged: copy it again, or write the delta again.")
    parts, problems = {}, []
    for name, changed in stamp.changes.items():
        runs = np.frombuffer(read[RUNS + name], "<i8").reshape(-1, 2)
        parts[name] = Parts.of(runs, read[DATA + name])
        if not parts[name].fit(nbytes(changed.dtype, changed.shape) or 0):
            problems.append(name)
    if problems:
        raise DamagedFile(f"{weights.where}: the ranges of {', '.join(problems[:5])} do not fit its data")
    return parts
