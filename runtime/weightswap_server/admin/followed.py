"""The source that a model follows or watches, for operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from weightswap_runtime.desired.document import DesiredState, DesiredWeights
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.watching.follower import Follower
from weightswap_runtime.live.watching.intake import is_transient
from weightswap_runtime.live.watching.watcher import Watcher

from .documents import Change
from .errors import Conflict, NotServed

T = TypeVar("T")
_RECEIPT_TIMEOUT = 1.0  # seconds to wait for a receipt, once its weights are served
_TIMEOUT = 60.0  # seconds to wait for the weights of a followed place


class Followed:
    """The follower and watcher of one model; operators may start and stop them."""

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
        """The desired state as last read: the place may be unreachable."""
        follower = self.follower
        return follower.desired if follower else None

    @property
    def place(self) -> DesiredPlace | None:
        """The place that changes are written to, if the model has one."""
        return next((source.place for source in self._model.watching if source.place is not None), None)

    def require_place(self, what: str) -> DesiredPlace:
        """Return the place. Raises Conflict if there is none."""
        if (place := self.place) is None:
            raise Conflict(f"{self._name}: {what} is written to a desired state, but the model follows none")
        return place

    @staticmethod
    def seen(place: DesiredPlace, request: Change) -> int:
        """Return the revision that an operator has seen, by default the place's."""
        return place.read().revision if request.revision is None else request.revision

    def stage(self, place: DesiredPlace, weights: DesiredWeights, by: str) -> Staged:
        """Begin to stage weights of the place as its follower would. Raises Conflict if that has ended."""
        source = next((source for source in self._model.watching if source.place is place), None)
        if source is None:
            raise Conflict(f"{self._name}: no longer follows {place.where}; look again")
        request = source.request_for(place.locate(weights), place.located(weights), by)
        return self._model._stage(request, background=True)

    def interrupt(self) -> None:
        """Cancel what the follower or watcher stages, until its next look."""
        for source in self._model.watching:
            source.interrupt()

    def check_free(self) -> None:
        """Raise Conflict if the model follows or watches something."""
        if self._model.watching:
            raise Conflict(f"{self._name}: already follows or watches something; unfollow it first")

    def _find(self, kind: type[T]) -> T | None:
        return next((source for source in self._model.watching if isinstance(source, kind)), None)

    def await_served(self, state: DesiredState) -> SwapReceipt | None:
        """Wait, with a timeout, until this process serves the desired weights. Raises NotServed if it refuses them."""
        desired = state.weights.weights_id if state.weights else None

        def refused(follower: Follower) -> Exception | None:
            read = (follower.status.revision or 0) >= state.revision
            error = follower.last_error if read else None
            return error if isinstance(error, Exception) and not is_transient(error) else None

        self._look_until(lambda follower: self._model.weights_id == desired or refused(follower) is not None)
        follower = self.follower
        if desired and self._model.weights_id != desired and follower and (error := refused(follower)) is not None:
            where = follower.place.where
            raise NotServed(f"{self._name}: {where} now desires {desired[:12]}, which was refused here: {error}")
        return self._await_receipt() if self._model.weights_id == desired else None

    def _await_receipt(self) -> SwapReceipt | None:
        """Return the receipt of the served weights, which follows the commit; None if a keeper was killed between."""
        deadline = time.monotonic() + _RECEIPT_TIMEOUT
        while time.monotonic() < deadline:
            history = self._model.history
            if history and history[-1].generation == self._model.generation:
                return history[-1]
            time.sleep(0.005)
        return None

    def await_read(self, state: DesiredState) -> None:
        """Wait, with a timeout, until this process has read a written state, which the response contains."""
        self._look_until(lambda follower: (follower.status.revision or 0) >= state.revision)

    def _look_until(self, reached: Callable[[Follower], bool]) -> None:
        self.look()
        deadline = time.monotonic() + _TIMEOUT
        while (follower := self.follower) and not reached(follower) and time.monotonic() < deadline:
            time.sleep(0.005)

    def look(self) -> None:
        """Wake the follower and the watcher."""
        for source in self._model.watching:
            source.look_soon()
