"""Staging of a delta: its parts are laid over copies of the served blocks."""

from __future__ import annotations

import time

import numpy as np

from weightswap_runtime.errors import BaseMismatch, DamagedFile, DigestMismatch, Unsupported, WeightsMismatch
from weightswap_runtime.format.delta_file import DATA, RUNS, DeltaStamp
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.patch import HostPatch
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.dtypes import describe, nbytes, same_type

from .checks import check_expected, check_finite, check_graph, digest_problems
from .delta_overlay import ByteRanges, overlay
from .reading import read_scratch
from .request import Base, Contents, StagedChange, Staging


def stage_delta(weights: WeightSet, stamp: DeltaStamp, base: Base, staging: Staging) -> StagedChange:
    """Lay a delta file's parts over copies of the served blocks that they change, and prove the result's weights id.

    Raises BaseMismatch, GraphMismatch, WeightsMismatch, WeightFileError, DigestMismatch, UnexpectedWeights, MemoryError
    and StageCancelled. No arena is written to.
    """
    check_header(stamp, weights.where, staging)
    served = base.identity.weights_id
    if stamp.base != served:
        raise BaseMismatch(
            f"{weights.where}: a delta from the weights {stamp.base[:12]}, but {served[:12]} are served. Apply the "
            "deltas of a chain in order, each to the weights that it starts from, or swap a full weight file."
        )
    start = time.perf_counter()
    parts = _read_parts(weights, stamp, staging)
    weights.check_unchanged(proven=True)
    staged = time.perf_counter()
    staging.job.begin("verifying")
    changed = overlay(parts, base, staging.workers, staging.job)
    digests = {**base.identity.digests, **changed.digests}
    identity = identify(staging.manifest.weights, digests, stamp.labels, changed.nonfinite)
    if identity.weights_id != stamp.weights_id:
        text = f"leads to the weights {identity.weights_id[:12]}, not to {stamp.weights_id[:12]} as it claims"
        raise DigestMismatch(weights.where, [text], "Write the delta again, or copy it again.")
    contents = Contents(
        identity=identity,
        kind="delta",
        source=weights.where,
        nonfinite=check_finite(identity, weights.where, staging),
        ignored=(),
        bytes_read=sum(tensor.nbytes for tensor in weights.tensors.values()),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
        base=stamp.base,
    )
    return StagedChange(contents, HostPatch(changed.spans))


def check_header(stamp: DeltaStamp, where: str, staging: Staging) -> None:
    """Check a delta by its header alone, without its base.

    Raises Unsupported, GraphMismatch, UnexpectedWeights and WeightsMismatch.
    """
    if staging.request.only:
        raise Unsupported(f"{where}: a delta is applied as a whole; `only` is for files that hold full tensors")
    check_graph(stamp.graph_id, staging.manifest, where, staging.request)
    check_expected(stamp.weights_id, where, staging.request)
    rows = {weight.name: weight for weight in staging.manifest.weights}
    problems = []
    for name, changed in stamp.changes.items():
        row = rows.get(name)
        if row is None:
            problems.append(f"{name}: unexpected")
        elif not same_type(row, changed):
            problems.append(f"{name}: expected {describe(row)}, found {changed}")
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
