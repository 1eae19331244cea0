"""Staging of a part: some weights from a file, the others are those that are served."""

from __future__ import annotations

import time

from weightswap_runtime.format.identity import identify
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.patch import HostPatch, Span

from .checks import check_expected, check_finite
from .full import Plan, fill
from .request import Base, Contents, StagedChange, Staging


def stage_part(plan: Plan, base: Base, staging: Staging) -> StagedChange:
    """Read the plan's weights into memory of their own; the rest are the live ones. Raises what `fill` does."""
    part = HostArena(ArenaLayout(plan.manifest.weights))
    start = time.perf_counter()
    findings, read = fill(plan, part, staging)
    before, where = base.identity, plan.weights.where
    kept = {name: counts for name, counts in before.nonfinite.items() if name not in findings.digests}
    digests = {**before.digests, **findings.digests}
    # most of it is still what the labels say
    identity = identify(staging.manifest.weights, digests, before.labels, kept | findings.nonfinite)
    check_expected(identity.weights_id, where, staging.request)
    slots = base.arena.layout.slots
    contents = Contents(
        identity=identity,
        kind="partial",
        source=where,
        nonfinite=check_finite(identity, where, staging),
        only=staging.request.only,
        ignored=plan.left_out,
        bytes_read=plan.nbytes,
        seconds_staged=read - start,
        seconds_verified=time.perf_counter() - read,
    )
    return StagedChange(contents, HostPatch(Span(slots[name].offset, part.view(name)) for name in findings.digests))
