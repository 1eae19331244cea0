"""Staging of a delta whose base is not served: a full set is read, then each delta of the chain is laid over it."""

from __future__ import annotations

from weightswap_runtime.errors import BaseMismatch
from weightswap_runtime.format.delta_file import DeltaStamp, delta_stamp
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.memory.arena import Arena

from .delta import check_header, stage_delta
from .full import plan, stage_full
from .request import Base, BaseFile, Contents, Staging


def stage_chain(weights: WeightSet, stamp: DeltaStamp, arena: Arena, staging: Staging) -> Contents:
    """Fill an arena with the weights of a delta, from the files of `request.onto`; served weights are not read.

    Raises what `stage_full` and `stage_delta` raise; the arena's content is then undefined.
    """
    check_header(stamp, weights.where, staging)  # before large files are read
    full, *deltas = staging.request.onto
    first = _staging_of(full, staging)
    most = staging.manifest.most_header
    with open_weights(full.path, staging.job.check, most) as opened:
        contents = stage_full(plan(opened, first.manifest, first.request), arena, first)
    for delta in deltas:
        with open_weights(delta.path, staging.job.check, most) as opened:
            contents = _lay_delta(opened, delta_stamp(opened), arena, contents, _staging_of(delta, staging))
    return _lay_delta(weights, stamp, arena, contents, staging)


def _staging_of(base: BaseFile, staging: Staging) -> Staging:
    """Return the staging of an earlier file, which must give the stated weights; non-finite values are allowed."""
    request = staging.request._replace(path=base.path, expect=base.weights_id, allow_nonfinite=None)
    return staging._replace(request=request)


def _lay_delta(
    weights: WeightSet, stamp: DeltaStamp | None, arena: Arena, before: Contents, staging: Staging
) -> Contents:
    """Lay a delta over the arena's weights, whose contents are `before`."""
    if stamp is None:
        raise BaseMismatch(f"{weights.where}: is no longer a delta; restore it, or swap a full file")
    contents, patch = stage_delta(weights, stamp, Base(arena, before.identity), staging)
    patch.lay_over(arena, staging.workers, staging.job)
    return contents._replace(
        bytes_read=before.bytes_read + contents.bytes_read,
        seconds_staged=before.seconds_staged + contents.seconds_staged,
        seconds_verified=before.seconds_verified + contents.seconds_verified,
    )
