"""Full sets of weights that serve nobody yet, and what became of one."""

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


class Means(NamedTuple):
    """What a residency works with. `keep`: whether the host keeps the weights before those of the last commit."""

    new_session: NewSession
    memory: Memory
    layout: ArenaLayout
    gate: Gate[Session]
    workers: WorkerThreads
    keep: bool


class StagingTarget(NamedTuple):
    """A session that serves nobody, for a full set of weights; and where its memory is."""

    session: Session
    staged_in: StagedIn


@dataclass(eq=False)
class StagedSet:
    """A full set of weights in a session of its own."""

    contents: Contents
    session: Session

    def trial_session(self, job: Job) -> Session:
        """A session to try the weights in."""
        return self.session


@dataclass(eq=False)
class StagedPatch:
    """A full set of weights, as a patch of those that are served. `build` makes a session that has all of it."""

    contents: Contents
    patch: Patch
    build: Callable[[Job], Session]
    _opened: Session | None = None

    def trial_session(self, job: Job) -> Session:
        """A session to try the weights in. It is made on first use, and takes a full set's memory.

        Raises OutOfMemory, StageCancelled and WeightsMismatch.
        """
        if self._opened is None:
            opened = self.build(job)
            opened.run_prologues(self.contents.source)
            self._opened = opened
        return self._opened


Candidate = StagedSet | StagedPatch


class Committed(NamedTuple):
    """The version that is now served, how long new calls could wait for it (seconds), and the bytes copied."""

    version: Version[Session]
    seconds_paused: float
    bytes_copied: int


def next_generation(gate: Gate[Session]) -> int:
    """That of the next commit."""
    return gate.current.generation + 1 if gate.current else 0
