"""Followers, which keep a model at the desired weights of a place."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.errors import text_of
from weightswap_runtime.live.events import Listener
from weightswap_runtime.live.store import Store
from weightswap_runtime.options import check_timeout
from weightswap_runtime.threads.claims import POLL_SECONDS

from .loop import Loop, Subject, Watching
from .reconciler import Reconciler


class FollowStatus(NamedTuple):
    """The status of a process that follows a place. `agrees`: whether it serves exactly the desired weights.

    revision: that of the last read; None before the first. desired: the desired weights id; None if there is none.
    served: the weights id that new calls use. error: why it does not agree, or cannot read the place; else empty.
    """

    place: str
    revision: int | None
    desired: str | None
    served: str | None
    agrees: bool
    reachable: bool
    on_hold: bool
    error: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values."""
        return self._asdict()


class Follower(Watching):
    """A thread that follows a place, until `stop()`, or until the model is dropped. Made by `Model.follow()`.

    Dropping the follower does not stop it. The end of the interpreter does; a forked child does not have the thread.
    """

    def __init__(self, subject: Subject, place: DesiredPlace, interval: float, callback: Listener | None) -> None:
        self._place = place
        self._reconciler = Reconciler(place, interval)
        super().__init__(Loop(subject, (self._reconciler,), interval, callback))

    @property
    def place(self) -> DesiredPlace:
        return self._place

    @property
    def desired(self) -> DesiredState | None:
        """The desired state at the last read; None before the first."""
        return self._reconciler.state

    @property
    def agrees(self) -> bool:
        """True if the desired weights of the last read are served."""
        return self.status.agrees

    @property
    def status(self) -> FollowStatus:
        """The desired and the served weights, and whether they agree."""
        state, error = self._reconciler.state, self.last_error
        store: Store | None = getattr(self._loop, "store", None)  # absent after the thread has ended
        served = store.gate.current.weights_id if store and store.gate.current else None
        desired = state.weights_id if state else None
        return FollowStatus(
            place=self.place.where,
            revision=state.revision if state else None,
            desired=desired,
            served=served,
            agrees=desired is not None and desired == served,
            reachable=self._reconciler.reachable,
            on_hold=state is not None and state.hold is not None,
            error=text_of(error) if error else "",
        )

    def wait(self, timeout: float | None = None, *, revision: int = 0) -> bool:
        """Wait, for at most `timeout` seconds, until the model serves the desired weights. Return whether it does.

        revision: wait for the weights of this revision or a later one.
        """
        check_timeout(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._agrees_on(revision) and self.alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._agrees_on(revision)

    def _agrees_on(self, revision: int) -> bool:
        status = self.status
        return status.agrees and (status.revision or 0) >= revision

    def __repr__(self) -> str:
        return self._described(self.place.where)
