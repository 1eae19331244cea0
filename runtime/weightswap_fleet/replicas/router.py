"""The router of requests, which leaves out replicas that are behind others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class FreshRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """A router that chooses, of two random replicas with the newest revision, the one with the shorter queue.

    Power of two choices: Mitzenmacher 2001, as Serve's own router.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = fresh(candidate_replicas)
        return [random.sample(candidates, min(2, len(candidates)))] if candidates else []


def fresh(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Return the replicas that are not behind. One without a report has just started with the desired weights."""
    revisions = [replica.routing_stats.get("revision") for replica in replicas]
    newest = max((revision for revision in revisions if revision is not None), default=0)
    pairs = zip(replicas, revisions, strict=True)
    return [replica for replica, revision in pairs if revision is None or revision >= newest]
