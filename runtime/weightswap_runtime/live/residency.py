"""Where weights are staged, and how they become the served ones: one arena or two, commit, rollback."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, get_args

from msgspec.structs import replace

from weightswap_runtime.byte_ranges import ByteRanges
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
from weightswap_runtime.jobs import Job, Uninterrupted
from weightswap_runtime.memory.arena import (
    Arena,
    ArenaLayout,
    HostArena,
    HostPatch,
    Patch,
    copy_places,
    copy_ranges,
    differing,
)
from weightswap_runtime.memory.device_memory import (
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
from weightswap_runtime.staging.request import StagingReport
from weightswap_runtime.tensors import Blocks
from weightswap_runtime.threads import WorkerThreads

from .gate import Gate, Version
from .session import Session

NewSession = Callable[[Arena], Session]
Commit = tuple[Version, float, int]
"""The version that is now served, the seconds that new calls could wait for it, and the bytes copied meanwhile."""
ResidencyName = Literal["double", "single"]
RESIDENCIES: tuple[ResidencyName, ...] = get_args(ResidencyName)


@dataclass(eq=False)
class StagedWeights:
    """A verified set of weights that is not served: in a session of its own, or as a patch of the served ones."""

    identity: Identity
    report: StagingReport
    session: Session | None  # of a patch: made when the weights are tried, as it takes the memory of a full set
    patch: Patch | None = None
    build: Callable[[Job], Session] | None = None  # for a patch: makes its session
    # what is still to be tried, by all ranks together, before a commit; None if nothing is
    try_on_ranks: Callable[[], None] | None = None
    trials: str = ""  # what is tried, which must be the same on all ranks
    admitted_by: Hashable = None  # by `fingerprint_of`
    admit_again: Callable[[], None] = lambda: None

    def trial_session(self, job: Job) -> Session:
        """Return a session to try the weights in. Raises OutOfMemory, StageCancelled and WeightsMismatch."""
        if self.session is None:
            assert self.build is not None
            session = self.build(job)
            session.run_prologues(self.report.source)
            self.session = session
        return self.session


class Residency:
    """A strategy for where weights are staged, and how they become the served ones."""

    name: str
    sessions: tuple[Session, ...] = ()  # those that calls can reach

    def __init__(
        self,
        new_session: NewSession,
        memory: Memory,
        layout: ArenaLayout,
        gate: Gate,
        workers: WorkerThreads,
        keep: bool,
    ) -> None:
        """keep: whether host memory keeps the weights before the last commit."""
        self._memory, self._layout, self._gate, self._workers, self._keep = memory, layout, gate, workers, keep
        self._open(new_session)

    def _open(self, new_session: NewSession) -> None:
        """Allocate the memory of the served weights."""
        raise NotImplementedError

    def target(self, timeout: float | None, job: Job) -> AbstractContextManager[tuple[Session, StagedIn]]:
        """Let the block write a full set into a session that is not served. Raises WaitTimeout and OutOfMemory."""
        raise NotImplementedError

    def stage_patch(
        self, identity: Identity, report: StagingReport, patch: HostPatch, timeout: float | None, job: Job
    ) -> StagedWeights:
        """Stage the live set with a patch applied. Raises WaitTimeout, OutOfMemory and StageCancelled."""
        raise NotImplementedError

    def commit(self, staged: StagedWeights, timeout: float | None, caller: Uninterrupted) -> Commit:
        """Serve staged weights. `caller.check` is called during the wait for calls and pins, and may end it."""
        raise NotImplementedError

    @property
    def previous(self) -> Version | None:
        """The version that a rollback would serve."""
        return None

    def rollback(self, timeout: float | None, caller: Uninterrupted) -> Commit:
        """Serve the previous version, as in `commit`. Raises NothingToRollBack."""
        raise NotImplementedError


class Double(Residency):
    """Two arenas, each with its own session. A commit exchanges them; the old weights stay for a rollback.

    A staging overwrites the old weights. With `keep` they are saved first, for a rollback if no commit follows.
    """

    name = "double"

    def _open(self, new_session: NewSession) -> None:
        memory, layout = self._memory, self._layout
        with advising(FOR_TWO):
            self.sessions = (new_session(memory.arena(layout)), new_session(memory.arena(layout)))
        self._resident: dict[Session, Version] = {}  # by session, the version that is complete in it
        with advising(FOR_PREVIOUS):
            self._saved = HostArena(layout) if self._keep else None
        self._displaced: Version | None = None  # the version in `_saved`
        self._gap: _Gap | None = None  # between the arenas, where the last staging was a patch

    def adopt(self, generation: int, identity: Identity, previous: Identity | None) -> Version:
        """Take over weights that another process left in the arenas. `previous`: those that a rollback would serve."""
        for number, weights in ((generation, identity), (generation - 1, previous)):
            if weights is not None:
                session = self.sessions[number % 2]
                session.content = weights.digests
                self._resident[session] = Version(session, number, weights)
        return self._resident[self.sessions[generation % 2]]

    @contextmanager
    def target(self, timeout: float | None, job: Job) -> Iterator[tuple[Session, StagedIn]]:
        idle = self._idle()
        self._gate.wait_idle(idle, timeout, job.check)
        self._before_overwriting(idle, job)
        with idle.arena.writing():
            yield idle, IN_PLACE

    def stage_patch(
        self, identity: Identity, report: StagingReport, patch: HostPatch, timeout: float | None, job: Job
    ) -> StagedWeights:
        current = self._gate.current
        assert current is not None
        live = current.session.arena
        before, now = self._idle().content, current.identity.digests
        gap, self._gap = self._gap, None
        with self.target(timeout, job) as (idle, _):
            if gap is not None and gap.is_between(before, now):
                copy_places(idle.arena, live, gap.places, self._workers, job)
            else:
                ranges = [live.layout.whole] if before is None else differing(live, before, now)
                copy_ranges(idle.arena, live, ranges, self._workers, job)
            self._memory.staged_patch(patch, self._workers)[0].write_to(idle.arena, self._workers, job)
        idle.content = identity.digests
        self._gap = _Gap(now, identity.digests, patch.places())
        return StagedWeights(identity, report, idle)

    def _before_overwriting(self, session: Session, job: Job) -> None:
        """Save what a staging is about to overwrite in `session`, and forget that it is there."""
        previous = self._resident.get(session)
        if self._saved and previous:
            self._displaced = None
            copy_ranges(self._saved, session.arena, [session.arena.layout.whole], self._workers, job)
            self._displaced = previous
        self._resident.pop(session, None)
        session.content = None

    def commit(self, staged: StagedWeights, timeout: float | None, caller: Uninterrupted) -> Commit:
        assert staged.session is not None
        return self._exchange(staged.session, staged.identity)

    def _exchange(self, session: Session, identity: Identity) -> Commit:
        version = Version(session, next_generation(self._gate), identity)
        self._displaced = None
        paused = self._gate.exchange(version)
        self._resident[session] = version
        return version, paused, 0

    @property
    def previous(self) -> Version | None:
        return self._resident.get(self._idle()) or self._displaced

    def rollback(self, timeout: float | None, caller: Uninterrupted) -> Commit:
        idle = self._idle()
        if self._gate.current is None or not (idle in self._resident or self._displaced):
            raise NothingToRollBack(
                "no previous weights are resident: nothing was committed before, or a staging has overwritten them "
                '(keep_previous="host" would keep them). Swap the file that you want.'
            )
        if idle not in self._resident:
            self._restore(idle, timeout, caller.check)
        idle.run_added_prologues("the previous weights")  # a model may have joined since
        return self._exchange(idle, self._resident[idle].identity)

    def _idle(self) -> Session:
        current = self._gate.current
        return self.sessions[1] if current and current.session is self.sessions[0] else self.sessions[0]

    def _restore(self, idle: Session, timeout: float | None, check: Check) -> None:
        """Restore the weights that a staging without a commit has overwritten."""
        assert self._saved is not None
        assert self._displaced is not None
        self._gate.wait_idle(idle, timeout, check)
        idle.content = None
        with idle.arena.writing():
            self._saved.write_to(idle.arena, self._workers)
        idle.run_prologues("the previous weights")
        self._resident[idle] = self._displaced
        idle.content = self._displaced.identity.digests


class _Gap(NamedTuple):
    """The places at which two sets of weights differ, whose digests are in these mappings."""

    one: Mapping[str, Blocks]
    other: Mapping[str, Blocks]
    places: ByteRanges

    def is_between(self, one: Mapping[str, Blocks] | None, other: Mapping[str, Blocks]) -> bool:
        """Return True if these are the two sets: the very mappings, so that nothing has to be compared."""
        return (one is self.one and other is self.other) or (one is self.other and other is self.one)


class Single(Residency):
    """One served arena. Each staging has memory of its own, which is freed after the commit has copied it in place."""

    name = "single"

    def _open(self, new_session: NewSession) -> None:
        self._new_session = new_session
        with advising(FOR_ONE):
            self._live = new_session(self._memory.arena(self._layout))
        self.sessions = (self._live,)
        # the weights before the last commit, as a full set or as the patch that restores them
        self._previous: tuple[Arena | Patch, Version] | None = None

    @contextmanager
    def target(self, timeout: float | None, job: Job) -> Iterator[tuple[Session, StagedIn]]:
        session, staged_in = self._live, IN_PLACE
        if self._gate.current is None:
            self._gate.wait_idle(session, timeout, job.check)  # a trial call of an earlier staging may still run
        else:
            with advising(FOR_STAGING):
                arena, staged_in = self._memory.staging(self._layout)
                session = self._new_session(arena)
        with session.arena.writing():
            yield session, staged_in

    def stage_patch(
        self, identity: Identity, report: StagingReport, patch: HostPatch, timeout: float | None, job: Job
    ) -> StagedWeights:
        staged, staged_in = self._memory.staged_patch(patch, self._workers)
        report = replace(report, staged_in=staged_in)
        return StagedWeights(
            identity, report, None, staged, lambda job: self._new_session(self._copy_with(staged, job))
        )

    def _copy_with(self, patch: Patch, job: Job) -> Arena:
        """Return a copy of the live arena with a patch applied."""
        arena, _ = self._memory.staging(self._layout)
        with arena.writing():
            copy_ranges(arena, self._live.arena, [self._layout.whole], self._workers, job)
            patch.write_to(arena, self._workers, job)
        return arena

    def commit(self, staged: StagedWeights, timeout: float | None, caller: Uninterrupted) -> Commit:
        version = Version(self._live, next_generation(self._gate), staged.identity)
        if staged.patch is not None:
            return self._commit_in_place(staged.patch, version, None, timeout, caller)
        session = staged.session
        assert session is not None
        if session is not self._live:
            return self._commit_in_place(session.arena, version, session, timeout, caller)
        return version, self._gate.exchange(version), 0

    @property
    def previous(self) -> Version | None:
        return self._previous[1] if self._previous else None

    def rollback(self, timeout: float | None, caller: Uninterrupted) -> Commit:
        if self._previous is None:
            why = (
                "nothing was committed before these weights"
                if self._keep
                else 'no previous weights are kept. Load with keep_previous="host" or residency="double" to keep them'
            )
            raise NothingToRollBack(f"{why}. Swap the file that you want.")
        content, old = self._previous
        version = Version(self._live, next_generation(self._gate), old.identity)
        return self._commit_in_place(content, version, None, timeout, caller)

    def _commit_in_place(
        self,
        source: Arena | Patch,
        version: Version,
        staged: Session | None,
        timeout: float | None,
        caller: Uninterrupted,
    ) -> Commit:
        """Hold the calls, copy `source` over the live weights, exchange.

        staged: the session of `source`, if it has computed what depends on the weights alone. If that fails for the new
        weights, the commit is undone where possible. After any other failure in between, the arena may hold a mixture,
        so the model refuses its calls.
        """
        kept = self._snapshot(source)
        undo = self._undo(source, staged, kept)
        with self._gate.hold(self._live, timeout, caller.check) as since, ExitStack() as writing:
            writing.enter_context(self._live.arena.writing(urgent=True))  # a refusal here leaves the model as it is
            with self._failed_by_errors():
                before, self._previous = self._previous, kept
                refusal = self._copy(source, version, staged, undo)
                writing.close()  # not later: calls that follow the exchange wait for this mark
                if refusal is None or undo is None:
                    self._gate.exchange(version)
                else:
                    self._previous = before
                    self._gate.exchange(undo.version)
        self._synchronize()
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # breaks the cycle with its traceback, which would keep this frame and the staging alive
        copied = source if isinstance(source, Patch) else self._layout
        return version, time.perf_counter() - since, copied.nbytes

    @contextmanager
    def _failed_by_errors(self) -> Iterator[None]:
        """Mark the model as failed after an error, as the arena may mix both sets. Raises ModelFailed."""
        try:
            yield
        except ModelClosed:
            raise
        except BaseException as error:
            self._gate.fail(f"{type(error).__name__}: {error}")
            advice = f" {RESTART}" if is_of_device(error) else ""
            raise ModelFailed(
                f"the in-place commit failed ({type(error).__name__}: {error}). The model refuses calls until a "
                f"swap or a rollback succeeds.{advice}"
            ) from error

    def _copy(
        self, source: Arena | Patch, version: Version, staged: Session | None, undo: _Undo | None
    ) -> SwapError | None:
        """Copy the weights and what depends on them alone; return the error if `undo` has restored the old ones."""
        where = f"the weights {version.weights_id[:12]}"
        source.write_to(self._live.arena, self._workers)
        try:
            if staged is None:
                self._live.run_prologues(where)
            else:
                self._live.copy_prologues_from(staged, where)
        except (WeightsMismatch, OutOfMemory) as error:
            if undo is None:
                raise
            undo.content.write_to(self._live.arena, self._workers)
            undo.restore_prologues()
            return error
        return None

    def _undo(
        self, source: Arena | Patch, staged: Session | None, kept: tuple[Arena | Patch, Version] | None
    ) -> _Undo | None:
        """Return what undoes the commit if a prologue of the new weights fails. Raises OutOfMemory.

        None if no prologue is computed, or if the old weights are not kept.
        """
        current = self._gate.current
        is_copied = staged is not None and type(staged.arena) is type(self._live.arena)  # not computed
        if is_copied or not self._live.has_prologue or current is None or self._gate.failure is not None:
            return None
        if isinstance(source, Patch):
            content: Arena | Patch = self._save_ranges(source, source.undo)
        elif kept is not None:
            content = kept[0]
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

    def _snapshot(self, source: Arena | Patch) -> tuple[Arena | Patch, Version] | None:
        """Copy the weights that a commit is about to replace, while they are still served."""
        current = self._gate.current
        if not self._keep or current is None:
            return None
        if self._gate.failure is not None:
            return self._kept_apart(source)
        if isinstance(source, Patch):
            return self._save_ranges(source, source.saved), current
        with advising(FOR_PREVIOUS):
            arena = HostArena(self._layout)
        self._live.arena.write_to(arena, self._workers)
        return arena, current

    def _kept_apart(self, source: Arena | Patch) -> tuple[Arena | Patch, Version] | None:
        """Return what a failed commit has kept, in a form that does not depend on the arena, which may be a mixture."""
        if self._previous is None or not isinstance(self._previous[0], Patch) or self._previous[0] is source:
            return self._previous
        # the patch applies only to the present content of the arena, so make it a full set
        return self._copy_with(self._previous[0], Job()), self._previous[1]

    def _save_ranges(self, patch: Patch, copy: Callable[[Arena], Patch]) -> Patch:
        try:
            return copy(self._live.arena)
        except MemoryError as error:
            raise OutOfMemory(f"no memory to keep the {patch.nbytes} bytes that change ({error})") from error


class _Undo(NamedTuple):
    """What undoes a commit without allocating."""

    content: Arena | Patch  # the old weights
    restore_prologues: Callable[[], None]
    version: Version


class Ended(Residency):
    """The residency after all models were closed; it has no memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelClosed

    target = stage_patch = commit = rollback = _refuse


def residency_of(name: str) -> type[Residency]:
    """Return the class of the residency "double" or "single". Raises Unsupported for any other name."""
    if name not in RESIDENCIES:
        raise Unsupported(f'residency={name!r}: expected "double" or "single"')
    return Double if name == "double" else Single


def next_generation(gate: Gate) -> int:
    """Return the generation of the next commit."""
    return gate.current.generation + 1 if gate.current else 0
