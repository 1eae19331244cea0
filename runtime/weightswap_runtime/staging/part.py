"""Staging of a part: some weights are read from a file, the others are the served ones."""

from __future__ import annotations

import time

from weightswap_runtime.format.identity import identify
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.patch import HostPatch, Span

from .checks import check_expected, check_finite
from .full import Plan, fill
from .request import Base, Contents, StagedChange, Staging


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
