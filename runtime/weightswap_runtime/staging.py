"""Stage and verify: a weight file or a checkpoint becomes a full set of weights in an arena that serves nobody yet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from .adapter import KEYS, NAMES, UNAMBIGUOUS, Keys, Match, Readings, resolve
from .arena import HostArena
from .errors import DigestMismatch, GraphMismatch, OutOfMemory, Unsupported, WeightsMismatch
from .manifest import Manifest
from .reading import read_tensors
from .weightfile import Stamp, weights_id
from .weightset import WeightSet, open_weights
from .workers import Workers

if TYPE_CHECKING:
    from .transforms import Transforms

_READINGS: dict[str | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}


class Contents(NamedTuple):
    """What was staged. Times in seconds: reading and hashing, then comparing."""

    weights_id: str
    labels: dict[str, str]
    source: str
    ignored: tuple[str, ...]
    bytes_read: int
    seconds_staged: float
    seconds_verified: float


class Plan(NamedTuple):
    """Opened files whose names, dtypes and shapes fit the graph."""

    weights: WeightSet
    match: Match


@contextmanager
def plan(
    path: str | os.PathLike[str], manifest: Manifest, *, allow_other_graph: bool, keys: Keys | None
) -> Iterator[Plan]:
    """Open a checkpoint and check everything that its headers can tell.

    Raises WeightFileError, GraphMismatch, and WeightsMismatch with every problem.
    """
    if keys not in _READINGS:
        raise Unsupported(f"keys={keys!r}: the names of a file are read as {', '.join(map(repr, _READINGS))}")
    with open_weights(path) as weights:
        stamp = weights.stamp
        # a stamp says that the names are FQNs; other files may have either
        match = resolve(weights.tensors, manifest, weights.where, readings=NAMES if stamp else _READINGS[keys])
        if stamp and stamp.graph_id != manifest.graph_id and not allow_other_graph:
            raise GraphMismatch(
                f"{weights.where}: packed for the graph {stamp.graph_id[:12]}, this model is {manifest.graph_id[:12]}. "
                "Its tensors fit: pass allow_other_graph=True if that is meant, or pack the checkpoint for this one."
            )
        yield Plan(weights, match)


def fill(
    plan: Plan, manifest: Manifest, arena: HostArena, workers: Workers, open_transforms: Callable[[], Transforms]
) -> Contents:
    """Read the files into the arena and verify them: digests, ties, weights id.

    Raises WeightFileError, OutOfMemory, DigestMismatch, WeightsMismatch, and ArtifactError or MissingExtra where the
    adapter's graph cannot be opened; the arena's content is then undefined.
    """
    weights, match = plan
    start = time.perf_counter()
    try:
        read = read_tensors(weights, match.found, arena, workers)
        computed = _compute(plan, arena, workers, open_transforms()) if match.computed else {}
    except MemoryError as error:
        raise OutOfMemory(f"{weights.where}: no memory to read it into") from error
    staged = time.perf_counter()
    digests = computed | {name: read[keys[0]] for name, keys in match.found.items()}
    found_id = weights_id((weight.row, digests[weight.name]) for weight in manifest.weights)
    _verify(weights, match, read, found_id, manifest)
    used = {name for names in match.found.values() for name in names}
    used |= {name for names in match.computed.values() for name in names.values()}
    return Contents(
        weights_id=found_id,
        labels=dict(weights.stamp.labels) if weights.stamp else {},
        source=weights.where,
        ignored=match.ignored,
        bytes_read=sum(weights.tensors[name].nbytes for name in used),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
    )


def _compute(plan: Plan, arena: HostArena, workers: Workers, transforms: Transforms) -> dict[str, str]:
    from .computing import compute_weights  # needs torch

    return compute_weights(plan.weights, plan.match.computed, arena, workers, transforms)


def _verify(weights: WeightSet, match: Match, digests: dict[str, str], found_id: str, manifest: Manifest) -> None:
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, the file has different values for them"
        for keys in match.found.values()
        if len({digests[key] for key in keys}) > 1
    ]
    stamp = weights.stamp
    corrupt = _digest_problems(stamp, digests, found_id, manifest) if stamp else []
    if corrupt:
        raise DigestMismatch(weights.where, corrupt + ties, "The file is damaged: copy it again, or pack it again.")
    if ties:
        raise WeightsMismatch(weights.where, ties, "Save the checkpoint from a model whose tied tensors are tied.")


def _digest_problems(stamp: Stamp, digests: dict[str, str], found_id: str, manifest: Manifest) -> list[str]:
    problems = [
        f"{key}: the file records the digest {stamp.digests[key][:12]}, its bytes have {digest[:12]}"
        for key, digest in sorted(digests.items())
        if digest != stamp.digests[key]
    ]
    if not problems and stamp.graph_id == manifest.graph_id and stamp.weights_id != found_id:
        problems.append(f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {found_id[:12]}")
    return problems
