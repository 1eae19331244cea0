"""A model that is kept at what a place says is desired."""

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
    """What a process makes of what is desired: `agrees` where it serves just that.

    revision, desired: what it has read last; None before that, or where nothing is desired. served: the weights id that
    new calls get. error: why it does not agree, or cannot read the place; empty if all is well.
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
    """Follows a place in a thread of its own, until `stop()`, or until the model is dropped.

    Dropping the follower does not stop it. The end of the interpreter does; a forked child has none.
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
        """What the place said last; None as long as it was never read."""
        return self._reconciler.state

    @property
    def agrees(self) -> bool:
        """Whether what it has read last is what is served."""
        return self.status.agrees

    @property
    def status(self) -> FollowStatus:
        """What is desired, and what is served."""
        state, error = self._reconciler.state, self.last_error
        store: Store | None = getattr(self._loop, "store", None)  # none after its end
        served = store.gate.current.weights_id if store and store.gate.current else None
        wanted = state.weights.weights_id if state and state.weights else None
        return FollowStatus(
            place=self.place.where,
            revision=state.revision if state else None,
            desired=wanted,
            served=served,
            agrees=wanted is not None and wanted == served,
            reachable=self._reconciler.reachable,
            on_hold=state is not None and state.hold is not None,
            error=text_of(error) if error else "",
        )

    def wait(self, timeout: float | None = None, *, revision: int = 0) -> bool:
        """Wait, for at most `timeout` seconds, until the model serves what is desired. Returns whether it does.

        revision: what was desired before that one does not count.
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
