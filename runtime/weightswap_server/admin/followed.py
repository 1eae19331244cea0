"""The source that a model follows or watches, as far as operators have to do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.watching.follower import Follower
from weightswap_runtime.live.watching.intake import is_transient
from weightswap_runtime.live.watching.watcher import Watcher

from .documents import Change
from .errors import Conflict, NotServed

T = TypeVar("T")
_RECEIPT = 1.0  # seconds for a receipt, once its weights are served
_PATIENCE = 60.0  # seconds for a followed place's weights to come


class Followed:
    """Of one model; it changes with what operators let it follow."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name

    @property
    def follower(self) -> Follower | None:
        return self._find(Follower)

    @property
    def watcher(self) -> Watcher | None:
        return self._find(Watcher)

    @property
    def desired(self) -> DesiredState | None:
        """As it was read last: the place may be away."""
        follower = self.follower
        return follower.desired if follower else None

    @property
    def place(self) -> DesiredPlace | None:
        """What a change has to be written to."""
        return next((each.place for each in self._model.watching if each.place is not None), None)

    def needed_place(self, what: str) -> DesiredPlace:
        """Raises Conflict where there is none."""
        if (place := self.place) is None:
            raise Conflict(f"{self._name}: {what} is written to a desired state, and the model follows none")
        return place

    @staticmethod
    def seen(place: DesiredPlace, request: Change) -> int:
        """The revision that an operator has seen, or the place's."""
        return place.read().revision if request.revision is None else request.revision

    def check_free(self) -> None:
        """Raise Conflict where it follows or watches something."""
        if self._model.watching:
            raise Conflict(f"{self._name}: follows or watches something already; unfollow it first")

    def _find(self, kind: type[T]) -> T | None:
        return next((each for each in self._model.watching if isinstance(each, kind)), None)

    def await_served(self, state: DesiredState) -> SwapReceipt | None:
        """Wait until this process serves what is desired, for a while. Raises NotServed where it is refused."""
        wanted = state.weights.weights_id if state.weights else None

        def refused(follower: Follower) -> Exception | None:
            read = (follower.status.revision or 0) >= state.revision
            error = follower.last_error if read else None
            return error if isinstance(error, Exception) and not is_transient(error) else None

        self._look_until(lambda follower: self._model.weights_id == wanted or refused(follower) is not None)
        follower = self.follower
        if wanted and self._model.weights_id != wanted and follower and (error := refused(follower)) is not None:
            raise NotServed(f"{self._name}: {follower.place.where} desires {wanted[:12]} by now, refused here: {error}")
        return self._receipt() if self._model.weights_id == wanted else None

    def _receipt(self) -> SwapReceipt | None:
        """That of what is served, which is written just after the commit; a keeper may have been killed before it."""
        deadline = time.monotonic() + _RECEIPT
        while time.monotonic() < deadline:
            history = self._model.history
            if history and history[-1].generation == self._model.generation:
                return history[-1]
            time.sleep(0.005)
        return None

    def await_read(self, state: DesiredState) -> None:
        """Wait until this process has read what an operator wrote, for a while: the answer tells it."""
        self._look_until(lambda follower: (follower.status.revision or 0) >= state.revision)

    def _look_until(self, reached: Callable[[Follower], bool]) -> None:
        self.look()
        deadline = time.monotonic() + _PATIENCE
        while (follower := self.follower) and not reached(follower) and time.monotonic() < deadline:
            time.sleep(0.005)

    def look(self) -> None:
        """Let it look soon."""
        for each in self._model.watching:
            each.look_soon()
