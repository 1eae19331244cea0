"""A model that is kept at the newest weights of a directory."""

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
    """Watches a directory in a thread of its own, until `stop()`, or until the model is dropped.

    Dropping the watcher does not stop it. The end of the interpreter does; a forked child has none.
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
        self._intake = Intake(self.directory, listing, interval, start, begun=promotion.begun if promotion else None)
        lookers: tuple[Looker, ...] = (self._intake,)
        if promotion is not None:  # what is desired comes first: another may have written it, or an operator
            lookers = (Reconciler(promotion.place, interval), self._intake)
        super().__init__(Loop(subject, lookers, interval, callback, promotion))

    @property
    def skipped(self) -> dict[str, BaseException]:
        """Why files were passed over, by name, in order; only those that still are in the directory.

        One whose weights are served all the same, as somebody has swapped them in by hand, goes at the next look.
        """
        return self._intake.skipped

    @property
    def waiting(self) -> dict[str, BaseException]:
        """Why files of the directory wait, by name, in order: deltas from weights that are not served, and files that
        are cut off, as they may still be being copied: those are skipped after a minute without a change."""
        return self._intake.waiting

    def __repr__(self) -> str:
        return self._described(self.directory)


def _check_part(subject: Subject, promotion: Promotion | None) -> None:
    if not subject.request.only:
        return
    if promotion is not None:
        raise Unsupported("only, promote: a part of a set is nothing that a new process could start from; promote full")
    if subject.store.gate.current is None:
        raise Unsupported(
            "only: a part of a set goes into weights that are served, and none are; load the model with weights first"
        )
