"""Staged weights: from the start of a staging to its commit, in any thread or task."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypedDict

from weightswap_runtime.errors import OutOfMemory, StageCancelled, StageClosed, StageTimeout, StagingBusy, check_timeout
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.identity import Identity, Nonfinite
from weightswap_runtime.format.names import Keys
from weightswap_runtime.jobs import POLL_SECONDS, Claim, Job, Progress, renew_in_children
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import LEASE_TIMEOUT, Busy, Contents, Kind, SwapRequest
from weightswap_runtime.threads import Background, forget_frames, in_thread, stop_at_end

from .calls import Caller, Methods, run_chosen
from .context import Context
from .receipt import Event, EventKind, SwapReceipt
from .residency import Candidate
from .session import Member
from .store import Store, Turns
from .variants import Choice


class StagingTask:
    """One staging: its work, its outcome, and the claim that keeps other stagings out until it is over."""

    def __init__(self, store: Store, member: Member, request: SwapRequest, job: Job) -> None:
        self.store = store
        self.job = job
        self.ticket = Claim()
        self.candidate: Candidate | None = None
        self.contents: Contents | None = None
        self.error: BaseException | None = None
        self.ended = False
        self._dropped = False
        self._member = member
        self._request = request
        self._end_signal: SimpleQueue[None] = SimpleQueue()  # an interrupt could leave a threading.Event locked
        self._process = os.getpid()
        self._thread: int | None = None

    @property
    def is_mine(self) -> bool:
        """True if the calling thread does the work."""
        return self._thread == threading.get_ident()

    def is_alive(self) -> bool:
        return not self.ended

    def stop(self) -> None:
        self.job.cancel()

    def claim(self) -> None:
        """Keep others from staging; if the request says so, wait for them first. Raises StagingBusy."""
        self.store.turns.claim(self.ticket, self._request.patience, self.job)

    def claim_at_once(self) -> None:
        """Keep others from staging before the work begins. Raises StagingBusy, with an event."""
        try:
            self.claim()
        except StagingBusy as error:
            self._emit_requested("refused", error=error, phase=self.job.progress.phase)
            raise

    def run(self) -> None:
        """Stage in this thread. Raises what the staging raises."""
        stop_at_end(self)
        self._thread = threading.get_ident()
        try:
            self._stage()
        finally:
            self._end()

    def start(self) -> None:
        """Stage in a thread of its own, which is cancelled when the interpreter ends."""
        thread = Background(self._run_in_background, "weightswap-staging", self.stop)
        try:
            thread.start()
        except BaseException as error:
            self.ticket.end()
            if isinstance(error, RuntimeError):
                text = f"cannot start a thread to stage in the background ({error})"
                raise OutOfMemory(text) from error
            raise

    def _run_in_background(self) -> None:
        try:
            self.ticket.adopt()
            self._thread = threading.get_ident()
            self._stage()
        except BaseException as error:  # Staged.wait() raises it
            forget_frames(error)
            self.error = error
        finally:
            self._end()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the staging has ended; return whether it has. A forked child does not have its thread."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.ended:
            if self._process != os.getpid():
                self.error = StageCancelled("the process was forked while another thread was staging; stage again")
                self._end()
            elif (remaining := deadline - time.monotonic()) <= 0:
                return False
            else:
                self._wait_for_end(min(remaining, POLL_SECONDS))
        return True

    def _wait_for_end(self, seconds: float) -> None:
        with suppress(Empty):
            self._end_signal.get(timeout=seconds)
            self._end_signal.put(None)  # for other waiting threads

    def drop(self) -> None:
        """Cancel a staging that nobody can commit any more, and end its claim even if a thread still refers to it."""
        self.job.cancel()
        self._dropped = True
        if self.ended:
            self.ticket.end()

    def _end(self) -> None:
        self.ended = True
        if self._dropped:
            self.ticket.end()
        self._end_signal.put(None)

    def _stage(self) -> None:
        try:
            candidate = self._stage_with_events()
            self.contents = candidate.contents
            self.candidate = candidate
            self.job.end("staged")
        except BaseException as error:
            self.job.end("cancelled" if isinstance(error, StageCancelled) else "failed")
            self.ticket.end()
            raise

    def _stage_with_events(self) -> Candidate:
        start = time.perf_counter()
        try:
            self.claim()
            self._emit_requested("staging")
            self.job.begin("opening")
            candidate = self.store.stage(self._member, self._request, self.job)
        except BaseException as error:
            is_refusal = isinstance(error, Exception) and not isinstance(error, StageCancelled)
            kind: EventKind = "refused" if is_refusal else "cancelled"
            phase, nbytes, _ = self.job.progress
            seconds = time.perf_counter() - start
            self._emit_requested(kind, error=error, phase=phase, nbytes=nbytes, seconds=seconds)
            raise
        contents = candidate.contents
        seconds = time.perf_counter() - start
        self._emit_requested("staged", **_event_fields(contents), nbytes=contents.bytes_read, seconds=seconds)
        if self.job.abandoned:
            self.emit_discarded(contents)
            self.job.check()
        return candidate

    def commit(self, candidate: Candidate, timeout: float | None) -> SwapReceipt:
        return self.store.commit(self._member, candidate, self._request.by, timeout, self.job.check)

    def emit_discarded(self, contents: Contents) -> None:
        self._emit("discarded", contents.source, **_event_fields(contents))

    def _emit_requested(self, kind: EventKind, **fields: Any) -> None:
        """Emit an event about the request, which knows less than `Contents` does."""
        known = {"operation": "partial" if self._request.only else None, "weights_id": self._request.expect}
        self._emit(kind, printable(self._request.path), **(known | fields))

    def _emit(self, kind: EventKind, source: str, **fields: Any) -> None:
        self.store.events.emit(Event(kind, source, self._request.by, self._member.artifact.graph_id, **fields))


def _event_fields(contents: Contents) -> dict[str, Any]:
    """Return the fields of an event about weights that are staged."""
    return {
        "weights_id": contents.identity.weights_id,
        "labels": dict(contents.identity.labels),
        "operation": contents.kind,
        "seconds_staged": contents.seconds_staged,
        "seconds_verified": contents.seconds_verified,
        "nonfinite": dict(contents.nonfinite),
    }


class Staged(Caller, AbstractContextManager["Staged"]):
    """A set of weights that is not served yet. Call it to try the weights; then `commit()` or `discard()`.

    A background staging is not ready at once: see `progress`, `wait()` and `cancel()`. Leaving its `with` block, or
    dropping the last reference, discards it.
    """

    _serves = False

    def __init__(self, methods: Methods, task: StagingTask) -> None:
        super().__init__(methods)
        self._task = task
        self._gate = task.store.gate
        self._renew()
        renew_in_children(self)
        self._committing = self._discard_requested = False

    def _renew(self) -> None:
        self._closing = threading.RLock()  # reentrant: a listener may discard during a commit

    def start(self) -> Staged:
        """Stage in a thread of its own, which is cancelled when the last reference to this object is dropped."""
        self._task.start()
        return self

    def __del__(self) -> None:
        # No weakref.finalize: its registry would keep the task, whose error's frames refer to this object.
        if hasattr(self, "_task"):
            self._task.drop()

    def run(self) -> Staged:
        """Stage now, in this thread. Raises what the staging raises."""
        self._task.run()
        return self

    @property
    def progress(self) -> Progress:
        """The phase, the bytes done and the bytes in total."""
        return self._task.job.progress

    @property
    def done(self) -> bool:
        """True once the staging has ended, successfully or not."""
        return self._task.ended

    def wait(self, timeout: float | None = None) -> Staged:
        """Wait, for at most `timeout` seconds, until the weights are staged and verified.

        Raises StageTimeout, StagingBusy in the staging's own thread, and whatever the staging raised.
        """
        check_timeout(timeout)
        if self._task.is_mine and not self.done:
            raise StagingBusy("a listener runs before its staging has ended, so it cannot wait for it or commit it")
        if not self._task.join(timeout):
            raise StageTimeout(f"still {self.progress.phase} after {timeout} s; wait again, or cancel()")
        if self._task.error is not None:
            raise self._task.error
        return self

    def cancel(self) -> None:
        """Stop the staging and discard it. When this returns, no thread works on it any more.

        After a commit, or on a second call, it does nothing. In a listener, in the staging's own thread, it returns at
        once, and the staging ends when the listener has returned.
        """
        self._task.job.cancel()
        if self._task.is_mine and not self.done:
            self._task.job.abandoned = True
            return
        self._task.join()
        with self._closing:  # waits for a commit in another thread
            self._discard()

    def cancel_soon(self) -> None:
        """Cancel without waiting. A staging that has not begun then ends as soon as it begins."""
        self._task.job.cancel()

    def discard(self) -> None:
        """Discard the weights. On a second call, or after a commit, it does nothing.

        During a commit, in another thread or in a listener, it returns at once, and discards only if the commit fails.
        """
        if not self.done:
            self.cancel()
            return
        self._discard_requested = True
        if not self._committing:
            with self._closing:
                self._discard()

    def _discard(self) -> None:
        if self._committing:
            self._discard_requested = True
        elif self._task.candidate is not None:
            self._close("discarded")
            self._task.emit_discarded(self._contents)

    @property
    def identity(self) -> Identity:
        return self._contents.identity

    @property
    def weights_id(self) -> str:
        return self.identity.weights_id

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._contents.identity.labels)

    @property
    def kind(self) -> Kind:
        """The kind of the swap: "full", "delta", or "partial" for a part of a file, as in `SwapReceipt`."""
        return self._contents.kind

    @property
    def base(self) -> str:
        """The weights id of a delta's base; empty for other files."""
        return self._contents.base

    @property
    def verified(self) -> str:
        """The verification that was done: "goldens", "finite" or "none", as in `SwapReceipt`."""
        return self._contents.verified

    @property
    def nonfinite(self) -> dict[str, Nonfinite]:
        """The weights with NaN or infinities where the served ones have none, as in `SwapReceipt`."""
        return dict(self._contents.nonfinite)

    @property
    def _contents(self) -> Contents:
        self._check_done()
        assert self._task.contents is not None
        return self._task.contents

    def commit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve these weights. It waits until they are staged, then for at most `timeout` seconds for calls and pins.

        Raises what the staging raised; StageClosed; LeaseTimeout (nothing changed, still staged); OutOfMemory;
        ModelFailed; StageCancelled or ModelClosed, if `cancel()` or `Model.close()` ends the wait.
        """
        check_timeout(timeout)
        self.wait()
        with self._closing:
            candidate = self._opened()
            try:
                self._committing = True
                receipt = self._task.commit(candidate, timeout)
            except BaseException:
                self._committing = False
                if self._is_served(candidate):  # the exception came after the commit
                    self._close("committed")
                elif self._discard_requested:
                    self.discard()
                raise
            self._close("committed")
        return receipt

    async def acommit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Commit as `commit` does, without blocking the event loop.

        If the task is cancelled during the wait for calls and pins, the weights are discarded.
        """
        return await in_thread(lambda: self.commit(timeout=timeout), self.cancel_soon)

    def _is_served(self, candidate: Candidate) -> bool:
        current = self._gate.current
        return current is not None and current.identity is candidate.contents.identity

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _check_done(self) -> None:
        if not self.done:
            raise StagingBusy(f"still {self.progress.phase}: wait() until it is staged")
        self.wait()

    def _opened(self) -> Candidate:
        self._check_done()
        if self._task.candidate is None or not self._task.ticket.holds:  # no ticket: a fork has lost its thread
            raise StageClosed("this staging was already committed or discarded; stage the file again")
        return self._task.candidate

    def _close(self, phase: str) -> None:
        """Free the candidate's memory, and release the claim on staging."""
        self._task.candidate = None
        self._committing = False
        self._task.job.end(phase)
        self._task.ticket.end()

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease = Claim()
        with self._closing:
            session = self._opened().trial_session(Job())
            self._gate.acquire_session(session, lease)
        try:
            bound = session.bound[self._methods.member]
            return run_chosen(bound, self.weights_id, name, flat, context, choice)
        finally:
            self._gate.release(session, lease)


class StageOptions(TypedDict, total=False):
    """The keyword arguments of `Model.stage`, except `background` and `onto`."""

    only: str | Sequence[str] | None
    ignore: str | Sequence[str]
    keys: Keys | None
    expect: str | None
    allow_other_graph: bool
    verify: Mode
    allow_nonfinite: bool | str | Sequence[str] | None
    by: str
    rate_limit: float | None
    busy: Busy
    timeout: float | None


class AsyncStaging:
    """One staging on behalf of an asyncio task, in a thread of its own."""

    def __init__(
        self, stage: Callable[..., Staged], turns: Turns, path: str | os.PathLike[str], options: StageOptions
    ) -> None:
        self._stage = stage
        self._turns = turns
        self._path = path
        self._options = options
        self._staged: Staged | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the staging without waiting, also before it has begun."""
        self._cancelled = True
        if self._staged is not None:
            self._staged.cancel_soon()

    def _check(self) -> None:
        if self._cancelled:
            raise StageCancelled("the task was cancelled; nothing was changed")

    def stage(self) -> Staged:
        """Stage, and wait until that is done. Raises what `Model.stage` and `Staged.wait` raise."""
        self._check()
        self._staged = staged = self._stage(self._path, background=True, **self._options)
        if self._cancelled:  # by the event loop meanwhile
            staged.cancel_soon()
        return staged.wait()

    def swap(self) -> SwapReceipt:
        """Stage and commit, in turn with other swaps. Raises what `Model.swap` raises."""
        with self._turns.wait_for_turn(self._check), self.stage() as staged:
            return staged.commit(timeout=self._options.get("timeout", LEASE_TIMEOUT))
