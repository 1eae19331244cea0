"""The journal of one model: events, refusals, and the reasons of commits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec

from weightswap_runtime.errors import NothingToRollBack
from weightswap_runtime.live.events import Event
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.receipt import SwapReceipt

from .documents import Refusal
from .errors import Conflict
from .followed import Followed
from .model_documents import refusal_of

_REFUSALS = 100
_EVENTS = 200
_REFUSED = ("refused", "skipped", "unreachable", "failed", "cancelled", "discarded")


class JournalState(msgspec.Struct, frozen=True):
    """The parts of the history that a model does not keep: reasons of commits, by generation, and refusals."""

    whys: dict[int, str] = {}
    refusals: list[Refusal] = []


class Journal:
    """The journal of one model, written by its events until `close()`."""

    def __init__(self, model: Model, name: str, followed: Followed) -> None:
        self._model, self._name, self._followed = model, name, followed
        self.refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS)
        self._numbers = count(1)
        self._current = "", ""  # user and reason of the current commit
        self._whys: dict[int, str] = {}  # by generation
        self.on_change: Callable[[JournalState], object] = lambda _: None  # for the process that replaces this one
        self.close = model.listen(self._on_event)

    def inherit(self, earlier: JournalState) -> None:
        """Continue the journal of an earlier process, which may have noted a commit that was never made."""
        last = self._model.generation
        self._whys = {number: why for number, why in earlier.whys.items() if last is not None and number <= last}
        self.refusals.extend(earlier.refusals)
        self._tell()

    def refuse(self, refusal: Refusal) -> None:
        """Note a refusal."""
        self.refusals.append(refusal)
        self._tell()

    def _tell(self) -> None:
        self.on_change(JournalState(self._whys, list(self.refusals)))

    def events(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the events after that number, oldest first. The last 200 are kept."""
        return [(number, event) for number, event in list(self._events) if number > after]

    @property
    def last_event(self) -> int:
        events = self._events
        return events[-1][0] if events else 0

    def find_served(self, beginning: str) -> SwapReceipt:
        """Return the receipt of earlier weights that came as a full file, by the beginning of their id.

        Raises NothingToRollBack, and Conflict if they are served.
        """
        history, name = self._model.history, self._name
        receipts = {receipt.weights_id: receipt for receipt in history if receipt.weights_id.startswith(beginning)}
        if len(receipts) != 1:
            what = "no" if not receipts else "more than one"
            raise NothingToRollBack(f"{name}: {beginning}: matches {what} served weights id; the history has the ids")
        weights_id, _ = receipts.popitem()
        if weights_id == self._model.weights_id:
            raise Conflict(f"{name}: already serves {weights_id[:12]}")
        full = [receipt for receipt in history if receipt.weights_id == weights_id and receipt.kind == "full"]
        if not full:
            raise NothingToRollBack(f"{name}: {beginning}: came from a delta or a part; swap a full file")
        return full[-1]

    def refused(self, weights_id: str) -> str:
        """Return why weights were refused last; empty if they were not, or have been served since."""
        times = (receipt.committed_at for receipt in self._model.history if receipt.weights_id == weights_id)
        last = max(times, default=0.0)
        refusals = [each for each in list(self.refusals) if each.weights_id == weights_id and each.time > last]
        return refusals[-1].error if refusals else ""

    @contextmanager
    def committing(self, by: str, why: str) -> Iterator[None]:
        """Note the reason of a block's commit, before it is made: the process may die right after it."""
        self._current, last = (by, why), self._model.generation
        self.on_change(JournalState(self._whys | {0 if last is None else last + 1: why}, list(self.refusals)))
        try:
            yield
        finally:
            self._current = "", ""
            self._tell()

    def why(self, receipt: SwapReceipt) -> str:
        """Return the reason of a commit: the operator's, or the followed place's."""
        return self._whys.get(receipt.generation, self._why_by_now(receipt))

    def _why_by_now(self, receipt: SwapReceipt) -> str:
        """Return the place's reason for weights, unless it was written after their commit, as by a rollback to them."""
        state = self._followed.desired
        known = state.known if state else ()
        whys = {weights.weights_id: weights.why for weights in known if weights.since <= receipt.committed_at}
        return whys.get(receipt.weights_id, "")

    def _note(self, receipt: SwapReceipt) -> None:
        by, why = self._current
        desired = state.weights if (state := self._followed.desired) else None
        if (not by or receipt.by != by) and desired and desired.weights_id == receipt.weights_id:
            by, why = receipt.by, desired.why
        if receipt.by == by:
            kept = {earlier.generation for earlier in self._model.history}
            known = {number: reason for number, reason in self._whys.items() if number in kept}
            self._whys = known | {receipt.generation: why}
            self._tell()

    def _on_event(self, event: Event) -> None:
        if event.kind in _REFUSED:
            self.refuse(refusal_of(event))
        if event.receipt is not None:
            self._note(event.receipt)
        self._events.append((next(self._numbers), event.as_dict()))
