"""Staging of a delta whose base is not served: a full set is read, and all deltas up to it are laid over that."""

from __future__ import annotations

from weightswap_runtime.errors import BaseMismatch
from weightswap_runtime.format.delta_file import DeltaStamp, delta_stamp
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.memory.arena import Arena

from .delta import check_header, stage_delta
from .full import plan, stage_full
from .request import Base, BaseFile, Contents, Staging


def stage_chain(weights: WeightSet, stamp: DeltaStamp, arena: Arena, staging: Staging) -> Contents:
    """Bring an arena to the weights of a delta, from the files of `request.onto`; nothing that is served is read.

    Raises what `stage_full` and `stage_delta` raise; the arena's content is then undefined.
    """
    check_header(stamp, weights.where, staging)  # before much is read
    full, *deltas = staging.request.onto
    between = _leading_to(full, staging)
    with open_weights(full.path, staging.job.check) as opened:
        contents = stage_full(plan(opened, between.manifest, between.request), arena, between)
    for each in deltas:
        with open_weights(each.path, staging.job.check) as opened:
            contents = _laid(opened, delta_stamp(opened), arena, contents, _leading_to(each, staging))
    return _laid(weights, stamp, arena, contents, staging)


def _leading_to(base: BaseFile, staging: Staging) -> Staging:
    """What is between may be anything, as long as it is what was said."""
    request = staging.request._replace(path=base.path, expect=base.weights_id, allow_nonfinite=None)
    return staging._replace(request=request)


def _laid(weights: WeightSet, stamp: DeltaStamp | None, arena: Arena, before: Contents, staging: Staging) -> Contents:
    """The arena with a delta laid over what it has."""
    if stamp is None:
        raise BaseMismatch(f"{weights.where}: is no delta by now; put back the one that was there, or swap a full file")
    contents, patch = stage_delta(weights, stamp, Base(arena, before.identity), staging)
    patch.lay_over(arena, staging.workers, staging.job)
    return contents._replace(
        bytes_read=before.bytes_read + contents.bytes_read,
        seconds_staged=before.seconds_staged + contents.seconds_staged,
        seconds_verified=before.seconds_verified + contents.seconds_verified,
    )
