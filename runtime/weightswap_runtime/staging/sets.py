"""A full set or a part of it."""

from __future__ import annotations

import time
from typing import NamedTuple

from weightswap_runtime.errors import DigestMismatch, WeightsMismatch
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import NAMES, Match, ignored_names, part_of, resolve, tied_names
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena, HostPatch, Span
from weightswap_runtime.tensors import Blocks

from .reading import Findings, compute_weights, read_tensors
from .request import (
    DAMAGED,
    READINGS,
    Base,
    Contents,
    StagedChange,
    Staging,
    SwapRequest,
    check_expected,
    check_finite,
    check_graph,
    digest_problems,
)


class Plan(NamedTuple):
    """Open files whose names, dtypes and shapes fit the graph, or the requested part of it.

    `ignored` are the names in the files that the caller's `ignore=` matches.
    """

    weights: WeightSet
    match: Match
    manifest: Manifest
    ignored: tuple[str, ...] = ()

    @property
    def used(self) -> set[str]:
        """Names in the files of the tensors to read."""
        used = {name for names in self.match.found.values() for name in names}
        return used | {name for names in self.match.computed.values() for name in names.values()}

    @property
    def nbytes(self) -> int:
        return sum(self.weights.tensors[name].nbytes for name in self.used)


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
    match = resolve(tensors, part, weights.where, readings=readings, part=bool(request.only))
    if stamp:
        check_graph(stamp.graph_id, manifest, weights.where, request)
        if not request.only and stamp.graph_id == manifest.graph_id:
            check_expected(stamp.weights_id, weights.where, request)
    return Plan(weights, match, part, ignored)


def fill(plan: Plan, arena: Arena, staging: Staging) -> tuple[Findings, float]:
    """Read the files into an arena laid out for the plan's weights, and verify digests and ties.

    Returns the findings by weight, and the `perf_counter` time at which reading ended. Raises WeightFileError,
    MemoryError, DigestMismatch, WeightsMismatch, StageCancelled, and ArtifactError or MissingExtra if the adapter's
    graph cannot be opened; the arena's content is then undefined.
    """
    weights, match = plan.weights, plan.match
    staging.job.begin("reading", plan.nbytes)
    by_key = read_tensors(weights, match.found, arena, staging.workers, staging.job)
    findings = compute_weights(weights, match.computed, arena, staging) if match.computed else Findings({}, {})
    read_at = time.perf_counter()
    staging.job.begin("verifying")
    _verify(weights, match, by_key.digests)
    findings.add(_by_weight(by_key, match))
    return findings, read_at


def _by_weight(by_key: Findings, match: Match) -> Findings:
    """Return the findings by FQN instead of the file's names."""
    first = {name: keys[0] for name, keys in match.found.items()}
    nonfinite = {name: by_key.nonfinite[key] for name, key in first.items() if key in by_key.nonfinite}
    return Findings({name: by_key.digests[key] for name, key in first.items()}, nonfinite)


def stage_full(plan: Plan, arena: Arena, staging: Staging) -> Contents:
    """Read a full set into an arena, and verify its digests, ties, weights id, and non-finite values.

    Raises what `fill` raises, UnexpectedWeights and NonFiniteWeights.
    """
    start = time.perf_counter()
    findings, read_at = fill(plan, arena, staging)
    stamp, where = plan.weights.stamp, plan.weights.where
    labels = stamp.labels if stamp else {}
    identity = identify(plan.manifest.weights, findings.digests, labels, findings.nonfinite)
    if stamp and stamp.graph_id == plan.manifest.graph_id and stamp.weights_id != identity.weights_id:
        text = f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {identity.weights_id[:12]}"
        raise DigestMismatch(where, [text], DAMAGED)
    check_expected(identity.weights_id, where, staging.request)
    return Contents(
        identity=identity,
        kind="full",
        source=where,
        nonfinite=check_finite(identity, where, staging),
        ignored=(*plan.match.ignored, *plan.ignored),
        bytes_read=plan.nbytes,
        seconds_staged=read_at - start,
        seconds_verified=time.perf_counter() - read_at,
    )


def _verify(weights: WeightSet, match: Match, digests: dict[str, Blocks]) -> None:
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


def stage_part(plan: Plan, base: Base, staging: Staging) -> StagedChange:
    """Read the plan's weights into new memory; all others stay the served ones.

    Raises what `fill` raises, UnexpectedWeights and NonFiniteWeights.
    """
    part = HostArena(ArenaLayout(plan.manifest.weights))
    start = time.perf_counter()
    findings, read_at = fill(plan, part, staging)
    before, where = base.identity, plan.weights.where
    kept = {name: counts for name, counts in before.nonfinite.items() if name not in findings.digests}
    digests = {**before.digests, **findings.digests}
    # the served labels are kept: they still describe most of the weights
    identity = identify(staging.manifest.weights, digests, before.labels, kept | findings.nonfinite)
    check_expected(identity.weights_id, where, staging.request)
    slots = base.arena.layout.slots
    contents = Contents(
        identity=identity,
        kind="partial",
        source=where,
        nonfinite=check_finite(identity, where, staging),
        only=staging.request.only,
        ignored=plan.ignored,
        bytes_read=plan.nbytes,
        seconds_staged=read_at - start,
        seconds_verified=time.perf_counter() - read_at,
    )
    return StagedChange(contents, HostPatch(Span(slots[name].offset, part.view(name)) for name in findings.digests))
