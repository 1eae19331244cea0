"""Staging: a weight file or a checkpoint becomes a full set of weights that serves nobody yet."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from .adapter import KEYS, NAMES, UNAMBIGUOUS, Keys, Match, Readings, resolve
from .arena import Arena
from .digests import Blocks, tensor_digest
from .errors import (
    DigestMismatch,
    GraphMismatch,
    UnexpectedWeights,
    Unsupported,
    WeightsMismatch,
)
from .goldens import Mode, check_mode
from .identity import Identity, identify
from .job import Job
from .manifest import Manifest
from .memory import IN_PLACE, StagedIn
from .nonfinite import Allowed, Nonfinite, newly_nonfinite, refuse_nonfinite
from .reading import Found, read_tensors
from .selection import part_of
from .weightfile import Stamp
from .weightset import WeightSet
from .workers import Workers

if TYPE_CHECKING:
    from .transforms import Transforms

OpenTransforms = Callable[[], "Transforms"]
Kind = Literal["full", "partial", "delta", "rollback"]
_READINGS: dict[str | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}
_WEIGHTS_ID = re.compile(r"[0-9a-f]{64}")


class Request(NamedTuple):
    """What a caller wants staged. `only` are patterns of FQNs; empty: everything.

    `allow_nonfinite`: the weights that may have values that are not finite where the served ones have none: all, none,
    or some; None: all, but whoever swaps does not say so.
    """

    path: str | os.PathLike[str]
    keys: Keys | None = None
    only: tuple[str, ...] = ()
    expect: str | None = None
    allow_other_graph: bool = False
    verify: Mode = "goldens"
    allow_nonfinite: Allowed = None

    def check(self) -> None:
        """Raise Unsupported for what cannot be meant."""
        if self.keys not in _READINGS:
            raise Unsupported(f"keys={self.keys!r}: the names of a file are read as {', '.join(map(repr, _READINGS))}")
        if self.expect is not None and not (isinstance(self.expect, str) and _WEIGHTS_ID.fullmatch(self.expect)):
            raise Unsupported(f"expect={self.expect!r}: a weights id has 64 hexadecimal digits")
        check_mode(self.verify)


class Contents(NamedTuple):
    """What was staged. Times in seconds: reading and hashing, then comparing. `verified`: how goldens were.

    `nonfinite`: the weights that have NaN or infinities which those that are served have not.
    """

    identity: Identity
    kind: Kind
    source: str
    ignored: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds_staged: float = 0.0
    seconds_verified: float = 0.0
    verified: str = "none"
    only: tuple[str, ...] = ()
    staged_in: StagedIn = IN_PLACE
    nonfinite: Mapping[str, Nonfinite] = MappingProxyType({})

    def placed(self, staged_in: StagedIn) -> Contents:
        """The same, in memory from which it is copied to where it serves."""
        return self._replace(staged_in=staged_in)

    def proven(self, verified: str, seconds: float) -> Contents:
        """The same after goldens were tried for `seconds`."""
        return self._replace(verified=verified, seconds_verified=self.seconds_verified + seconds)


class Plan(NamedTuple):
    """Opened files whose names, dtypes and shapes fit the graph, or the part of it that is asked for."""

    weights: WeightSet
    match: Match
    manifest: Manifest

    @property
    def used(self) -> set[str]:
        """The names of the tensors that are read."""
        used = {name for names in self.match.found.values() for name in names}
        return used | {name for names in self.match.computed.values() for name in names.values()}

    @property
    def nbytes(self) -> int:
        return sum(self.weights.tensors[name].nbytes for name in self.used)


def plan(weights: WeightSet, manifest: Manifest, request: Request) -> Plan:
    """Check everything that the headers of a checkpoint can tell.

    Raises GraphMismatch, UnexpectedWeights, and WeightsMismatch with every problem.
    """
    if weights.holds_goldens:
        raise WeightsMismatch(weights.where, ["holds recorded calls, no weights"], "Give the weight file beside it.")
    wanted = part_of(manifest, request.only) if request.only else manifest
    stamp = weights.stamp
    # a stamp says that the names are FQNs; other files may have either
    readings = NAMES if stamp else _READINGS[request.keys]
    match = resolve(weights.tensors, wanted, weights.where, readings=readings, part=bool(request.only))
    if stamp:
        check_graph(stamp.graph_id, manifest, weights.where, request)
        if not request.only and stamp.graph_id == manifest.graph_id:
            check_expected(stamp.weights_id, weights.where, request)
    return Plan(weights, match, wanted)


def check_graph(graph_id: str, manifest: Manifest, where: str, request: Request) -> None:
    """Raise GraphMismatch for a file that was packed for another graph."""
    if graph_id != manifest.graph_id and not request.allow_other_graph:
        raise GraphMismatch(
            f"{where}: packed for the graph {graph_id[:12]}, this model is {manifest.graph_id[:12]}. "
            "Its tensors fit: pass allow_other_graph=True if that is meant, or pack the checkpoint for this one."
        )


def check_expected(found: str, where: str, request: Request) -> None:
    """Raise UnexpectedWeights for other weights than the caller has asked for."""
    if request.expect is not None and found != request.expect:
        raise UnexpectedWeights(f"{where}: gives the weights {found[:12]}, expected {request.expect[:12]}")


def check_finite(
    manifest: Manifest, identity: Identity, served: Identity | None, where: str, request: Request
) -> Mapping[str, Nonfinite]:
    """What is not finite, and is in the weights that are served. Raises NonFiniteWeights if it is not allowed."""
    found = newly_nonfinite(manifest.weights, identity.nonfinite, served.nonfinite if served else None)
    refuse_nonfinite(found, request.allow_nonfinite, where)
    return found


class Filled(NamedTuple):
    """What was read into an arena, by weight, and how long it took in seconds."""

    found: Found
    seconds_read: float
    seconds_verified: float


def fill(plan: Plan, arena: Arena, workers: Workers, job: Job, open_transforms: OpenTransforms) -> Filled:
    """Read the files into an arena that has the plan's weights, and verify digests and ties.

    Raises WeightFileError, MemoryError, DigestMismatch, WeightsMismatch, StageCancelled, and ArtifactError or
    MissingExtra where the adapter's graph cannot be opened; the arena's content is then undefined.
    """
    weights, match, _ = plan
    start = time.perf_counter()
    job.begin("reading", plan.nbytes)
    read = read_tensors(weights, match.found, arena, workers, job)
    found = _compute(plan, arena, workers, job, open_transforms()) if match.computed else Found({}, {})
    done = time.perf_counter()
    job.begin("verifying")
    _verify(weights, match, read.digests)
    found.add(_by_weight(read, match))
    return Filled(found, done - start, time.perf_counter() - done)


def _by_weight(read: Found, match: Match) -> Found:
    first = {name: keys[0] for name, keys in match.found.items()}
    nonfinite = {name: read.nonfinite[key] for name, key in first.items() if key in read.nonfinite}
    return Found({name: read.digests[key] for name, key in first.items()}, nonfinite)


def stage_full(
    plan: Plan,
    arena: Arena,
    workers: Workers,
    job: Job,
    open_transforms: OpenTransforms,
    request: Request,
    served: Identity | None,
) -> Contents:
    """Read a full set into an arena, and verify it: digests, ties, weights id, and values that are not finite.

    served: what it is to replace. Raises what `fill` does, UnexpectedWeights and NonFiniteWeights.
    """
    filled = fill(plan, arena, workers, job, open_transforms)
    start = time.perf_counter()
    stamp, where = plan.weights.stamp, plan.weights.where
    labels = stamp.labels if stamp else {}
    identity = identify(plan.manifest.weights, filled.found.digests, labels, filled.found.nonfinite)
    if stamp and stamp.graph_id == plan.manifest.graph_id and stamp.weights_id != identity.weights_id:
        text = f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {identity.weights_id[:12]}"
        raise DigestMismatch(where, [text], DAMAGED)
    check_expected(identity.weights_id, where, request)
    return Contents(
        identity=identity,
        kind="full",
        source=where,
        nonfinite=check_finite(plan.manifest, identity, served, where, request),
        ignored=plan.match.ignored,
        bytes_read=plan.nbytes,
        seconds_staged=filled.seconds_read,
        seconds_verified=filled.seconds_verified + time.perf_counter() - start,
    )


def _compute(plan: Plan, arena: Arena, workers: Workers, job: Job, transforms: Transforms) -> Found:
    from .computing import compute_weights  # needs torch

    return compute_weights(plan.weights, plan.match.computed, arena, workers, transforms, job)


DAMAGED = "The file is damaged: copy it again, or pack it again."


def _verify(weights: WeightSet, match: Match, read: dict[str, Blocks]) -> None:
    """Raise DigestMismatch or WeightsMismatch for wrong digests and broken ties, with all of them."""
    digests = {key: tensor_digest(blocks) for key, blocks in read.items()}
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, the file has different values for them"
        for keys in match.found.values()
        if len({digests[key] for key in keys}) > 1
    ]
    corrupt = digest_problems(weights.stamp, digests) if weights.stamp else []
    if corrupt:
        raise DigestMismatch(weights.where, corrupt + ties, DAMAGED)
    if ties:
        raise WeightsMismatch(weights.where, ties, "Save the checkpoint from a model whose tied tensors are tied.")


def digest_problems(stamp: Stamp, digests: dict[str, str]) -> list[str]:
    """What of the digests that were found is not what the stamp says."""
    return [
        f"{key}: the file records the digest {stamp.digests[key][:12]}, its bytes have {digest[:12]}"
        for key, digest in sorted(digests.items())
        if digest != stamp.digests[key]
    ]
