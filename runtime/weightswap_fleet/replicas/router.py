"""Which replicas requests go to: not to those that are behind, as long as others are not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class FreshRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Of two replicas taken by chance the one with the shorter queue, among those that serve the newest revision.

    Power of two choices: Mitzenmacher 2001, as Serve's own router.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        found = fresh(candidate_replicas)
        return [random.sample(found, min(2, len(found)))] if found else []


def fresh(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Those that are not behind. One that has told nothing yet has begun with what is desired."""
    told = [replica.routing_stats.get("revision") for replica in replicas]
    newest = max((revision for revision in told if revision is not None), default=0)
    return [each for each, revision in zip(replicas, told, strict=True) if revision is None or revision >= newest]
