"""Conversions of the library's objects into the admin plane's documents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightswap_runtime.live.events import Event
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.watching.follower import Follower
from weightswap_runtime.live.watching.intake import refused_weights
from weightswap_runtime.live.watching.watcher import Watcher
from weightswap_runtime.sources.location import printable

from .documents import Desired, Refusal, ServedWeights, StagedWeights, StageRequest, Watched


@dataclass
class Entry:
    """Weights that an operator has staged. revision: that of the followed place, as seen before."""

    staged: Staged
    request: StageRequest  # its source is the path or URL
    by: str
    revision: int | None
    swapping: bool
    since: float = field(default_factory=time.time)

    @property
    def path(self) -> str:
        return self.request.source


def served_weights(last: SwapReceipt, why: str) -> ServedWeights:
    return ServedWeights(
        weights_id=last.weights_id,
        generation=last.generation,
        labels=dict(last.labels),
        since=last.committed_at,
        by=last.by,
        why=why,
        source=last.source,
        kind=last.kind,
        verified=last.verified,
    )


def staged_weights(entry: Entry | None) -> StagedWeights | None:
    if entry is None:
        return None
    weights = StagedWeights(
        source=printable(entry.path), by=entry.by, why=entry.request.why, since=entry.since, ready=False
    )
    try:
        staged = entry.staged
        if staged.done:
            weights.weights_id, weights.labels, weights.kind = staged.weights_id, staged.labels, staged.kind
            weights.verified, weights.nonfinite = staged.verified, list(staged.nonfinite)
            weights.ready = not entry.swapping
    except Exception:  # it was discarded or cancelled meanwhile
        return None
    return weights


def following(follower: Follower) -> Desired:
    status = follower.status.as_dict()
    del status["served"]
    desired, state = Desired(**status), follower.desired
    if state is not None and state.hold is not None:
        desired.held_by, desired.held_why, desired.held_since = state.hold.by, state.hold.why, state.hold.since
    return desired


def watched(watcher: Watcher) -> Watched:
    error = watcher.last_error
    return Watched(
        directory=watcher.directory,
        error=str(error) if error else "",
        skipped={name: str(why) for name, why in watcher.skipped.items()},
        waiting={name: str(why) for name, why in watcher.waiting.items()},
    )


def aborted(entry: Entry, rule: str, values: Mapping[str, float | None]) -> Refusal:
    """Return the refusal of a canary that its rule has aborted, with its measures."""
    measured = ", ".join(f"{name}={value:.4g}" for name, value in values.items() if value is not None)
    return Refusal(
        time=time.time(),
        event="canary aborted",
        source=printable(entry.path),
        by=entry.by,
        phase="canary",
        kind="",
        error=f"{rule}: {measured}",
    )


def refusal_of(event: Event) -> Refusal:
    return Refusal(
        time=event.time,
        event=event.kind,
        source=event.source,
        by=event.by,
        phase=event.phase,
        kind=type(event.error).__name__ if event.error else "",
        error=str(event.error) if event.error else "",
        weights_id=refused_weights(event),
    )
