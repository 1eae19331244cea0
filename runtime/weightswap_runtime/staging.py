"""Stage and verify: a weight file becomes a full set of weights in an arena that serves nobody yet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .adapter import NAMES, UNAMBIGUOUS, Match, resolve
from .arena import HostArena
from .errors import DigestMismatch, GraphMismatch, OutOfMemory, WeightsMismatch
from .manifest import Manifest
from .reading import read_tensors
from .weightfile import Stamp, WeightFile, weights_id
from .workers import Workers


class Contents(NamedTuple):
    """What was staged. Times in seconds: reading and hashing, then comparing."""

    weights_id: str
    labels: dict[str, str]
    source: str
    bytes_read: int
    seconds_staged: float
    seconds_verified: float


class Plan(NamedTuple):
    """An opened file whose names, dtypes and shapes fit the graph."""

    file: WeightFile
    match: Match


@contextmanager
def plan(path: str | os.PathLike[str], manifest: Manifest, *, allow_other_graph: bool) -> Iterator[Plan]:
    """Open a file and check everything that its header can tell.

    Raises WeightFileError, GraphMismatch, and WeightsMismatch with every problem.
    """
    with WeightFile(path) as file:
        stamp = file.stamp
        # a stamp says that the names are FQNs; other files may have either
        match = resolve(file.tensors, manifest, str(file.path), readings=NAMES if stamp else UNAMBIGUOUS)
        if stamp and stamp.graph_id != manifest.graph_id and not allow_other_graph:
            raise GraphMismatch(
                f"{file.path}: packed for the graph {stamp.graph_id[:12]}, this model is {manifest.graph_id[:12]}. "
                "Its tensors fit: pass allow_other_graph=True if that is meant, or pack the checkpoint for this one."
            )
        yield Plan(file, match)


def fill(plan: Plan, manifest: Manifest, arena: HostArena, workers: Workers) -> Contents:
    """Read the file into the arena and verify it: digests, ties, weights id.

    Raises WeightFileError, OutOfMemory, DigestMismatch and WeightsMismatch; the arena's content is then undefined.
    """
    file, match = plan
    start = time.perf_counter()
    try:
        digests = read_tensors(file, match.found, arena, workers)
    except MemoryError as error:
        raise OutOfMemory(f"{file.path}: no memory to read it into") from error
    staged = time.perf_counter()
    found_id = weights_id((weight.row, digests[match.found[weight.name][0]]) for weight in manifest.weights)
    _verify(file, match, digests, found_id, manifest)
    ranges = (file.tensors[key] for keys in match.found.values() for key in keys)
    return Contents(
        weights_id=found_id,
        labels=dict(file.stamp.labels) if file.stamp else {},
        source=str(file.path),
        bytes_read=sum(tensor.end - tensor.begin for tensor in ranges),
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
    )


def _verify(file: WeightFile, match: Match, digests: dict[str, str], found_id: str, manifest: Manifest) -> None:
    ties = [
        f"{' and '.join(keys)} are one tensor in the graph, the file has different values for them"
        for keys in match.found.values()
        if len({digests[key] for key in keys}) > 1
    ]
    corrupt = _digest_problems(file.stamp, digests, found_id, manifest) if file.stamp else []
    if corrupt:
        raise DigestMismatch(str(file.path), corrupt + ties, "The file is damaged: copy it again, or pack it again.")
    if ties:
        raise WeightsMismatch(str(file.path), ties, "Save the checkpoint from a model whose tied tensors are tied.")


def _digest_problems(stamp: Stamp, digests: dict[str, str], found_id: str, manifest: Manifest) -> list[str]:
    problems = [
        f"{key}: the file records the digest {stamp.digests[key][:12]}, its bytes have {digest[:12]}"
        for key, digest in sorted(digests.items())
        if digest != stamp.digests[key]
    ]
    if not problems and stamp.graph_id == manifest.graph_id and stamp.weights_id != found_id:
        problems.append(f"the file records the weights id {stamp.weights_id[:12]}, its tensors have {found_id[:12]}")
    return problems
