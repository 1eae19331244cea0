"""One arena or two: staging targets, commit, rollback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, Protocol, get_args

from weightswap_runtime.errors import (
    RESTART,
    ModelClosed,
    ModelFailed,
    NothingToRollBack,
    OutOfMemory,
    SwapError,
    Unsupported,
    WeightsMismatch,
    is_of_device,
)
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena, Patch, copy_ranges, differing
from weightswap_runtime.memory.host import (
    FOR_ONE,
    FOR_PREVIOUS,
    FOR_STAGING,
    FOR_TWO,
    IN_PLACE,
    Memory,
    StagedIn,
    advising,
)
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.request import Contents, StagedChange
from weightswap_runtime.threads import WorkerThreads

from .gate import Gate, Version
from .session import Session

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


class _Kept(NamedTuple):
    """The weights before the last commit, as a full set or as the patch that restores them."""

    content: Arena | Patch
    version: Version[Session]


class _Commit(NamedTuple):
    """The source that a commit copies over the live weights, and the version that this makes.

    `staged_session`: the session of `source`, if it has computed what depends on the weights alone.
    """

    source: Arena | Patch
    version: Version[Session]
    staged_session: Session | None = None


class _Undo(NamedTuple):
    """The means to undo a commit without allocating: the old weights, a function for their prologues, their version."""

    content: Arena | Patch
    restore_prologues: Callable[[], None]
    version: Version[Session]


class Single:
    """One served arena. Each staging has memory of its own, which is freed after the commit has copied it in place."""

    name = "single"

    def __init__(self, resources: Resources) -> None:
        self._new_session, self._memory, self._layout, self._gate, self._workers, self._keep = resources
        with advising(FOR_ONE):
            self._live = self._new_session(self._memory.arena(self._layout))
        self._previous: _Kept | None = None

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (self._live,)

    @contextmanager
    def target(self, timeout: float | None, job: Job) -> Iterator[StagingTarget]:
        target = self._new_target(timeout, job)
        with target.session.arena.writing():
            yield target

    def _new_target(self, timeout: float | None, job: Job) -> StagingTarget:
        if self._gate.current is not None:
            with advising(FOR_STAGING):
                arena, staged_in = self._memory.staging(self._layout)
                return StagingTarget(self._new_session(arena), staged_in)
        self._gate.wait_idle(self._live, timeout, job.check)  # a trial call of an earlier staging may still run
        return StagingTarget(self._live, IN_PLACE)

    def stage_patch(self, change: StagedChange, timeout: float | None, job: Job) -> StagedPatch:
        patch, staged_in = self._memory.staged_patch(change.patch, self._workers)
        contents = change.contents._replace(staged_in=staged_in)
        return StagedPatch(contents, patch, lambda job: self._new_session(self._copy_with(patch, job)))

    def _copy_with(self, patch: Patch, job: Job) -> Arena:
        """Return a copy of the live arena with a patch applied."""
        arena, _ = self._memory.staging(self._layout)
        with arena.writing():
            copy_ranges(arena, self._live.arena, [self._layout.whole], self._workers, job)
            patch.lay_over(arena, self._workers, job)
        return arena

    def commit(self, candidate: Candidate, timeout: float | None, check: Check) -> Committed:
        version = Version(self._live, next_generation(self._gate), candidate.contents.identity)
        if isinstance(candidate, StagedPatch):
            return self._commit_in_place(_Commit(candidate.patch, version), timeout, check)
        session = candidate.session
        if session is not self._live:
            return self._commit_in_place(_Commit(session.arena, version, session), timeout, check)
        return Committed(version, self._gate.exchange(version), 0)

    @property
    def previous(self) -> Version[Session] | None:
        return self._previous.version if self._previous else None

    def rollback(self, timeout: float | None) -> Committed:
        if self._previous is None:
            why = (
                "nothing was committed before these weights"
                if self._keep
                else 'no previous weights are kept. Load with keep_previous="host" or residency="double" to keep them'
            )
            raise NothingToRollBack(f"{why}. Swap the file that you want.")
        content, old = self._previous
        version = Version(self._live, next_generation(self._gate), old.identity)
        return self._commit_in_place(_Commit(content, version), timeout)

    def _commit_in_place(self, change: _Commit, timeout: float | None, check: Check = lambda: None) -> Committed:
        """Hold the calls, copy, exchange. If the prologue of the new weights fails, undo the commit where possible.

        After any other failure in between, the arena may hold a mixture, so the model refuses its calls.
        """
        kept = self._snapshot(change.source)
        undo = self._undo(change, kept)
        with self._gate.hold(self._live, timeout, check) as hold:
            self._live.arena.check_streams()  # a refusal here leaves the model as it is
            with self._failed_until_exchange():
                before, self._previous = self._previous, kept
                refusal = self._copy(change, undo)
                if refusal is None or undo is None:
                    self._gate.exchange(change.version)
                else:
                    self._previous = before
                    self._gate.exchange(undo.version)
        self._synchronize()
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # breaks the cycle with its traceback, which would keep this frame and the staging alive
        copied = change.source if isinstance(change.source, Patch) else self._layout
        return Committed(change.version, time.perf_counter() - hold.since, copied.nbytes)

    @contextmanager
    def _failed_until_exchange(self) -> Iterator[None]:
        """Mark the model as failed until the exchange, as the arena mixes both sets; raise errors as ModelFailed."""
        self._gate.fail("it has not ended")
        try:
            yield
        except ModelClosed:
            raise
        except Exception as error:
            self._gate.fail(f"{type(error).__name__}: {error}")
            advice = f" {RESTART}" if is_of_device(error) else ""
            raise ModelFailed(
                f"the in-place commit failed ({type(error).__name__}: {error}). The model refuses calls until a "
                f"swap or a rollback succeeds.{advice}"
            ) from error

    def _copy(self, change: _Commit, undo: _Undo | None) -> SwapError | None:
        """Copy the weights and update the prologues; return the error of these if `undo` has restored the old ones."""
        with self._live.arena.writing(urgent=True):
            change.source.write_to(self._live.arena, self._workers)
            try:
                self._update_prologues(change)
            except (WeightsMismatch, OutOfMemory) as error:
                if undo is None:
                    raise
                undo.content.write_to(self._live.arena, self._workers)
                undo.restore_prologues()
                return error
        return None

    def _update_prologues(self, change: _Commit) -> None:
        """Copy or compute what depends on the new weights alone."""
        where = f"the weights {change.version.weights_id[:12]}"
        if change.staged_session is None:
            self._live.run_prologues(where)
        else:
            self._live.copy_prologues_from(change.staged_session, where)

    def _undo(self, change: _Commit, kept: _Kept | None) -> _Undo | None:
        """Return what undoes the commit if a prologue of the new weights fails. Raises OutOfMemory.

        None if no prologue is computed, or if the old weights are not kept.
        """
        current, staged = self._gate.current, change.staged_session
        is_copied = staged is not None and type(staged.arena) is type(self._live.arena)  # not computed
        if is_copied or not self._live.has_prologue or current is None or self._gate.broken is not None:
            return None
        if isinstance(change.source, Patch):
            content: Arena | Patch = self._save_ranges(change.source, change.source.undo)
        elif kept is not None:
            content = kept.content
        else:
            return None
        return _Undo(content, self._live.keep_prologues(), current)

    def _synchronize(self) -> None:
        """Wait for the device, while calls go on: after that the source of the copy may be freed."""
        try:
            self._live.arena.synchronize()
        except Exception as error:
            self._gate.fail(f"{type(error).__name__}: {error}")
            raise ModelFailed(
                f"the device did not complete the commit ({type(error).__name__}: {error}). {RESTART}"
            ) from error

    def _snapshot(self, source: Arena | Patch) -> _Kept | None:
        """Copy the weights that a commit is about to replace, while they are still served."""
        current = self._gate.current
        if not self._keep or current is None:
            return None
        if self._gate.broken is None:
            return _Kept(self._save(source), current)
        previous = self._previous
        if previous is None or not isinstance(previous.content, Patch) or previous.content is source:
            return previous
        # the patch applies only to the present content of the arena, so make it a full set
        return _Kept(self._copy_with(previous.content, Job()), previous.version)

    def _save(self, source: Arena | Patch) -> Arena | Patch:
        """Copy the live weights that `source` is about to overwrite, for a rollback."""
        if not isinstance(source, Patch):
            with advising(FOR_PREVIOUS):
                arena = HostArena(self._layout)
            self._live.arena.write_to(arena, self._workers)
            return arena
        return self._save_ranges(source, source.saved)

    def _save_ranges(self, patch: Patch, copy: Callable[[Arena], Patch]) -> Patch:
        try:
            return copy(self._live.arena)
        except MemoryError as error:
            raise OutOfMemory(f"no memory to keep the {patch.nbytes} bytes that change ({error})") from error


ResidencyName = Literal["double", "single"]
RESIDENCIES: tuple[ResidencyName, ...] = get_args(ResidencyName)


class Residency(Protocol):
    """A strategy for where weights are staged, and how they become the served ones."""

    name: str

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that calls can reach."""
        ...

    def target(self, timeout: float | None, job: Job) -> AbstractContextManager[StagingTarget]:
        """Let the block write a full set into a session that is not served. Raises LeaseTimeout and OutOfMemory."""
        ...

    def stage_patch(self, change: StagedChange, timeout: float | None, job: Job) -> Candidate:
        """Stage the live set with a patch applied. Raises LeaseTimeout, OutOfMemory and StageCancelled."""
        ...

    def commit(self, candidate: Candidate, timeout: float | None, check: Check) -> Committed:
        """Serve a candidate. `check` is called during the wait for calls and pins; it may raise to end the commit."""
        ...

    @property
    def previous(self) -> Version[Session] | None:
        """The version that a rollback would serve."""
        ...

    def rollback(self, timeout: float | None) -> Committed:
        """Serve the previous version. Raises NothingToRollBack."""
        ...


class Ended:
    """The residency after all models were closed; it has no memory."""

    sessions: tuple[Session, ...] = ()
    previous = None

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelClosed

    target = stage_patch = commit = rollback = _refuse


def open_residency(name: str, resources: Resources) -> Residency:
    """Return the residency "double" or "single". Raises Unsupported for any other name."""
    if name == "double":
        return Double(resources)
    if name == "single":
        return Single(resources)
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')
