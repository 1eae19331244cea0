"""One arena: a commit copies in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .arena import Arena, ArenaLayout
from .candidates import Candidate, Committed, Fill, NewSession, next_generation
from .errors import ModelClosed, ModelFailed, NothingToRollBack, OutOfMemory, SwapError, WeightsMismatch
from .gate import Gate, Version
from .job import Job
from .memory import FOR_ONE, FOR_PREVIOUS, FOR_STAGING, IN_PLACE, Memory, StagedIn, advising
from .patches import HostPatch, Patch, Stretch, copy_stretches
from .session import Session
from .staging import Contents
from .workers import Workers


class _Kept(NamedTuple):
    """The weights before the last commit: whole, or as the patch that leads back to them."""

    content: Arena | Patch
    version: Version[Session]


class _Undo(NamedTuple):
    """What takes a commit back, and needs no memory: the weights, what was computed from them, and their version."""

    content: Arena | Patch
    put_back: Callable[[], None]
    version: Version[Session]


class _Refused(Exception):
    """A commit that was undone; `reason` says why. `interrupt` is what arrived meanwhile."""

    def __init__(self, reason: SwapError) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.interrupt: BaseException | None = None


class Single:
    """One arena that serves. Stagings use memory of their own, freed after the commit has copied it in place."""

    name = "single"

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
        self._new_session = new_session
        self._memory = memory
        self._layout = layout
        self._gate = gate
        self._workers = workers
        self._keep = keep
        with advising(FOR_ONE):
            self._live = new_session(memory.arena(layout))
        self._previous: _Kept | None = None

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (self._live,)

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        session, staged_in = self._target(timeout, job)
        with session.arena.writing():
            contents = fill(session.arena)
        return Candidate(contents.placed(staged_in), session)

    def _target(self, timeout: float | None, job: Job) -> tuple[Session, StagedIn]:
        if self._gate.current is not None:
            with advising(FOR_STAGING):
                arena, staged_in = self._memory.staging(self._layout)
                return self._new_session(arena), staged_in
        self._gate.wait_idle(self._live, timeout, job.check)  # a trial call of an earlier staging may still run
        return self._live, IN_PLACE

    def stage_patch(self, patch: HostPatch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        staged, staged_in = self._memory.staged_patch(patch)
        candidate = Candidate(contents.placed(staged_in), None, staged)
        candidate.build = lambda job: self._new_session(self._copy_with(staged, job))
        return candidate

    def _copy_with(self, patch: Patch, job: Job) -> Arena:
        """A copy of the live arena with a patch applied."""
        arena, _ = self._memory.staging(self._layout)
        with arena.writing():
            copy_stretches(arena, self._live.arena, [Stretch(0, self._layout.nbytes)], self._workers, job)
            patch.lay_over(arena, self._workers, job)
        return arena

    def commit(self, candidate: Candidate, timeout: float | None) -> Committed:
        version = Version(self._live, next_generation(self._gate), candidate.contents.identity)
        if candidate.patch is not None:
            return self._commit_in_place(
                candidate.patch, version, candidate.patch.nbytes, timeout, check=candidate.check
            )
        session = candidate.opened
        assert session is not None
        if session is not self._live:
            return self._commit_in_place(session.arena, version, self._layout.nbytes, timeout, session, candidate.check)
        session.reset_state()
        return Committed(version, self._gate.exchange(version), 0)

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
        nbytes = content.nbytes if isinstance(content, Patch) else self._layout.nbytes
        return self._commit_in_place(content, version, nbytes, timeout)

    def _commit_in_place(
        self,
        source: Arena | Patch,
        version: Version[Session],
        nbytes: int,
        timeout: float | None,
        tried: Session | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Committed:
        """`tried`: the session of `source`, which has computed what depends on the weights alone."""
        self._live.arena.reserve(source)
        kept = self._snapshot(source)
        undo = self._undo(source, kept, tried)
        start = time.perf_counter()
        with self._gate.hold(self._live, timeout, check):
            before, self._previous = self._previous, kept
            try:
                interrupt = self._copy(source, version, undo, tried)
            except _Refused as refused:
                self._previous = before
                self._settle()
                raise refused.interrupt or refused.reason from refused.interrupt and refused.reason
        self._settle()
        return Committed(version, time.perf_counter() - start, nbytes, interrupt)

    def _undo(self, source: Arena | Patch, kept: _Kept | None, tried: Session | None) -> _Undo | None:
        """How to take the commit back where something is computed from weights. Raises OutOfMemory.

        None where that needs no memory, or cannot be done: a set that replaces one that nobody keeps.
        """
        current = self._gate.current
        copied = tried is not None and type(tried.arena) is type(self._live.arena)  # instead of computed
        if copied or not self._live.has_prologue or current is None or self._gate.failure is not None:
            return None
        if isinstance(source, Patch):
            content: Arena | Patch = self._changed(source, source.undo)
        elif kept is not None:
            content = kept.content
        else:
            return None
        return _Undo(content, self._live.keep_prologue(), current)

    def _settle(self) -> None:
        """Wait for the device, while calls go on: then the weights are there, and their source may be dropped."""
        try:
            self._live.arena.settle()
        except Exception as error:
            self._gate.fail(f"{type(error).__name__}: {error}")
            raise ModelFailed(f"the device did not complete the commit ({type(error).__name__}: {error})") from error

    def _copy(
        self, source: Arena | Patch, version: Version[Session], undo: _Undo | None, tried: Session | None
    ) -> BaseException | None:
        """Copy, and make the version current. An interrupt does not end it half-way; it is returned at the end.

        Weights of which the prologue cannot be computed are taken back with `undo`, if there is one.
        """
        interrupt = None
        while True:
            try:
                if self._gate.current is version:
                    return interrupt
                self._gate.fail("it has not ended")  # until the exchange: what breaks off in between must not serve
                with self._live.arena.writing(urgent=True):
                    source.write_to(self._live.arena, self._workers)
                    self._prepare(version, undo, tried)
                    self._live.reset_state()
                self._gate.exchange(version)
            except _Refused as refused:
                refused.interrupt = interrupt
                raise
            except ModelClosed:
                raise
            except Exception as error:
                self._gate.fail(f"{type(error).__name__}: {error}")
                raise ModelFailed(
                    f"the in-place commit broke off ({type(error).__name__}: {error}). The model refuses calls until a "
                    "swap or a rollback succeeds."
                ) from error
            except BaseException as error:
                interrupt = error.with_traceback(None)  # else its frames would live on, and what they hold

    def _prepare(self, version: Version[Session], undo: _Undo | None, tried: Session | None) -> None:
        """Have what depends on the new weights alone: it is copied, or computed."""
        where = f"the weights {version.weights_id[:12]}"
        try:
            if tried is None:
                self._live.prepare(where)
            else:
                self._live.adopt(tried, where)
        except (WeightsMismatch, OutOfMemory) as error:
            if undo is None:
                raise
            undo.content.write_to(self._live.arena, self._workers)
            undo.put_back()
            self._gate.exchange(undo.version)
            raise _Refused(error) from None

    def _snapshot(self, source: Arena | Patch) -> _Kept | None:
        """The weights that a commit is about to replace, copied while they still serve."""
        current = self._gate.current
        if not self._keep or current is None:
            return None
        if self._gate.failure is None:
            return _Kept(self._saved(source), current)
        previous = self._previous
        if previous is None or not isinstance(previous.content, Patch) or previous.content is source:
            return previous
        # the patch leads back only from what is there now
        return _Kept(self._copy_with(previous.content, Job()), previous.version)

    def _saved(self, source: Arena | Patch) -> Arena | Patch:
        """The live weights, where `source` is about to be written, for a rollback."""
        if not isinstance(source, Patch):
            with advising(FOR_PREVIOUS):
                arena = self._memory.kept(self._layout)
            self._live.arena.write_to(arena, self._workers)
            return arena
        return self._changed(source, source.saved)

    def _changed(self, patch: Patch, copy: Callable[[Arena], Patch]) -> Patch:
        try:
            return copy(self._live.arena)
        except MemoryError as error:
            raise OutOfMemory(f"no memory to keep the {patch.nbytes} bytes that change ({error})") from error
