"""Full sets of weights, and parts of them: matched by headers alone, read into memory, verified.

Without a model they are read as they are: `read_weights`, and checks of every byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import DigestMismatch, MissingExtra, Unsupported, WeightsMismatch
from weightswap_runtime.format.cuts import Share
from weightswap_runtime.format.delta import delta_stamp
from weightswap_runtime.format.identity import Counts, Identity, identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.model_config import check_config
from weightswap_runtime.format.names import NAMES, Match, ignored_names, part_of, patterns, resolve, select, tied_names
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena, HostPatch, Scratch
from weightswap_runtime.tensors import DTYPES, Blocks, TensorBytes, as_array
from weightswap_runtime.threads import WorkerThreads

from .given import Stream
from .reading import Findings, batches, compute_weights, confirm, new_piece, read_pieces, read_scratch, read_tensors
from .request import (
    DAMAGED,
    READINGS,
    Staging,
    StagingReport,
    SwapRequest,
    check_expected,
    check_graph,
    digest_problems,
    report_of,
)
from .shares import bytes_to_read, read_shares
from .stream import Arrivals, read_in_order

Framework = Literal["numpy", "torch"]
_NOTHING = Match({}, {}, (), (), "")


class Plan(NamedTuple):
    """Open files whose names, dtypes and shapes fit the graph, or the requested part of it."""

    weights: WeightSet
    match: Match
    manifest: Manifest  # of the requested part
    shares: Mapping[str, Share]  # of weights that this rank has a share of
    ignored: tuple[str, ...] = ()  # the names in the files that are no weights, or that the caller's `ignore=` matches

    @property
    def nbytes(self) -> int:
        """The bytes to read."""
        used = {name for names in self.match.found.values() for name in names}
        used |= {name for names in self.match.computed.values() for name in names.values()}
        shared = {keys[0]: self.shares[name] for name, keys in self.match.found.items() if name in self.shares}
        whole = sum(self.weights.tensors[name].nbytes for name in used if name not in shared)
        return whole + sum(bytes_to_read(self.weights, key, share) for key, share in shared.items())


def plan(
    weights: WeightSet, manifest: Manifest, request: SwapRequest, shares: Mapping[str, Share] = MappingProxyType({})
) -> Plan:
    """Check a checkpoint by its headers alone, and return what to read. Of a stream nothing is known yet.

    shares: those of the arena's layout.

    Raises GraphMismatch, UnexpectedWeights, and WeightsMismatch with every problem.
    """
    if weights.holds_goldens:
        raise WeightsMismatch(weights.where, ["holds recorded calls, not weights"], "Give the weight file beside it.")
    part = part_of(manifest, request.only) if request.only else manifest
    if isinstance(weights, Stream) and not weights.has_ended:
        return Plan(weights, _NOTHING, part, shares)
    stamp = weights.stamp
    # in a file with a stamp names are FQNs; in other files they may also be checkpoint keys
    readings = NAMES if stamp else READINGS[request.keys]
    ignored = ignored_names(weights.tensors, request.ignore, weights.where, tied_names(manifest))
    tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in ignored}
    try:
        match = resolve(
            tensors,
            part,
            weights.where,
            readings=readings,
            whole=manifest if request.only else None,
            advice=weights.advice,
        )
    except WeightsMismatch as error:
        if stamp:
            check_graph(stamp.graph_id, manifest, weights.where, request, error.problems)
        raise
    if stamp:
        check_graph(stamp.graph_id, manifest, weights.where, request)
        if not request.only and stamp.graph_id == manifest.packed_for:
            check_expected(stamp.weights_id, weights.where, request)
    else:
        check_config(weights.config, manifest.config, weights.where)
    return Plan(weights, match, part, shares, ignored if request.only else (*match.ignored, *ignored))


def stage_full(planned: Plan, arena: Arena, staging: Staging) -> tuple[Identity, StagingReport]:
    """Read a full set into an arena, and verify its digests, ties, weights id, and non-finite values.

    Raises WeightFileError, MemoryError, DigestMismatch, WeightsMismatch, StageCancelled, UnexpectedWeights,
    NonFiniteWeights, and ArtifactError or MissingExtra if the conversion's graph cannot be opened; the arena's content
    is then undefined.
    """
    start = time.perf_counter()
    planned, findings, read_at = fill(planned, arena, staging)
    weights, stamp = planned.weights, planned.weights.stamp
    labels = stamp.labels if stamp else staging.request.labels
    identity = identify(planned.manifest.weights, findings.digests, labels, findings.nonfinite)
    if stamp and stamp.graph_id == planned.manifest.packed_for and stamp.weights_id != identity.weights_id:
        text = f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {identity.weights_id[:12]}"
        raise DigestMismatch(weights.where, [text], DAMAGED)
    return identity, report_of("full", identity, weights, planned.nbytes, staging, start, read_at, planned.ignored)


def stage_part(
    planned: Plan, arena: Arena, served: Identity, staging: Staging
) -> tuple[Identity, StagingReport, HostPatch]:
    """Read the plan's weights into new memory; all others stay those of `arena`, whose identity is `served`.

    Raises what `stage_full` raises.
    """
    part = HostArena(ArenaLayout(planned.manifest.weights, arena.layout.rank))
    start = time.perf_counter()
    planned, findings, read_at = fill(planned, part, staging)
    kept = {name: counts for name, counts in served.nonfinite.items() if name not in findings.digests}
    digests = {**served.digests, **findings.digests}
    # the served labels are kept: they still describe most of the weights
    identity = identify(staging.manifest.weights, digests, served.labels, kept | findings.nonfinite)
    report = report_of("partial", identity, planned.weights, planned.nbytes, staging, start, read_at, planned.ignored)
    slots = arena.layout.slots
    names = list(findings.digests)
    places = [np.array([[slots[name].offset, slots[name].end]], np.int64) for name in names if slots[name].nbytes]
    contents = [part.view(name) for name in names if slots[name].nbytes]
    return identity, report, HostPatch(map(ByteRanges.of, places, contents))


def fill(planned: Plan, arena: Arena, staging: Staging) -> tuple[Plan, Findings, float]:
    """Read the weights into an arena laid out for the plan's, and verify digests and ties.

    Returns the plan, which of a stream is made only now; the findings by weight; and the `perf_counter` time at which
    reading ended.
    """
    job, weights, start = staging.job, planned.weights, time.perf_counter()
    if isinstance(weights, Stream):
        job.begin("reading", planned.manifest.total_bytes)
        arrivals = Arrivals(weights, arena, planned.manifest, staging)
        arrivals.read_all()
        planned = plan(weights, staging.manifest, staging.request, arena.layout.shares)
        by_key = arrivals.settle(planned.match.found)
    else:
        job.begin("reading", planned.nbytes)
        if weights.comes_once:
            by_key = read_in_order(weights, planned.match, arena, staging.workers, job)
        else:
            shared = {name: keys[0] for name, keys in planned.match.found.items() if name in arena.layout.shares}
            by_key = read_shares(weights, shared, arena, staging.workers, job)
            by_key.add(read_tensors(weights, planned.match.found, arena, staging.workers, job))
    match = planned.match
    findings, inputs = Findings({}, {}), Findings({}, {})
    if match.computed:
        findings, inputs = compute_weights(weights, match.computed, arena, staging)
    read_at = time.perf_counter()
    job.begin("verifying")
    if staging.request.confirm and not isinstance(weights, Stream):
        confirm(weights, by_key.digests | inputs.digests, match.found, arena, staging.workers, job, start)
    _verify(weights, match, by_key.digests)
    for name, keys in match.found.items():
        findings.digests[name] = by_key.digests[keys[0]]
        if keys[0] in by_key.nonfinite:
            findings.nonfinite[name] = by_key.nonfinite[keys[0]]
    return planned, findings, read_at


def _verify(weights: WeightSet, match: Match, digests: Mapping[str, Blocks]) -> None:
    """Raise DigestMismatch or WeightsMismatch with all wrong digests and broken ties."""
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, but have different values here"
        for keys in match.found.values()
        if len({digests[key] for key in keys}) > 1
    ]
    if corrupt := digest_problems(weights.stamp, digests):
        raise DigestMismatch(weights.where, corrupt + ties, DAMAGED)
    if ties:
        raise WeightsMismatch(weights.where, ties, "Give the weights of a model whose tied tensors are tied.")


def read_weights(
    path: str | os.PathLike[str], only: str | Sequence[str] | None = None, *, framework: Framework = "numpy"
) -> dict[str, Any]:
    """Read tensors by name from a weight file, or a checkpoint in safetensors files (also sharded, or a directory).

    only: patterns of the names in the file, such as "encoder.*" (`*` also matches dots); only their bytes are read.
    framework: "numpy" returns writable arrays, "torch" tensors on the CPU; each has its own memory. numpy arrays of
    bfloat16 and 8-bit floats have dtypes of ml_dtypes. Digests are checked if the file has them.

    Tensors that lie in the parts of ranks have the shapes that the parts add up to: too small without the last one.

    Raises WeightFileError, DigestMismatch, and Unsupported for patterns that match nothing and for dtypes with
    elements of less than a byte.
    """
    with open_weights(path) as weights:
        names = sorted(weights.tensors)
        if only is not None:
            names = sorted(select(names, patterns(only), weights.where))
        convert = _converter(framework)
        _check_dtypes(weights, names)
        memory = {name: Scratch([weights.tensors[name].nbytes]) for name in names}
        pieces = [new_piece(weights, name, scratch, scratch.slots[0]) for name, scratch in memory.items()]
        read_pieces(pieces, WorkerThreads(), Job())
        weights.check_unchanged(proven=weights.stamp is not None)
        if problems := digest_problems(weights.stamp, {piece.key: piece.digests for piece in pieces}):
            raise DigestMismatch(weights.where, problems, DAMAGED)
        stored = weights.tensors
        return {name: convert(free.memory, stored[name].dtype, stored[name].shape) for name, free in memory.items()}


def check_content(path: str | os.PathLike[str]) -> dict[str, Counts]:
    """Read every byte of a weight file, and return the numbers of NaN and infinities, by name. Needs little memory.

    The result of a delta is not computed: only its header is read. Raises WeightFileError and DigestMismatch.
    """
    with open_weights(path) as weights:
        return {} if delta_stamp(weights) else check_tensors(weights, WorkerThreads())


def check_tensors(weights: WeightSet, workers: WorkerThreads) -> dict[str, Counts]:
    """Read every byte of an open set as `check_content` does, and leave it open."""
    findings = Findings({}, {})
    for batch in batches(weights, [(None, name) for name in sorted(weights.tensors)]):
        findings.add(read_scratch(weights, [name for _, name in batch], workers, Job())[1])
    weights.check_unchanged(proven=weights.stamp is not None)
    if problems := digest_problems(weights.stamp, findings.digests):
        raise DigestMismatch(weights.where, problems, DAMAGED)
    return findings.nonfinite


def _check_dtypes(weights: WeightSet, names: Sequence[str]) -> None:
    for name in names:
        if DTYPES[dtype := weights.tensors[name].dtype].torch is None:
            raise Unsupported(f"{weights.where}: {name} is {dtype}, which neither numpy nor torch has")


def _converter(framework: Framework) -> Callable[[memoryview, str, tuple[int, ...]], Any]:
    if framework == "numpy":
        return lambda memory, dtype, shape: as_array(TensorBytes(dtype, shape, memory))
    if framework != "torch":
        raise Unsupported(f'framework={framework!r}: expected "numpy" or "torch"')
    try:
        from weightswap_runtime.torch_tensors import as_tensor
    except ImportError as error:
        raise MissingExtra('read_weights(framework="torch")', "torch") from error
    return as_tensor
