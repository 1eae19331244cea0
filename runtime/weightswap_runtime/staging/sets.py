"""Full sets of weights, and parts of them: matched by headers alone, read into memory, verified."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import DigestMismatch, WeightsMismatch
from weightswap_runtime.format.identity import Identity, identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import NAMES, Match, ignored_names, part_of, resolve, tied_names
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena, HostPatch
from weightswap_runtime.tensors import Blocks

from .reading import Findings, compute_weights, read_tensors
from .request import (
    DAMAGED,
    READINGS,
    Kind,
    Staging,
    StagingReport,
    SwapRequest,
    check_expected,
    check_finite,
    check_graph,
    digest_problems,
)


class Plan(NamedTuple):
    """Open files whose names, dtypes and shapes fit the graph, or the requested part of it."""

    weights: WeightSet
    match: Match
    manifest: Manifest  # of the requested part
    ignored: tuple[str, ...] = ()  # the names in the files that the caller's `ignore=` matches

    @property
    def nbytes(self) -> int:
        """The bytes to read."""
        used = {name for names in self.match.found.values() for name in names}
        used |= {name for names in self.match.computed.values() for name in names.values()}
        return sum(self.weights.tensors[name].nbytes for name in used)


def plan(weights: WeightSet, manifest: Manifest, request: SwapRequest) -> Plan:
    """Check a checkpoint by its headers alone, and return what to read.

    Raises GraphMismatch, UnexpectedWeights, and WeightsMismatch with every problem.
    """
    if weights.holds_goldens:
        raise WeightsMismatch(weights.where, ["holds recorded calls, not weights"], "Give the weight file beside it.")
    part = part_of(manifest, request.only) if request.only else manifest
    stamp = weights.stamp
    # in a file with a stamp names are FQNs; in other files they may also be checkpoint keys
    readings = NAMES if stamp else READINGS[request.keys]
    ignored = ignored_names(weights.tensors, request.ignore, weights.where, tied_names(manifest))
    tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in ignored}
    try:
        match = resolve(tensors, part, weights.where, readings=readings, part=bool(request.only))
    except WeightsMismatch as error:
        if stamp:
            check_graph(stamp.graph_id, manifest, weights.where, request, error.problems)
        raise
    if stamp:
        check_graph(stamp.graph_id, manifest, weights.where, request)
        if not request.only and stamp.graph_id == manifest.graph_id:
            check_expected(stamp.weights_id, weights.where, request)
    return Plan(weights, match, part, ignored)


def stage_full(plan: Plan, arena: Arena, staging: Staging) -> tuple[Identity, StagingReport]:
    """Read a full set into an arena, and verify its digests, ties, weights id, and non-finite values.

    Raises WeightFileError, MemoryError, DigestMismatch, WeightsMismatch, StageCancelled, UnexpectedWeights,
    NonFiniteWeights, and ArtifactError or MissingExtra if the adapter's graph cannot be opened; the arena's content is
    then undefined.
    """
    start = time.perf_counter()
    findings, read_at = _fill(plan, arena, staging)
    stamp, where = plan.weights.stamp, plan.weights.where
    labels = stamp.labels if stamp else {}
    identity = identify(plan.manifest.weights, findings.digests, labels, findings.nonfinite)
    if stamp and stamp.graph_id == plan.manifest.graph_id and stamp.weights_id != identity.weights_id:
        text = f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {identity.weights_id[:12]}"
        raise DigestMismatch(where, [text], DAMAGED)
    return identity, _report("full", plan, identity, staging, start, read_at)


def stage_part(
    plan: Plan, arena: Arena, served: Identity, staging: Staging
) -> tuple[Identity, StagingReport, HostPatch]:
    """Read the plan's weights into new memory; all others stay those of `arena`, whose identity is `served`.

    Raises what `stage_full` raises.
    """
    part = HostArena(ArenaLayout(plan.manifest.weights))
    start = time.perf_counter()
    findings, read_at = _fill(plan, part, staging)
    kept = {name: counts for name, counts in served.nonfinite.items() if name not in findings.digests}
    digests = {**served.digests, **findings.digests}
    # the served labels are kept: they still describe most of the weights
    identity = identify(staging.manifest.weights, digests, served.labels, kept | findings.nonfinite)
    report = _report("partial", plan, identity, staging, start, read_at)
    slots = arena.layout.slots
    names = list(findings.digests)
    places = [np.array([[slots[name].offset, slots[name].end]], np.int64) for name in names if slots[name].nbytes]
    contents = [part.view(name) for name in names if slots[name].nbytes]
    return identity, report, HostPatch(map(ByteRanges.of, places, contents))


def _fill(plan: Plan, arena: Arena, staging: Staging) -> tuple[Findings, float]:
    """Read the files into an arena laid out for the plan's weights, and verify digests and ties.

    Returns the findings by weight, and the `perf_counter` time at which reading ended.
    """
    weights, match = plan.weights, plan.match
    staging.job.begin("reading", plan.nbytes)
    by_key = read_tensors(weights, match.found, arena, staging.workers, staging.job)
    findings = compute_weights(weights, match.computed, arena, staging) if match.computed else Findings({}, {})
    read_at = time.perf_counter()
    staging.job.begin("verifying")
    _verify(weights, match, by_key.digests)
    for name, keys in match.found.items():
        findings.digests[name] = by_key.digests[keys[0]]
        if keys[0] in by_key.nonfinite:
            findings.nonfinite[name] = by_key.nonfinite[keys[0]]
    return findings, read_at


def _verify(weights: WeightSet, match: Match, digests: Mapping[str, Blocks]) -> None:
    """Raise DigestMismatch or WeightsMismatch with all wrong digests and broken ties."""
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, but the file has different values for them"
        for keys in match.found.values()
        if len({digests[key] for key in keys}) > 1
    ]
    if corrupt := digest_problems(weights.stamp, digests):
        raise DigestMismatch(weights.where, corrupt + ties, DAMAGED)
    if ties:
        raise WeightsMismatch(weights.where, ties, "Save the checkpoint from a model whose tied tensors are tied.")


def _report(
    kind: Kind, plan: Plan, identity: Identity, staging: Staging, start: float, read_at: float
) -> StagingReport:
    """Check that the weights are those that are expected, and finite; return the report of their staging."""
    where = plan.weights.where
    check_expected(identity.weights_id, where, staging.request)
    return StagingReport(
        weights_id=identity.weights_id,
        labels=dict(identity.labels),
        kind=kind,
        source=where,
        only=staging.request.only,
        ignored=plan.ignored if staging.request.only else (*plan.match.ignored, *plan.ignored),
        bytes_read=plan.nbytes,
        nonfinite=check_finite(identity, where, staging),
        seconds_staged=read_at - start,
        seconds_verified=time.perf_counter() - read_at,
    )
