"""Receipts and events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weightswap_runtime.errors import text_of, visible
from weightswap_runtime.format.identity import Nonfinite
from weightswap_runtime.jobs import Listeners, Stop
from weightswap_runtime.memory.host import StagedIn
from weightswap_runtime.staging.request import Kind


@dataclass(frozen=True)
class SwapReceipt:
    """The receipt of one commit. Sizes in bytes, times in seconds.

    kind: "full", "partial", "delta" or "rollback". source: the path, the URL without credentials, or "rollback".
    only: the patterns of a partial swap; its `labels` are those of the weights before it.
    by: the requester, as given. ignored: names of the source that are not weights: state, `_extra_state`, and matches
    of `ignore=`. staged_in: the memory from which a commit in place copied, and why that was chosen.
    committed_at: seconds since the epoch. bytes_read: read from the source; bytes_copied: copied within the pause.
    seconds_staged: reading and hashing; seconds_verified: comparing, and running the goldens; seconds_paused: how long
    new calls could wait. verified: "goldens" if recorded outputs were reproduced, "finite" if outputs on recorded
    inputs were finite, "none" if there was nothing to try. nonfinite: the weights with NaN or infinities where the
    weights before had none (for the first weights: all with NaN, and those with infinities that require a gradient).
    contexts: the number of contexts whose state was made with other weights, by outcome: "invalidated", "reset", "kept"
    or "pinned". variants: the names GROUP/NAME of resident variants by outcome: "kept", or "dropped" because they
    belong to other weights.
    """

    generation: int
    weights_id: str
    previous_weights_id: str | None
    graph_id: str
    kind: Kind
    source: str
    by: str
    labels: dict[str, str]
    only: tuple[str, ...]
    ignored: tuple[str, ...]
    residency: str
    staged_in: StagedIn
    bytes_read: int
    bytes_copied: int
    verified: str
    seconds_staged: float
    seconds_verified: float
    seconds_paused: float
    committed_at: float
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)
    contexts: dict[str, int] = field(default_factory=dict)
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, tuples, texts and numbers alone, as `--json` prints them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


EventKind = Literal[
    "staging",
    "staged",
    "refused",
    "cancelled",
    "discarded",
    "committed",
    "rolled back",
    "failed",
    "skipped",
    "unreachable",
    "waiting",
    "variant added",
    "variant replaced",
    "variant removed",
    "variant evicted",
    "variant dropped",
    "variant refused",
]
_log = logging.getLogger("weightswap.events")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging
_LEVELS: dict[str, int] = {
    "refused": logging.WARNING,
    "variant refused": logging.WARNING,
    "unreachable": logging.WARNING,
    "failed": logging.ERROR,
    "staging": logging.DEBUG,
}


@dataclass(frozen=True)
class Event:
    """One event. `time` in seconds since the epoch; `by` is the requester, as given.

    Every staging begins with "staging" and ends with exactly one of "committed", "refused", "cancelled" and "discarded"
    (a staging whose last reference is dropped may end with none). A listener must not swap. It should store the fields
    that it needs rather than the event: the traceback of `error` keeps the objects of its frames alive. The kinds:

    staging: reading has begun.
    staged: the weights are verified, and not yet served. `weights_id` and `labels` identify them; `seconds_staged`,
      `seconds_verified` and `nonfinite` are those of `SwapReceipt`; `nbytes` were read.
    refused: `error` says why, and `phase` when; the served weights are as they were. phase: "waiting" for another
      staging (there was no "staging" event then), "opening", "reading", "copying", "verifying"; or "committing": calls
      or pins held the memory of a commit or rollback, or there was nothing to roll back to. After a refused commit the
      weights are still staged.
    cancelled: the staging was cancelled before it was complete; `phase` as above.
    discarded: the staging was discarded after it was complete.
    committed, rolled back: `receipt` says what is served now.
    failed: an in-place commit failed half-way with `error`; calls are refused.

    Watchers and followers emit further events:

    skipped: a file is skipped until it changes; `error` says why.
    waiting: a delta waits until its base weights are served, or a file until its place is released from hold; `error`
      says which. Reported once until the file is tried; a commit or "skipped" ends it.
    unreachable: the directory or the place cannot be read; `error` says why. Reported once until it can be read again.

    Variants (`variant` is GROUP/NAME) have the events "variant added", "variant replaced", "variant removed", "variant
    evicted" and "variant dropped", as in `VariantReceipt`, and "variant refused"; `error` says why.

    weights_id: of a staging that is not verified or was refused, the one that was expected; None if none was. source:
    the path or URL, or "rollback". operation: the kind of the swap, as in `SwapReceipt`; None if it is not known yet.
    nbytes: bytes read; of refused and cancelled stagings, bytes done in their last phase. seconds: since the request of
    the staging, or of the commit that was refused.
    """

    kind: EventKind
    source: str
    by: str
    graph_id: str
    weights_id: str | None = None
    nbytes: int = 0
    seconds: float = 0.0
    receipt: SwapReceipt | None = None
    error: BaseException | None = None
    time: float = field(default_factory=time.time)
    operation: Kind | None = None
    phase: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    seconds_staged: float = 0.0
    seconds_verified: float = 0.0
    nonfinite: Mapping[str, Nonfinite] = field(default_factory=dict)
    variant: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, tuples, texts and numbers; an error as its class, its text and its problems."""
        fields: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_error_fields)
        return fields

    def __str__(self) -> str:
        who = f" for {visible(self.by)}" if self.by else ""
        what = f", weights {self.weights_id[:12]}" if self.weights_id else ""
        generation = f", generation {self.receipt.generation}" if self.receipt else ""
        odd = f", not finite: {visible(', '.join(self.nonfinite))}" if self.nonfinite else ""
        where = f" while {self.phase}" if self.phase else ""
        text = text_of(self.error) if self.error else ""
        if self.kind == "skipped":  # "refused" has logged the whole text
            text = text.partition("\n")[0]
        why = f": {type(self.error).__name__}: {text}" if self.error else ""
        name = f" {visible(self.variant)}" if self.variant else ""
        return f"{self.kind}{name}{who}{where}: {visible(self.source)}{what}{generation}{odd}{why}"


def _error_fields(error: BaseException) -> dict[str, Any]:
    problems = getattr(error, "problems", ())
    return {"error": type(error).__name__, "message": str(error), "problems": problems}


Listener = Callable[[Event], object]


class Events:
    """The listeners of a store's events. Every event is also logged, and so are errors of the listeners."""

    def __init__(self) -> None:
        self._listeners: Listeners[[Event]] = Listeners(_log)

    def listen(self, listener: Listener) -> Stop:
        return self._listeners.add(listener)

    def emit(self, event: Event) -> None:
        level = logging.WARNING if event.nonfinite else _LEVELS.get(event.kind, logging.INFO)
        if _log.isEnabledFor(level):
            # as text: a stored log record must not keep the error, whose frames refer to the staging
            _log.log(level, "%s", str(event))
        self._listeners.tell(event)
