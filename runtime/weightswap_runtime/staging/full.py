"""Staging: a weight file or a checkpoint becomes a full set of weights that serves nobody yet."""

from __future__ import annotations

import time
from typing import NamedTuple

from weightswap_runtime.errors import DigestMismatch, WeightsMismatch
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.name_matching import NAMES, Match, resolve
from weightswap_runtime.format.name_patterns import ignored_names, part_of
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors.digests import Blocks

from .checks import DAMAGED, check_expected, check_finite, check_graph, digest_problems
from .computed import compute_weights
from .reading import Findings, read_tensors
from .request import READINGS, Contents, Staging, SwapRequest


class Plan(NamedTuple):
    """Opened files whose names, dtypes and shapes fit the graph, or the part of it that is asked for.

    left_out: the names that the caller ignores.
    """

    weights: WeightSet
    match: Match
    manifest: Manifest
    left_out: tuple[str, ...] = ()

    @property
    def used(self) -> set[str]:
        """The names of the tensors that are read."""
        used = {name for names in self.match.found.values() for name in names}
        return used | {name for names in self.match.computed.values() for name in names.values()}

    @property
    def nbytes(self) -> int:
        return sum(self.weights.tensors[name].nbytes for name in self.used)


def plan(weights: WeightSet, manifest: Manifest, request: SwapRequest) -> Plan:
    """Check everything that the headers of a checkpoint can tell.

    Raises GraphMismatch, UnexpectedWeights, and WeightsMismatch with every problem.
    """
    if weights.holds_goldens:
        raise WeightsMismatch(weights.where, ["holds recorded calls, no weights"], "Give the weight file beside it.")
    wanted = part_of(manifest, request.only) if request.only else manifest
    stamp = weights.stamp
    # a stamp says that the names are FQNs; other files may have either
    readings = NAMES if stamp else READINGS[request.keys]
    ignored = ignored_names(weights.tensors, request.ignore, weights.where)
    tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in ignored}
    match = resolve(tensors, wanted, weights.where, readings=readings, part=bool(request.only))
    if stamp:
        check_graph(stamp.graph_id, manifest, weights.where, request)
        if not request.only and stamp.graph_id == manifest.graph_id:
            check_expected(stamp.weights_id, weights.where, request)
    return Plan(weights, match, wanted, ignored)


def fill(plan: Plan, arena: Arena, staging: Staging) -> tuple[Findings, float]:
    """Read the files into an arena that has the plan's weights, and verify digests and ties.

    Returns what was found, by weight, and when all was read. Raises WeightFileError, MemoryError, DigestMismatch,
    WeightsMismatch, StageCancelled, and ArtifactError or MissingExtra where the adapter's graph cannot be opened; the
    arena's content is then undefined.
    """
    weights, match = plan.weights, plan.match
    staging.job.begin("reading", plan.nbytes)
    read = read_tensors(weights, match.found, arena, staging.workers, staging.job)
    findings = compute_weights(weights, match.computed, arena, staging) if match.computed else Findings({}, {})
    done = time.perf_counter()
    staging.job.begin("verifying")
    _verify(weights, match, read.digests)
    findings.add(_by_weight(read, match))
    return findings, done


def _by_weight(read: Findings, match: Match) -> Findings:
    first = {name: keys[0] for name, keys in match.found.items()}
    nonfinite = {name: read.nonfinite[key] for name, key in first.items() if key in read.nonfinite}
    return Findings({name: read.digests[key] for name, key in first.items()}, nonfinite)


def stage_full(plan: Plan, arena: Arena, staging: Staging) -> Contents:
    """Read a full set into an arena, and verify it: digests, ties, weights id, and values that are not finite.

    Raises what `fill` does, UnexpectedWeights and NonFiniteWeights.
    """
    start = time.perf_counter()
    findings, read = fill(plan, arena, staging)
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
        ignored=(*plan.match.ignored, *plan.left_out),
        bytes_read=plan.nbytes,
        seconds_staged=read - start,
        seconds_verified=time.perf_counter() - read,
    )


def _verify(weights: WeightSet, match: Match, read: dict[str, Blocks]) -> None:
    """Raise DigestMismatch or WeightsMismatch for wrong digests and broken ties, with all of them."""
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, the file has different values for them"
        for keys in match.found.values()
        if len({read[key] for key in keys}) > 1
    ]
    if corrupt := digest_problems(weights.stamp, read):
        raise DigestMismatch(weights.where, corrupt + ties, DAMAGED)
    if ties:
        raise WeightsMismatch(weights.where, ties, "Save the checkpoint from a model whose tied tensors are tied.")
