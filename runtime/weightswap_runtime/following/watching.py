"""What `Model.watch` and `Model.follow` return: threads that poll a directory or a place."""

from __future__ import annotations

import math
import os
import time
from typing import Any, NamedTuple

from weightswap_runtime.errors import Unsupported, check_timeout, text_of
from weightswap_runtime.jobs import POLL_SECONDS
from weightswap_runtime.live.receipt import Listener
from weightswap_runtime.live.store import Store
from weightswap_runtime.sources.location import printable

from .controller import Looker, Promotion, Subject, Watching
from .desired_state import DesiredState
from .directory import open_directory
from .intake import Intake, Start
from .place import DesiredPlace
from .reconciler import Reconciler


class Watcher(Watching):
    """A thread that watches a directory, until `stop()`, or until the model is dropped. Made by `Model.watch()`.

    Dropping the watcher does not stop it. The end of the interpreter does; a forked child does not have the thread.
    """

    def __init__(
        self,
        subject: Subject,
        directory: str | os.PathLike[str],
        interval: float,
        start: Start,
        callback: Listener | None,
        promotion: Promotion | None,
    ) -> None:
        if start not in ("newest", "all", "new"):
            raise Unsupported(f'start={start!r}: expected "newest", "all" or "new"')
        _check_part(subject, promotion)
        self.directory = printable(directory)
        listing = open_directory(directory)
        known_names = promotion.known_names if promotion else None
        self._intake = Intake(self.directory, listing, interval, start, known_names=known_names)
        lookers: tuple[Looker, ...] = (self._intake,)
        if promotion is not None:  # desired weights come first: an operator or another watcher may have set them
            lookers = (Reconciler(promotion.place, interval), self._intake)
        super().__init__(subject, lookers, interval, callback, promotion)

    @property
    def skipped(self) -> dict[str, BaseException]:
        """The errors of skipped files that are still in the directory, by name, in order.

        A file whose weights were swapped in by hand is no longer listed after the next look.
        """
        return self._intake.skipped

    @property
    def waiting(self) -> dict[str, BaseException]:
        """The reasons why files of the directory wait, by name, in order.

        Deltas wait for their base weights, truncated files for their writer: after a minute without a change, they are
        skipped.
        """
        return self._intake.waiting

    def __repr__(self) -> str:
        return self._described(self.directory)


def _check_part(subject: Subject, promotion: Promotion | None) -> None:
    if not subject.request.only:
        return
    if promotion is not None:
        raise Unsupported("only, promote: a new process could not start from a part of a set; promote full sets")
    if subject.store.gate.current is None:
        raise Unsupported(
            "only: a part of a set goes into served weights, and none are served; load the model with weights first"
        )


class FollowStatus(NamedTuple):
    """The status of a process that follows a place."""

    place: str
    revision: int | None  # that of the last read; None before the first
    desired: str | None  # the desired weights id; None if there is none
    served: str | None  # the weights id that new calls use
    agrees: bool  # it serves exactly the desired weights
    reachable: bool  # the place could be read
    on_hold: bool
    error: str  # why it does not agree, or cannot read the place; else empty

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values."""
        return self._asdict()


class Follower(Watching):
    """A thread that follows a place, until `stop()`, or until the model is dropped. Made by `Model.follow()`.

    Dropping the follower does not stop it. The end of the interpreter does; a forked child does not have the thread.
    """

    def __init__(self, subject: Subject, place: DesiredPlace, interval: float, callback: Listener | None) -> None:
        self._place = place
        self._reconciler = Reconciler(place, interval, is_only_source=True)
        super().__init__(subject, (self._reconciler,), interval, callback)

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
        store: Store | None = getattr(self, "_store", None)  # absent after the thread has ended
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
