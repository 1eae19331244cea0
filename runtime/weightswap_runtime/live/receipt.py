"""What is told about swaps: receipts of commits, and events of everything that happens to weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from weightswap_runtime.errors import reason_of, text_of, visible
from weightswap_runtime.format.identity import Nonfinite
from weightswap_runtime.jobs import Listeners, Stop
from weightswap_runtime.staging.request import Kind, StagingReport


class SwapReceipt(StagingReport, frozen=True, kw_only=True):
    """The receipt of one commit: the report of its staging, and what the commit did. Sizes in bytes, times in seconds.

    A rollback has read nothing; its `kind` and `source` are "rollback".
    """

    generation: int
    previous_weights_id: str | None
    graph_id: str
    by: str  # the requester, as given
    residency: str
    bytes_copied: int  # within the pause
    seconds_paused: float  # how long new calls could wait
    committed_at: float  # seconds since the epoch
    contexts: dict[str, int] = field(default_factory=dict)
    """The number of contexts whose state was made with other weights, by outcome: "invalidated", "reset", "kept" or
    "pinned"."""
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names GROUP/NAME of resident variants by outcome: "kept", or "dropped" because they belong to other
    weights."""

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


class Event(Struct, frozen=True):
    """What has happened to the weights of a model.

    Every staging begins with "staging" and ends with exactly one of "committed", "refused", "cancelled" and "discarded"
    (a staging whose last reference is dropped may end with none). A listener must not swap. It should store the fields
    that it needs rather than the event: the traceback of `error` keeps the objects of its frames alive. The kinds:

    staging: reading has begun.
    staged: the weights are verified, and not yet served; `weights_id`, `labels`, `seconds_staged`, `seconds_verified`
      and `nonfinite` are those of `SwapReceipt`.
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
      says which. Reported once until the file is tried; a commit or "skipped" ends it. Or a model without weights
      follows a desired store that wants none yet.
    unreachable: the directory or the desired store cannot be read; `error` says why. Reported once until it can be read
    again.

    Variants have the events "variant added", "variant replaced", "variant removed", "variant evicted" and "variant
    dropped", as in `VariantReceipt`, and "variant refused"; `error` says why.
    """

    kind: EventKind
    source: str  # the path or URL, or "rollback"
    by: str  # the requester, as given
    graph_id: str
    weights_id: str | None = None  # of a staging that was not verified: the one that was expected, if any
    nbytes: int = 0  # bytes read; of refused and cancelled stagings, bytes done in their last phase
    seconds: float = 0.0  # since the request of the staging, or of the commit that was refused
    receipt: SwapReceipt | None = None
    error: BaseException | None = None
    time: float = field(default_factory=time.time)  # in seconds since the epoch
    operation: Kind | None = None  # the kind of the swap, as in `SwapReceipt`; None if it is not known yet
    phase: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    seconds_staged: float = 0.0
    seconds_verified: float = 0.0
    nonfinite: Mapping[str, Nonfinite] = field(default_factory=dict)
    variant: str = ""  # GROUP/NAME

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, tuples, texts and numbers; an error as its class, reason, text and problems."""
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
    return {"error": type(error).__name__, "reason": reason_of(error), "message": str(error), "problems": problems}


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
        self._listeners.notify(event)
