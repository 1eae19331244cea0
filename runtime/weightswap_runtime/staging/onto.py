"""Staging of a delta whose base is not served: a full set is read, and all deltas up to it are laid over that."""

from __future__ import annotations

from weightswap_runtime.errors import BaseMismatch
from weightswap_runtime.format.delta_file import DeltaStamp, delta_stamp
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.workers import Workers

from .checks import check_finite
from .delta import stage_delta
from .full import OpenTransforms, plan, stage_full
from .request import BaseFile, Contents, Served, SwapRequest


def stage_onto(
    weights: WeightSet,
    stamp: DeltaStamp,
    arena: Arena,
    manifest: Manifest,
    workers: Workers,
    job: Job,
    open_transforms: OpenTransforms,
    request: SwapRequest,
    served: Identity | None,
) -> Contents:
    """Bring an arena to the weights of a delta, from the files of `request.onto`; nothing that is served is read.

    Raises what `stage_full` and `stage_delta` raise; the arena's content is then undefined.
    """
    full, *deltas = request.onto
    asked = _request_of(full, request)
    with open_weights(full.path, job.check) as opened:
        contents = stage_full(plan(opened, manifest, asked), arena, workers, job, open_transforms, asked, None)
    for each in deltas:
        with open_weights(each.path, job.check) as opened:
            contents = _laid(
                opened, delta_stamp(opened), arena, contents, manifest, workers, job, _request_of(each, request)
            )
    last = request._replace(allow_nonfinite=None)
    contents = _laid(weights, stamp, arena, contents, manifest, workers, job, last)
    return contents._replace(nonfinite=check_finite(manifest, contents.identity, served, weights.where, request))


def _request_of(base: BaseFile, request: SwapRequest) -> SwapRequest:
    """What is between may be anything, as long as it is what was said."""
    return request._replace(path=base.path, expect=base.weights_id, allow_nonfinite=None)


def _laid(
    weights: WeightSet,
    stamp: DeltaStamp | None,
    arena: Arena,
    before: Contents,
    manifest: Manifest,
    workers: Workers,
    job: Job,
    request: SwapRequest,
) -> Contents:
    """The arena with a delta laid over what it has."""
    if stamp is None:
        raise BaseMismatch(f"{weights.where}: is no delta by now; put back the one that was there, or swap a full file")
    contents, patch = stage_delta(weights, stamp, Served(arena, before.identity), manifest, workers, job, request)
    patch.lay_over(arena, workers, job)
    return contents._replace(
        bytes_read=before.bytes_read + contents.bytes_read,
        seconds_staged=before.seconds_staged + contents.seconds_staged,
        seconds_verified=before.seconds_verified + contents.seconds_verified,
    )
