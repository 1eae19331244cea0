"""Two arenas: a commit exchanges them."""

from __future__ import annotations

from collections.abc import Mapping

from .arena import ArenaLayout
from .candidates import Candidate, Committed, Fill, NewSession, next_generation
from .digests import Blocks
from .errors import NothingToRollBack
from .gate import Gate, Version
from .identity import Identity
from .job import Job
from .memory import FOR_PREVIOUS, FOR_TWO, Memory, advising
from .patches import HostPatch, Stretch, copy_stretches, differing
from .session import Session
from .staging import Contents
from .workers import Workers


class Double:
    """Two arenas, each with its own session. A commit exchanges them; the old weights stay for a rollback.

    A staging overwrites the old weights. With `keep` they are saved first, for a rollback if no commit follows.
    """

    name = "double"

    def __init__(
        self,
        new_session: NewSession,
        memory: Memory,
        layout: ArenaLayout,
        gate: Gate[Session],
        workers: Workers,
        *,
        keep: bool,
    ) -> None:
        self._gate = gate
        self._workers = workers
        with advising(FOR_TWO):
            self.sessions = (new_session(memory.arena(layout)), new_session(memory.arena(layout)))
        self._resident: dict[Session, Version[Session]] = {}  # what lies whole in each session, and was served
        self._content: dict[Session, Mapping[str, Blocks]] = {}  # what lies whole in each session
        with advising(FOR_PREVIOUS):
            self._saved = memory.kept(layout) if keep else None
        self._displaced: Version[Session] | None = None  # what lies in `_saved`

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        idle = self._idle()
        self._gate.wait_idle(idle, timeout, job.check)
        self._overwriting(idle, job)
        with idle.arena.writing():
            contents = fill(idle.arena)
        return self._staged(idle, contents)

    def stage_patch(self, patch: HostPatch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        idle, current = self._idle(), self._gate.current
        assert current is not None
        self._gate.wait_idle(idle, timeout, job.check)
        content = self._content.get(idle)
        self._overwriting(idle, job)
        live = current.session.arena
        everything = [Stretch(0, live.layout.nbytes)]
        stretches = everything if content is None else differing(live, content, current.identity.digests)
        with idle.arena.writing():
            copy_stretches(idle.arena, live, stretches, self._workers, job)
            patch.lay_over(idle.arena, self._workers, job)
        return self._staged(idle, contents)

    def _staged(self, session: Session, contents: Contents) -> Candidate:
        self._content[session] = contents.identity.digests
        return Candidate(contents, session)

    def _overwriting(self, session: Session, job: Job) -> None:
        """Called just before the first byte of a staging is written to `session`."""
        previous = self._resident.get(session)
        if self._saved and previous:
            self._displaced = None
            everything = [Stretch(0, session.arena.layout.nbytes)]
            copy_stretches(self._saved, session.arena, everything, self._workers, job)
            self._displaced = previous
        self._resident.pop(session, None)
        self._content.pop(session, None)

    def commit(self, candidate: Candidate, timeout: float | None) -> Committed:
        assert candidate.opened is not None
        return self._exchange(candidate.opened, candidate.contents.identity)

    def _exchange(self, session: Session, identity: Identity) -> Committed:
        session.reset_state()
        version = Version(session, next_generation(self._gate), identity)
        self._displaced = None
        paused = self._gate.exchange(version)
        self._resident[session] = version
        return Committed(version, paused, 0)

    def rollback(self, timeout: float | None) -> Committed:
        idle = self._idle()
        if self._gate.current is None or not (idle in self._resident or self._displaced):
            raise NothingToRollBack(
                "no previous weights are resident: nothing was committed before, or a staging has overwritten them "
                '(keep_previous="host" would keep them). Swap the file that you want.'
            )
        if idle not in self._resident:
            self._restore(idle, timeout)
        elif idle.has_state:  # a pin on it would see its state start again
            self._gate.wait_idle(idle, timeout)
        idle.prepare_added("the previous weights")  # a model may have joined since
        return self._exchange(idle, self._resident[idle].identity)

    def _idle(self) -> Session:
        current = self._gate.current
        return self.sessions[1] if current and current.session is self.sessions[0] else self.sessions[0]

    def _restore(self, idle: Session, timeout: float | None) -> None:
        """Put back what a staging without a commit has overwritten."""
        assert self._saved is not None
        assert self._displaced is not None
        self._gate.wait_idle(idle, timeout)
        self._content.pop(idle, None)
        with idle.arena.writing():
            self._saved.write_to(idle.arena, self._workers)
        idle.prepare("the previous weights")
        self._resident[idle] = self._displaced
        self._content[idle] = self._displaced.identity.digests
