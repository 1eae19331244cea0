"""Candidates: staged sets of weights that are not served yet, and the results of their commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from weightswap_runtime.live.gate import Gate, Version
from weightswap_runtime.live.session import Session
from weightswap_runtime.memory.arena import Arena, ArenaLayout
from weightswap_runtime.memory.host import Memory, StagedIn
from weightswap_runtime.memory.patch import Patch
from weightswap_runtime.staging.request import Contents
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

NewSession = Callable[[Arena], Session]


class Resources(NamedTuple):
    """The resources of a residency. `keep`: whether host memory keeps the weights before the last commit."""

    new_session: NewSession
    memory: Memory
    layout: ArenaLayout
    gate: Gate[Session]
    workers: WorkerThreads
    keep: bool


class StagingTarget(NamedTuple):
    """A session that is not served, to stage a full set of weights into, and the kind of its memory."""

    session: Session
    staged_in: StagedIn


@dataclass(eq=False)
class StagedSet:
    """A full set of weights in a session of its own."""

    contents: Contents
    session: Session

    def trial_session(self, job: Job) -> Session:
        """Return a session to try the weights in."""
        return self.session


@dataclass(eq=False)
class StagedPatch:
    """A full set of weights, as a patch of the served ones. `build` makes a session that holds the full set."""

    contents: Contents
    patch: Patch
    build: Callable[[Job], Session]
    _trial_session: Session | None = None

    def trial_session(self, job: Job) -> Session:
        """Return a session to try the weights in. It is made on first use, and takes the memory of a full set.

        Raises OutOfMemory, StageCancelled and WeightsMismatch.
        """
        if self._trial_session is None:
            session = self.build(job)
            session.run_prologues(self.contents.source)
            self._trial_session = session
        return self._trial_session


Candidate = StagedSet | StagedPatch


class Committed(NamedTuple):
    """The version that is now served, the seconds that new calls could wait for it, and the bytes copied."""

    version: Version[Session]
    seconds_paused: float
    bytes_copied: int


def next_generation(gate: Gate[Session]) -> int:
    """Return the generation of the next commit."""
    return gate.current.generation + 1 if gate.current else 0
