"""Staged weights: a set that is not served yet, from the start of its staging to its commit."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from weightswap_runtime.errors import StageClosed, StageTimeout, StagingBusy
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.nonfinite import Nonfinite
from weightswap_runtime.live.variants.resident import Choice
from weightswap_runtime.options import check_timeout
from weightswap_runtime.staging.request import LEASE_TIMEOUT, Contents, Kind
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_runtime.threads.claims import Claim
from weightswap_runtime.threads.forks import renew_in_children
from weightswap_runtime.threads.job import Job, Progress

from .calling import Caller, Methods, run_chosen
from .context import Context
from .receipt import SwapReceipt
from .residency.candidate import Candidate
from .staging_task import StagingTask


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
