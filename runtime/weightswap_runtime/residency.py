"""The two ways to hold weights: two arenas and an exchange, or one arena and a copy in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from .arena import ArenaLayout, HostArena
from .digests import Blocks
from .errors import ModelFailed, NothingToRollBack, OutOfMemory, Unsupported
from .gate import Gate, Version
from .identity import Identity
from .job import Job
from .patches import Patch, Stretch, copy_stretches, differing
from .session import Session
from .staging import Contents
from .workers import Workers

NewSession = Callable[[HostArena], Session]
Fill = Callable[[HostArena], Contents]


class Committed(NamedTuple):
    """The version that is now served, how long new calls could wait for it (seconds), and the bytes copied."""

    version: Version[Session]
    seconds_paused: float
    bytes_copied: int


class Candidate:
    """A full set of weights that serves nobody yet: in a session of its own, or as a patch of the live arena."""

    def __init__(self, contents: Contents, session: Session | None, patch: Patch | None = None) -> None:
        self.contents = contents
        self.patch = patch
        self.opened = session
        self.build: Callable[[], Session] | None = None

    def session(self) -> Session:
        """A session to try the weights in; of a patch it is made on first use, and takes a full set's memory."""
        if self.opened is None:
            assert self.build is not None
            self.opened = self.build()
        return self.opened


class Residency(Protocol):
    """Where a set of weights is staged, and how it becomes the one that is served."""

    name: str

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that calls can reach."""
        ...

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        """Let `fill` write a full set into memory that serves nobody. Raises LeaseTimeout and OutOfMemory."""
        ...

    def stage_patch(self, patch: Patch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        """A full set that is the live one with a patch applied. Raises LeaseTimeout, OutOfMemory, StageCancelled."""
        ...

    def commit(self, candidate: Candidate, timeout: float | None) -> Committed: ...

    def rollback(self, timeout: float | None) -> Committed:
        """Raises NothingToRollBack."""
        ...


def open_residency(
    name: str,
    keep_previous: str | None,
    new_session: NewSession,
    layout: ArenaLayout,
    gate: Gate[Session],
    workers: Workers,
) -> Residency:
    """`double` or `single`. Raises Unsupported for anything else."""
    if keep_previous not in (None, "host"):
        raise Unsupported(f'keep_previous={keep_previous!r}: expected None or "host"')
    if name == "double":
        return Double(new_session, layout, gate, workers, keep=keep_previous == "host")
    if name == "single":
        return Single(new_session, layout, gate, workers, keep=keep_previous == "host")
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')


def _generation(gate: Gate[Session]) -> int:
    return gate.current.generation + 1 if gate.current else 0


class Double:
    """Two arenas, each with its own session. A commit exchanges them; the old weights stay for a rollback.

    A staging overwrites the old weights. With `keep` they are saved first, for a rollback if no commit follows.
    """

    name = "double"

    def __init__(
        self, new_session: NewSession, layout: ArenaLayout, gate: Gate[Session], workers: Workers, *, keep: bool
    ) -> None:
        self._gate = gate
        self._workers = workers
        self.sessions = (new_session(HostArena(layout)), new_session(HostArena(layout)))
        self._resident: dict[Session, Version[Session]] = {}  # what lies whole in each session, and was served
        self._content: dict[Session, Mapping[str, Blocks]] = {}  # what lies whole in each session
        self._saved = HostArena(layout) if keep else None
        self._displaced: Version[Session] | None = None  # what lies in `_saved`

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        idle = self._idle()
        self._gate.wait_idle(idle, timeout, job.check)
        self._overwriting(idle, job)
        return self._staged(idle, fill(idle.arena))

    def stage_patch(self, patch: Patch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        idle, current = self._idle(), self._gate.current
        assert current is not None
        self._gate.wait_idle(idle, timeout, job.check)
        content = self._content.get(idle)
        self._overwriting(idle, job)
        live = current.session.arena
        everything = [Stretch(0, live.layout.nbytes)]
        stretches = everything if content is None else differing(live, content, current.identity.digests)
        copy_stretches(idle.arena, live, stretches, self._workers, job)
        patch.write_to(idle.arena, self._workers)
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
        return self._exchange(candidate.session(), candidate.contents.identity)

    def _exchange(self, session: Session, identity: Identity) -> Committed:
        session.reset_state()
        version = Version(session, _generation(self._gate), identity)
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
        self._saved.write_to(idle.arena, self._workers)
        self._resident[idle] = self._displaced
        self._content[idle] = self._displaced.identity.digests


class _Kept(NamedTuple):
    """The weights before the last commit: whole, or as the patch that leads back to them."""

    content: HostArena | Patch
    version: Version[Session]


class Single:
    """One arena that serves. Stagings use memory of their own, freed after the commit has copied it in place."""

    name = "single"

    def __init__(
        self, new_session: NewSession, layout: ArenaLayout, gate: Gate[Session], workers: Workers, *, keep: bool
    ) -> None:
        self._new_session = new_session
        self._layout = layout
        self._gate = gate
        self._workers = workers
        self._keep = keep
        self._live = new_session(HostArena(layout))
        self._previous: _Kept | None = None

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (self._live,)

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        session = self._target(timeout, job)
        return Candidate(fill(session.arena), session)

    def _target(self, timeout: float | None, job: Job) -> Session:
        if self._gate.current is not None:
            return self._new_session(HostArena(self._layout))
        self._gate.wait_idle(self._live, timeout, job.check)  # a trial call of an earlier staging may still run
        return self._live

    def stage_patch(self, patch: Patch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        candidate = Candidate(contents, None, patch)
        candidate.build = lambda: self._patched(patch)
        return candidate

    def _patched(self, patch: Patch) -> Session:
        return self._new_session(self._copy_with(patch))

    def _copy_with(self, patch: Patch) -> HostArena:
        """A copy of the live arena with a patch applied."""
        arena = HostArena(self._layout)
        self._live.arena.write_to(arena, self._workers)
        patch.write_to(arena, self._workers)
        return arena

    def commit(self, candidate: Candidate, timeout: float | None) -> Committed:
        version = Version(self._live, _generation(self._gate), candidate.contents.identity)
        if candidate.patch is not None:
            return self._commit_in_place(candidate.patch, version, candidate.patch.nbytes, timeout)
        session = candidate.session()
        if session is not self._live:
            return self._commit_in_place(session.arena, version, self._layout.nbytes, timeout)
        session.reset_state()
        return Committed(version, self._gate.exchange(version), 0)

    def rollback(self, timeout: float | None) -> Committed:
        if self._previous is None:
            raise NothingToRollBack(
                'no previous weights are kept. Load with keep_previous="host" or residency="double" to keep them, '
                "or swap the file that you want."
            )
        content, old = self._previous
        version = Version(self._live, _generation(self._gate), old.identity)
        nbytes = content.nbytes if isinstance(content, Patch) else self._layout.nbytes
        return self._commit_in_place(content, version, nbytes, timeout)

    def _commit_in_place(
        self, source: HostArena | Patch, version: Version[Session], nbytes: int, timeout: float | None
    ) -> Committed:
        kept = self._snapshot(source)
        start = time.perf_counter()
        with self._gate.hold(self._live, timeout):
            self._previous = kept
            interrupt = self._copy(source, version)
        paused = time.perf_counter() - start
        if interrupt is not None:
            raise interrupt
        return Committed(version, paused, nbytes)

    def _copy(self, source: HostArena | Patch, version: Version[Session]) -> BaseException | None:
        """Copy, and make the version current. An interrupt does not end it half-way; it is returned at the end."""
        self._gate.fail("it has not ended")  # until the exchange: what breaks off in between must not serve
        interrupt = None
        while self._gate.current is not version:
            try:
                source.write_to(self._live.arena, self._workers)
                self._live.reset_state()
                self._gate.exchange(version)
            except Exception as error:
                self._gate.fail(f"{type(error).__name__}: {error}")
                raise ModelFailed(
                    f"the in-place commit broke off ({type(error).__name__}: {error}). The model refuses calls until a "
                    "swap or a rollback succeeds."
                ) from error
            except BaseException as error:
                interrupt = error
        return interrupt

    def _snapshot(self, source: HostArena | Patch) -> _Kept | None:
        """The weights that a commit is about to replace, copied while they still serve."""
        current = self._gate.current
        if not self._keep or current is None:
            return None
        if self._gate.failure is None:
            return _Kept(self._copy_of(source), current)
        previous = self._previous
        if previous is None or isinstance(previous.content, HostArena) or previous.content is source:
            return previous
        # the patch leads back only from what is there now
        return _Kept(self._copy_with(previous.content), previous.version)

    def _copy_of(self, source: HostArena | Patch) -> HostArena | Patch:
        """The live weights, where `source` is about to be written."""
        if isinstance(source, HostArena):
            arena = HostArena(self._layout)
            self._live.arena.write_to(arena, self._workers)
            return arena
        try:
            return source.undo(self._live.arena)
        except MemoryError as error:
            raise OutOfMemory(
                f"no memory to keep the {source.nbytes} bytes that change, for a rollback ({error})"
            ) from error
