"""Two arenas: a commit exchanges them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightswap_runtime.errors import NothingToRollBack
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.live.gate import Version
from weightswap_runtime.live.session import Session
from weightswap_runtime.memory.arena import HostArena
from weightswap_runtime.memory.host import FOR_PREVIOUS, FOR_TWO, IN_PLACE, advising
from weightswap_runtime.memory.patch import copy_ranges, differing
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.request import StagedChange
from weightswap_runtime.threads.job import Job

from .candidate import Candidate, Committed, Resources, StagedSet, StagingTarget, next_generation


class Double:
    """Two arenas, each with its own session. A commit exchanges them; the old weights stay for a rollback.

    A staging overwrites the old weights. With `keep` they are saved first, for a rollback if no commit follows.
    """

    name = "double"

    def __init__(self, resources: Resources) -> None:
        new_session, memory, layout, self._gate, self._workers, keep = resources
        with advising(FOR_TWO):
            self.sessions = (new_session(memory.arena(layout)), new_session(memory.arena(layout)))
        self._resident: dict[Session, Version[Session]] = {}  # by session, the version that is complete in it
        with advising(FOR_PREVIOUS):
            self._saved = HostArena(layout) if keep else None
        self._displaced: Version[Session] | None = None  # the version in `_saved`

    def adopt(self, generation: int, identity: Identity, previous: Identity | None) -> Version[Session]:
        """Take over weights that another process left in the arenas. `previous`: those that a rollback would serve."""
        for number, weights in ((generation, identity), (generation - 1, previous)):
            if weights is not None:
                session = self.sessions[number % 2]
                session.content = weights.digests
                self._resident[session] = Version(session, number, weights)
        return self._resident[self.sessions[generation % 2]]

    @contextmanager
    def target(self, timeout: float | None, job: Job) -> Iterator[StagingTarget]:
        idle = self._idle()
        self._gate.wait_idle(idle, timeout, job.check)
        self._before_overwriting(idle, job)
        with idle.arena.writing():
            yield StagingTarget(idle, IN_PLACE)

    def stage_patch(self, change: StagedChange, timeout: float | None, job: Job) -> StagedSet:
        current = self._gate.current
        assert current is not None
        live = current.session.arena
        before = self._idle().content
        with self.target(timeout, job) as (idle, _):
            ranges = [live.layout.whole] if before is None else differing(live, before, current.identity.digests)
            copy_ranges(idle.arena, live, ranges, self._workers, job)
            change.patch.lay_over(idle.arena, self._workers, job)
        idle.content = change.contents.identity.digests
        return StagedSet(change.contents, idle)

    def _before_overwriting(self, session: Session, job: Job) -> None:
        """Save what a staging is about to overwrite in `session`, and forget that it is there."""
        previous = self._resident.get(session)
        if self._saved and previous:
            self._displaced = None
            copy_ranges(self._saved, session.arena, [session.arena.layout.whole], self._workers, job)
            self._displaced = previous
        self._resident.pop(session, None)
        session.content = None

    def commit(self, candidate: Candidate, timeout: float | None, check: Check) -> Committed:
        assert isinstance(candidate, StagedSet)
        return self._exchange(candidate.session, candidate.contents.identity)

    def _exchange(self, session: Session, identity: Identity) -> Committed:
        version = Version(session, next_generation(self._gate), identity)
        self._displaced = None
        paused = self._gate.exchange(version)
        self._resident[session] = version
        return Committed(version, paused, 0)

    @property
    def previous(self) -> Version[Session] | None:
        return self._resident.get(self._idle()) or self._displaced

    def rollback(self, timeout: float | None) -> Committed:
        idle = self._idle()
        if self._gate.current is None or not (idle in self._resident or self._displaced):
            raise NothingToRollBack(
                "no previous weights are resident: nothing was committed before, or a staging has overwritten them "
                '(keep_previous="host" would keep them). Swap the file that you want.'
            )
        if idle not in self._resident:
            self._restore(idle, timeout)
        idle.run_added_prologues("the previous weights")  # a model may have joined since
        return self._exchange(idle, self._resident[idle].identity)

    def _idle(self) -> Session:
        current = self._gate.current
        return self.sessions[1] if current and current.session is self.sessions[0] else self.sessions[0]

    def _restore(self, idle: Session, timeout: float | None) -> None:
        """Restore the weights that a staging without a commit has overwritten."""
        assert self._saved is not None
        assert self._displaced is not None
        self._gate.wait_idle(idle, timeout)
        idle.content = None
        with idle.arena.writing():
            self._saved.write_to(idle.arena, self._workers)
        idle.run_prologues("the previous weights")
        self._resident[idle] = self._displaced
        idle.content = self._displaced.identity.digests
