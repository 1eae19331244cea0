"""Staging of a part: some weights from a file, the others are those that are served."""

from __future__ import annotations

import time

from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.patch import HostPatch, Span
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.workers import Workers

from .checks import check_expected, check_finite
from .full import OpenTransforms, Plan, fill
from .request import Contents, Served, StagedChange, SwapRequest


def stage_part(
    plan: Plan,
    served: Served,
    manifest: Manifest,
    workers: Workers,
    job: Job,
    open_transforms: OpenTransforms,
    request: SwapRequest,
) -> StagedChange:
    """Read the plan's weights into memory of their own; the rest are the live ones. Raises what `fill` does."""
    part = HostArena(ArenaLayout(plan.manifest.weights))
    filled = fill(plan, part, workers, job, open_transforms)
    start = time.perf_counter()
    read, before = filled.found, served.identity
    kept = {name: counts for name, counts in before.nonfinite.items() if name not in read.digests}
    # most of it is still what the labels say
    identity = identify(manifest.weights, {**before.digests, **read.digests}, before.labels, kept | read.nonfinite)
    check_expected(identity.weights_id, plan.weights.where, request)
    slots = served.arena.layout.slots
    contents = Contents(
        identity=identity,
        kind="partial",
        source=plan.weights.where,
        nonfinite=check_finite(manifest, identity, before, plan.weights.where, request),
        only=request.only,
        ignored=plan.left_out,
        bytes_read=plan.nbytes,
        seconds_staged=filled.seconds_read,
        seconds_verified=filled.seconds_verified + time.perf_counter() - start,
    )
    return StagedChange(contents, HostPatch(Span(slots[name].offset, part.view(name)) for name in read.digests))
