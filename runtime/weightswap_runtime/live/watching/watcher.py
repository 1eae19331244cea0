"""Watchers, which keep a model at the newest weights of a directory."""

from __future__ import annotations

import os

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.live.events import Listener
from weightswap_runtime.sources.location import printable

from .directory import open_directory
from .intake import Intake, Start
from .loop import Looker, Loop, Subject, Watching
from .promotion import Promotion
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
        super().__init__(Loop(subject, lookers, interval, callback, promotion))

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
