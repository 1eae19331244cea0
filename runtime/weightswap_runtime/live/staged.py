"""Staged weights: from the start of a staging to its commit, in any thread or task."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from blake3 import blake3

from weightswap_runtime.errors import (
    OutOfMemory,
    StageCancelled,
    StageClosed,
    StagingBusy,
    Unsupported,
    WaitTimeout,
    check_timeout,
)
from weightswap_runtime.format.identity import Identity, Nonfinite
from weightswap_runtime.jobs import POLL_SECONDS, Claim, ClaimReference, Job, Progress, renew_in_children
from weightswap_runtime.staging.given import GivenWeights
from weightswap_runtime.staging.request import LEASE_TIMEOUT, Kind, StagingReport, SwapRequest
from weightswap_runtime.threads import Background, forget_frames, in_thread, stop_at_end

from .calls import Caller, Methods, run_chosen
from .context import Context
from .receipt import Event, EventKind, SwapReceipt
from .residency import StagedWeights
from .session import Member
from .store import WeightStore
from .variants import Choice


class Staged(Caller, AbstractContextManager["Staged"]):
    """A set of weights that is not served yet. Call it to try the weights; then `commit()` or `discard()`.

    A background staging is not ready at once: see `progress`, `wait()` and `cancel()`. Leaving its `with` block, or
    dropping the last reference, discards it.
    """

    _serves = False

    def __init__(self, methods: Methods, store: WeightStore, member: Member, request: SwapRequest, job: Job) -> None:
        super().__init__(methods)
        self._work = _Work(store, member, request, job)
        self._gate = store.gate
        self._renew()
        renew_in_children(self)
        # It is under way until `done`, then ready as long as `_work.weights` are there: until they are committed or
        # discarded. A discard during a commit, which holds `_closing`, is only requested: it happens if that fails.
        self._commit_claim: ClaimReference | None = None  # ends with the commit's frame, even if it was interrupted
        self._discard_requested = False

    @property
    def _committing(self) -> bool:
        claim = self._commit_claim() if self._commit_claim else None
        return claim is not None and claim.holds

    def _renew(self) -> None:
        # reentrant: a listener may discard during a commit; or fork, and not return in the child, as in `Turns`
        self._closing = threading.RLock()

    def start(self) -> Staged:
        """Stage in a thread of its own, which is cancelled when the last reference to this object is dropped."""
        self._work.start()
        return self

    def run(self) -> Staged:
        """Stage now, in this thread. Raises what the staging raises."""
        self._work.run()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def __del__(self) -> None:
        # No weakref.finalize: its registry would keep the work, whose error's frames refer to this object.
        if hasattr(self, "_work"):
            self._work.drop()

    @property
    def progress(self) -> Progress:
        """The phase, the bytes done and the bytes in total."""
        return self._work.job.progress

    @property
    def done(self) -> bool:
        """True once the staging has ended, successfully or not."""
        return self._work.ended

    def wait(self, timeout: float | None = None) -> Staged:
        """Wait, for at most `timeout` seconds, until the weights are staged and verified.

        Raises WaitTimeout, StagingBusy in the staging's own thread, and whatever the staging raised.
        """
        check_timeout(timeout)
        if self._work.is_mine and not self.done:
            raise StagingBusy("a listener runs before its staging has ended, so it cannot wait for it or commit it")
        if not self._work.join(timeout):
            raise WaitTimeout(f"still {self.progress.phase} after {timeout} s; wait again, or cancel()")
        if self._work.error is not None:
            raise self._work.error
        return self

    def cancel(self) -> None:
        """Stop the staging and discard it. When this returns, no thread works on it any more.

        After a commit, or on a second call, it does nothing. In a listener, in the staging's own thread, it returns at
        once, and the staging ends when the listener has returned.
        """
        self._work.job.cancel()
        if self._work.is_mine and not self.done:
            self._work.job.abandoned = True
            return
        self._work.join()
        with self._closing:  # waits for a commit in another thread
            self._discard()

    def cancel_soon(self) -> None:
        """Cancel without waiting. A staging that has not begun then ends as soon as it begins."""
        self._work.job.cancel()

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
        elif (weights := self._work.weights) is not None:
            if self._is_served(weights):  # by a commit that was interrupted before it had noted that
                self._close("committed")
                return
            self._close("discarded")
            self._work.emit_discarded(self.report)

    @property
    def report(self) -> StagingReport:
        """What was read and verified, with the fields of the receipt that a commit returns."""
        self._check_done()
        assert self._work.report is not None
        return self._work.report

    @property
    def identity(self) -> Identity:
        self._check_done()
        assert self._work.identity is not None
        return self._work.identity

    @property
    def weights_id(self) -> str:
        return self.report.weights_id

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.report.labels)

    @property
    def kind(self) -> Kind:
        """The kind of the swap: "full", "delta", or "partial" for a part of a file, as in `SwapReceipt`."""
        return self.report.kind

    @property
    def base(self) -> str:
        """The weights id of a delta's base; empty for other files."""
        return self.report.base

    @property
    def verified(self) -> str:
        """The verification that was done: "goldens", "finite" or "none", as in `SwapReceipt`."""
        return self.report.verified

    @property
    def nonfinite(self) -> dict[str, Nonfinite]:
        """The weights with NaN or infinities where the served ones have none, as in `SwapReceipt`."""
        return dict(self.report.nonfinite)

    def try_on_ranks(self) -> None:
        """Try the weights on all ranks now, as their commit else does: whether all have staged the same, and goldens.

        Every rank calls this at the same place between its calls. Raises RanksRefused for what refuses the weights on
        any rank, such as a staging that failed, RanksLost, and Unsupported for a model in one process.
        """
        if (ranks := self._work.store.ranks) is None:
            raise Unsupported(
                "try_on_ranks(): for a model on several ranks; in one process a staging tries the weights"
            )
        with ranks.turn("trial"), self._closing:
            ranks.agree("trial", lambda: self._facts(ranks.patience), about=self._work.where)
            weights = self._opened()
            self._work.store.try_on_ranks(weights)
            self._work.report = weights.report

    def check_admitted(self) -> None:
        """Raise what `admit` raises if the weights were admitted by other keys than those that count now, and
        StageClosed: for who writes the decision down before the commit, which asks again."""
        self._work.store.check_admitted(self._opened())

    def commit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve these weights. It waits until they are staged, then for at most `timeout` seconds for calls and pins.

        On ranks all commit, or none; every rank calls this at the same place between its calls.

        Raises what the staging raised; StageClosed; WaitTimeout (nothing changed, still staged); OutOfMemory;
        ModelFailed; StageCancelled or ModelClosed, if `cancel()` or `Model.close()` ends the wait; on ranks
        RanksRefused for what any of them would raise, and RanksLost.
        """
        check_timeout(timeout)
        if (ranks := self._work.store.ranks) is None:
            self.wait()
            return self._commit(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with ranks.turn("commit"):
            ranks.agree("commit", lambda: self._ready(ranks.patience, deadline), about=self._work.where)
            return self._commit(timeout)

    def _ready(self, patience: float, deadline: float) -> dict[str, str] | None:
        """Return what `_facts` does; None also while a pin holds memory that a commit needs. Raises WaitTimeout, too,
        at the deadline."""
        facts = self._facts(patience)
        return facts if facts is None or self._work.store.is_free(patience, deadline) else None

    def _facts(self, patience: float) -> dict[str, str] | None:
        """Return what must be the same on all ranks of a model; None if that is not known yet. Raises as `wait`."""
        if not self.done and not self._work.join(patience):
            return None
        self.check_admitted()
        weights = self._opened()
        unproven = {name: change.blocks for name, change in weights.identity.unproven.items()}
        return {
            "weights": weights.identity.weights_id,
            "trials": weights.trials,
            "kind": weights.report.kind,
            "changes": blake3(repr(unproven).encode()).hexdigest() if unproven else "",
        }

    def _commit(self, timeout: float | None) -> SwapReceipt:
        claim = Claim()
        with self._closing:
            weights = self._opened()
            try:
                self._commit_claim = weakref.ref(claim)
                receipt = self._work.commit(weights, timeout)
            except BaseException:
                claim.end()
                if self._is_served(weights):  # the exception came after the commit
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

    def _served_id(self) -> str | None:
        return self._to_call().identity.weights_id

    def _to_call(self) -> StagedWeights:
        """Return the weights for a call of them. Raises Unsupported for those that may differ from rank to rank."""
        weights = self._opened()
        if weights.identity.unproven:
            raise Unsupported("the ranks have not proven yet that they have the same weights: try_on_ranks() first")
        return weights

    def _is_served(self, weights: StagedWeights) -> bool:
        current = self._gate.current
        return current is not None and current.identity is weights.identity

    def _check_done(self) -> None:
        if not self.done:
            raise StagingBusy(f"still {self.progress.phase}: wait() until it is staged")
        self.wait()

    def _opened(self) -> StagedWeights:
        self._check_done()
        # without its ticket it has not ended here, but its thread was lost in a fork
        if self._work.weights is None or not self._work.ticket.holds:
            raise StageClosed("this staging was already committed or discarded; stage the file again")
        return self._work.weights

    def _close(self, phase: str) -> None:
        """Free the weights' memory, and release the claim on staging."""
        self._work.ticket.end()  # first: what follows is done by a discard if an interrupt comes between
        self._work.weights = self._commit_claim = None
        self._work.job.end(phase)

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease = Claim()
        with self._closing:
            session = self._to_call().trial_session(Job())
            self._gate.acquire_session(session, lease)
        try:
            bound = session.bound[self._methods.member]
            return run_chosen(bound, self.weights_id, name, flat, context, choice)
        finally:
            self._gate.release(session, lease)


class _Work:
    """The work of a staging, its outcome, and the claim that keeps other stagings out until it is over.

    A thread that stages refers to this alone: the end of the last reference to the `Staged` is noticed, and cancels it.
    """

    def __init__(self, store: WeightStore, member: Member, request: SwapRequest, job: Job) -> None:
        self.store = store
        self.job = job
        self.ticket = Claim()
        self.weights: StagedWeights | None = None  # until they are committed or discarded
        self.report: StagingReport | None = None
        self.identity: Identity | None = None
        self.error: BaseException | None = None
        self.ended = False
        self._dropped = False
        self._member = member
        self._request = request
        self._end_signal: SimpleQueue[None] = SimpleQueue()  # an interrupt could leave a threading.Event locked
        self._process = os.getpid()
        self._thread: int | None = None
        self._to_begin = [True]  # for the thread, or for its starter, who after an interrupt cannot know if it runs
        if request.busy == "refuse":
            self._claim_at_once()

    @property
    def where(self) -> str:
        """The source, for messages."""
        return self._request.where

    @property
    def is_mine(self) -> bool:
        """True if the calling thread does the work."""
        return self._thread == threading.get_ident()

    def is_alive(self) -> bool:
        return not self.ended

    def stop(self) -> None:
        self.job.cancel()

    def _claim(self) -> None:
        """Keep others from staging; if the request says so, wait for them first. Raises StagingBusy."""
        self.store.turns.claim(self.ticket, self._request.patience, self.job)

    def _claim_at_once(self) -> None:
        """Keep others from staging before the work begins. Raises StagingBusy, with an event."""
        try:
            self._claim()
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
        self.ticket.leave()
        try:
            thread.start()
        except BaseException as error:
            if not self._begin():
                self.drop()
                self.join()  # the thread ends the claim when it does not write any more
                raise
            self.ticket.end()
            if isinstance(error, RuntimeError) and str(error).startswith("can't"):  # else it is an interrupt's
                text = f"cannot start a thread to stage in the background ({error})"
                raise OutOfMemory(text) from error
            raise

    def _begin(self) -> bool:
        """Return True the first time."""
        try:
            return self._to_begin.pop()
        except IndexError:
            return False

    def _run_in_background(self) -> None:
        if not self._begin():
            return
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
            weights = self._stage_with_events()
            self.report, self.identity, self.weights = weights.report, weights.identity, weights
            self.job.end("staged")
        except BaseException as error:
            self.job.end("cancelled" if isinstance(error, StageCancelled) else "failed")
            self.ticket.end()
            raise

    def _stage_with_events(self) -> StagedWeights:
        start = time.perf_counter()
        try:
            self._claim()
            self._emit_requested("staging")
            self.job.begin("opening")
            weights = self.store.stage(self._member, self._request, self.job)
        except BaseException as error:
            is_refusal = isinstance(error, Exception) and not isinstance(error, StageCancelled)
            kind: EventKind = "refused" if is_refusal else "cancelled"
            phase, nbytes, _ = self.job.progress
            seconds = time.perf_counter() - start
            self._emit_requested(kind, error=error, phase=phase, nbytes=nbytes, seconds=seconds)
            raise
        self._emit_staged("staged", weights.report, time.perf_counter() - start)
        if self.job.abandoned:
            self.emit_discarded(weights.report)
            self.job.check()
        return weights

    def commit(self, weights: StagedWeights, timeout: float | None) -> SwapReceipt:
        receipt = self.store.commit(self._member, weights, self._request.by, timeout, self.job.check)
        if isinstance(source := self._request.source, GivenWeights):
            source.led_to(receipt.weights_id)
        return receipt

    def emit_discarded(self, report: StagingReport) -> None:
        self._emit_staged("discarded", report, 0.0)

    def _emit_staged(self, kind: EventKind, report: StagingReport, seconds: float) -> None:
        self._emit(
            kind,
            report.source,
            weights_id=report.weights_id,
            labels=report.labels,
            operation=report.kind,
            nbytes=report.bytes_read if kind == "staged" else 0,
            seconds=seconds,
            seconds_staged=report.seconds_staged,
            seconds_verified=report.seconds_verified,
            nonfinite=report.nonfinite,
        )

    def _emit_requested(self, kind: EventKind, **fields: Any) -> None:
        """Emit an event about the request, which knows less than a report does."""
        operation = "partial" if self._request.only else None
        expected = self._request.expect
        self._emit(kind, self._request.where, operation=operation, weights_id=expected, **fields)

    def _emit(self, kind: EventKind, source: str, **fields: Any) -> None:
        self.store.events.emit(Event(kind, source, self._request.by, self._member.artifact.graph_id, **fields))
