"""Full sets of weights that serve nobody yet, and what became of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .arena import Arena
from .gate import Gate, Version
from .job import Job
from .patches import Patch
from .session import Session
from .staging import Contents

NewSession = Callable[[Arena], Session]
Fill = Callable[[Arena], Contents]


class Committed(NamedTuple):
    """The version that is now served, how long new calls could wait for it (seconds), and the bytes copied.

    interrupt: what arrived meanwhile, and is to be raised when the commit was told of.
    """

    version: Version[Session]
    seconds_paused: float
    bytes_copied: int
    interrupt: BaseException | None = None


class Candidate:
    """A full set of weights that serves nobody yet: in a session of its own, or as a patch of the live arena."""

    def __init__(self, contents: Contents, session: Session | None, patch: Patch | None = None) -> None:
        self.contents = contents
        self.patch = patch
        self.opened = session
        self.check: Callable[[], None] = lambda: None  # raises where a commit that still waits is to end
        self.build: Callable[[Job], Session] | None = None

    def session(self, job: Job) -> Session:
        """A session to try the weights in; of a patch it is made on first use, and takes a full set's memory.

        Raises OutOfMemory, StageCancelled and WeightsMismatch.
        """
        if self.opened is None:
            assert self.build is not None
            opened = self.build(job)
            opened.prepare(self.contents.source)
            self.opened = opened
        return self.opened


def next_generation(gate: Gate[Session]) -> int:
    """That of the next commit."""
    return gate.current.generation + 1 if gate.current else 0
