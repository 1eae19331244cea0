"""The journal of one model: events, refusals, and what operators said of commits."""

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
    """What no model knows of its history: the reasons of commits, by generation, and what was refused."""

    whys: dict[int, str] = {}
    refusals: list[Refusal] = []


class Journal:
    """Written by the model's events, from now on until `close()`."""

    def __init__(self, model: Model, name: str, followed: Followed) -> None:
        self._model, self._name, self._followed = model, name, followed
        self.refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS)
        self._numbers = count(1)
        self._said = "", ""  # by whom and why the commit that is under way
        self._whys: dict[int, str] = {}  # by generation
        self.on_change: Callable[[JournalState], object] = lambda _: None  # what replaces this process knows it
        self.close = model.listen(self._on_event)

    def inherit(self, earlier: JournalState) -> None:
        """Go on with what the journal of an earlier process has told, whose last commit may not have come to be."""
        last = self._model.generation
        self._whys = {number: why for number, why in earlier.whys.items() if last is not None and number <= last}
        self.refusals.extend(earlier.refusals)
        self._tell()

    def refuse(self, refusal: Refusal) -> None:
        """Something has changed nothing."""
        self.refusals.append(refusal)
        self._tell()

    def _tell(self) -> None:
        self.on_change(JournalState(self._whys, list(self.refusals)))

    def events(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """What has happened after the event of that number, oldest first; the last 200 are kept."""
        return [each for each in list(self._events) if each[0] > after]

    @property
    def last_event(self) -> int:
        events = self._events
        return events[-1][0] if events else 0

    def find_served(self, beginning: str) -> SwapReceipt:
        """The receipt of earlier weights, by the beginning of their id, whose whole file may still be there.

        Raises NothingToRollBack, and Conflict where they are served.
        """
        history, name = self._model.history, self._name
        receipts = {each.weights_id: each for each in history if each.weights_id.startswith(beginning)}
        if len(receipts) != 1:
            what = "nothing that was served" if not receipts else "several"
            raise NothingToRollBack(f"{name}: {beginning}: {what} begins so; the history has the ids")
        weights_id, _ = receipts.popitem()
        if weights_id == self._model.weights_id:
            raise Conflict(f"{name}: serves {weights_id[:12]} already")
        found = [each for each in history if each.weights_id == weights_id and each.kind == "full"]
        if not found:
            raise NothingToRollBack(f"{name}: {beginning}: came by a delta or a part; swap a full file")
        return found[-1]

    @contextmanager
    def saying(self, by: str, why: str) -> Iterator[None]:
        """A block whose commit is for this reason, which is told before: the process may die as soon as it is made."""
        self._said, last = (by, why), self._model.generation
        self.on_change(JournalState(self._whys | {0 if last is None else last + 1: why}, list(self.refusals)))
        try:
            yield
        finally:
            self._said = "", ""
            self._tell()

    def why(self, receipt: SwapReceipt) -> str:
        """As the operator said, or else the place that is followed, then or by now."""
        return self._whys.get(receipt.generation, self._why_by_now(receipt))

    def _why_by_now(self, receipt: SwapReceipt) -> str:
        """What the place says of weights, unless it was written after their commit, as a later rollback to them is."""
        state = self._followed.desired
        known = state.known if state else ()
        said = {each.weights_id: each.why for each in known if each.since <= receipt.committed_at}
        return said.get(receipt.weights_id, "")

    def _note(self, receipt: SwapReceipt) -> None:
        by, why = self._said
        wanted = state.weights if (state := self._followed.desired) else None
        if (not by or receipt.by != by) and wanted and wanted.weights_id == receipt.weights_id:
            by, why = receipt.by, wanted.why
        if receipt.by == by:
            kept = {each.generation for each in self._model.history}
            known = {number: said for number, said in self._whys.items() if number in kept}
            self._whys = known | {receipt.generation: why}
            self._tell()

    def _on_event(self, event: Event) -> None:
        if event.kind in _REFUSED:
            self.refuse(refusal_of(event))
        if event.receipt is not None:
            self._note(event.receipt)
        self._events.append((next(self._numbers), event.as_dict()))
