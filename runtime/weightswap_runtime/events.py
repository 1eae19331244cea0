"""What happens to a model's weights, told to whoever listens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .receipts import SwapReceipt

EventKind = Literal["staging", "staged", "refused", "cancelled", "discarded", "committed", "rolled back", "failed"]
_log = logging.getLogger("weightswap.events")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging
_LEVELS: dict[str, int] = {"refused": logging.WARNING, "failed": logging.ERROR, "staging": logging.DEBUG}


@dataclass(frozen=True)
class Event:
    """One thing that happened. `time` in seconds since the epoch; `by` is who asked, as they said.

    staging: reading has begun. staged: verified, and not yet served. refused: `error` says why; what is served is as it
    was. cancelled, discarded: given up by its owner. committed, rolled back: `receipt` says what is served now.
    failed: an in-place commit broke off with `error`; calls are refused.
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

    def __str__(self) -> str:
        who = f" for {self.by}" if self.by else ""
        what = f", weights {self.weights_id[:12]}" if self.weights_id else ""
        generation = f", generation {self.receipt.generation}" if self.receipt else ""
        why = f": {type(self.error).__name__}: {self.error}" if self.error else ""
        return f"{self.kind}{who}: {self.source}{what}{generation}{why}"


Listener = Callable[[Event], None]


class Events:
    """Passes events on to listeners and to the log. What a listener raises is logged and goes no further."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> None:
        self._listeners += (listener,)

    def emit(self, event: Event) -> None:
        _log.log(_LEVELS.get(event.kind, logging.INFO), "%s", event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener failed on: %s", event)
