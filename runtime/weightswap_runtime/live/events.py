"""Events of a model's weights, told to whoever listens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weightswap_runtime.errors import text_of
from weightswap_runtime.format.nonfinite import Nonfinite
from weightswap_runtime.messages import visible
from weightswap_runtime.staging.request import Kind
from weightswap_runtime.threads.listeners import Listeners, Stop

from .receipt import SwapReceipt

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
    """One thing that happened. `time` in seconds since the epoch; `by` is who asked, as they said.

    Every staging begins with "staging" and ends with exactly one of committed, refused, cancelled and discarded (one
    that is dropped without a word, with none). A listener must not swap; keep what an event says rather than the event,
    as its `error` keeps alive what it came through:

    staging: reading has begun.
    staged: verified, and not yet served. `weights_id` and `labels` say what; `seconds_staged`, `seconds_verified` and
      `nonfinite` are those of `SwapReceipt`; `nbytes` were read.
    refused: `error` says why, `phase` how far it was; what is served is as it was. phase: "waiting" for another staging
      (there was no "staging" then), "opening", "reading", "copying", "verifying"; or "committing": calls or pins kept a
      commit or a rollback from its memory, or nothing was kept to roll back to, and a staging is still staged.
    cancelled: given up before it was staged; `phase` as above.
    discarded: given up after it was staged.
    committed, rolled back: `receipt` says what is served now.
    failed: an in-place commit broke off with `error`; calls are refused.

    From a directory that is watched come also:

    skipped: a file was passed over, until it changes; `error` says why.
    waiting: a delta is for other weights than those that are served, and waits for them; `error` says for which. Told
      once, until it was tried; a commit, or "skipped", ends it.
    unreachable: the directory cannot be listed, for `error`. Told once, until it could be listed again.

    Of variants (`variant` is GROUP/NAME) come "variant added", "variant replaced", "variant removed", "variant evicted"
    and "variant dropped", as in `VariantReceipt`, and "variant refused", for `error`.

    source: the path or URL, or "rollback". operation: what kind of swap it is, as in `SwapReceipt`; None where that is
    not known yet. nbytes: bytes read; of refused and cancelled stagings, bytes done in their last phase. seconds: since
    the staging, or the commit that was refused, was asked for.
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
        """The fields as dicts, tuples, texts and numbers alone; of an error its class, its text and its problems."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_described)
        return found

    def __str__(self) -> str:
        who = f" for {visible(self.by)}" if self.by else ""
        what = f", weights {self.weights_id[:12]}" if self.weights_id else ""
        generation = f", generation {self.receipt.generation}" if self.receipt else ""
        odd = f", not finite: {visible(', '.join(self.nonfinite))}" if self.nonfinite else ""
        where = f" while {self.phase}" if self.phase else ""
        text = text_of(self.error) if self.error else ""
        if self.kind == "skipped":  # "refused" has told all of it
            text = text.partition("\n")[0]
        why = f": {type(self.error).__name__}: {text}" if self.error else ""
        name = f" {visible(self.variant)}" if self.variant else ""
        return f"{self.kind}{name}{who}{where}: {visible(self.source)}{what}{generation}{odd}{why}"


def _described(error: BaseException) -> dict[str, Any]:
    problems = getattr(error, "problems", ())
    return {"error": type(error).__name__, "message": str(error), "problems": problems}


Listener = Callable[[Event], object]


class Events:
    """Passes events on to listeners and to the log. What a listener raises is logged and goes no further."""

    def __init__(self) -> None:
        self._listeners: Listeners[[Event]] = Listeners(_log)

    def listen(self, listener: Listener) -> Stop:
        return self._listeners.add(listener)

    def emit(self, event: Event) -> None:
        level = logging.WARNING if event.nonfinite else _LEVELS.get(event.kind, logging.INFO)
        if _log.isEnabledFor(level):
            # as text: a record that is kept must not keep the error, and through its frames the staging
            _log.log(level, "%s", str(event))
        self._listeners.tell(event)
