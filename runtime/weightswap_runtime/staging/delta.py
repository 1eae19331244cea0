"""Staging of a delta: its parts, laid over copies of the blocks that are served."""

from __future__ import annotations

import time

import numpy as np

from weightswap_runtime.errors import BaseMismatch, DamagedFile, DigestMismatch, Unsupported, WeightsMismatch
from weightswap_runtime.format.delta_file import DATA, RUNS, DeltaStamp
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.patch import HostPatch
from weightswap_runtime.tensors.digests import tensor_digest
from weightswap_runtime.tensors.dtypes import describe, nbytes
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.workers import Workers

from .checks import check_expected, check_finite, check_graph
from .delta_overlay import ByteRanges, overlay
from .reading import read_scratch
from .request import Contents, Served, StagedChange, SwapRequest


def stage_delta(
    weights: WeightSet,
    stamp: DeltaStamp,
    served: Served,
    manifest: Manifest,
    workers: Workers,
    job: Job,
    request: SwapRequest,
) -> StagedChange:
    """Put a delta file's parts over copies of the live blocks that they change, and prove the weights id of the result.

    Raises BaseMismatch, GraphMismatch, WeightsMismatch, WeightFileError, DigestMismatch, UnexpectedWeights, MemoryError
    and StageCancelled. Nothing that is served, and no arena, is written to.
    """
    check_delta(stamp, served.identity.weights_id, manifest, weights.where, request)
    start = time.perf_counter()
    parts = _read_parts(weights, stamp, workers, job)
    weights.check_unchanged(proven=True)
    staged = time.perf_counter()
    job.begin("verifying")
    laid = overlay(parts, served.arena, served.identity, workers, job)
    identity = identify(manifest.weights, {**served.identity.digests, **laid.digests}, stamp.labels, laid.nonfinite)
    if identity.weights_id != stamp.weights_id:
        text = f"leads to the weights {identity.weights_id[:12]}, not to {stamp.weights_id[:12]} as it says"
        raise DigestMismatch(weights.where, [text], "Write the delta again, or copy it again.")
    contents = Contents(
        identity=identity,
        kind="delta",
        source=weights.where,
        nonfinite=check_finite(manifest, identity, served.identity, weights.where, request),
        ignored=(),
        bytes_read=sum(tensor.nbytes for tensor in weights.tensors.values()),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
        base=stamp.base,
    )
    return StagedChange(contents, HostPatch(laid.spans))


def check_delta(stamp: DeltaStamp, served: str, manifest: Manifest, where: str, request: SwapRequest) -> None:
    """Check everything that a delta's header can tell."""
    if request.only:
        raise Unsupported(f"{where}: a delta is taken whole; `only` is for files that hold full tensors")
    check_graph(stamp.graph_id, manifest, where, request)
    if stamp.base != served:
        raise BaseMismatch(
            f"{where}: a delta from the weights {stamp.base[:12]}, but {served[:12]} are served. Apply the "
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


def _read_parts(weights: WeightSet, stamp: DeltaStamp, workers: Workers, job: Job) -> dict[str, ByteRanges]:
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
        parts[name] = ByteRanges.of(runs, read[DATA + name])
        if not parts[name].fit(nbytes(changed.dtype, changed.shape) or 0):
            problems.append(name)
    if problems:
        raise DamagedFile(f"{weights.where}: the ranges of {', '.join(problems[:5])} do not fit its data")
    return parts
