"""A set of weights that serves nobody yet, from the beginning of its staging to its commit."""

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
    """A set of weights that serves nobody yet. Call it to try it; then `commit()` or `discard()`.

    One that is staged in the background is not ready at once: `progress`, `wait()`, `cancel()`. Leaving its `with`
    block, or dropping the last reference, discards it.
    """

    _serves = False

    def __init__(self, methods: Methods, task: StagingTask) -> None:
        super().__init__(methods)
        self._task = task
        self._gate = task.store.gate
        self._renew()
        renew_in_children(self)
        self._committing = self._given_up = False

    def _renew(self) -> None:
        self._closing = threading.RLock()  # a listener may discard what is being committed

    def start(self) -> Staged:
        """Stage in the background, until the last reference to this is dropped."""
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
        """The phase, bytes done, and of how many."""
        return self._task.job.progress

    @property
    def done(self) -> bool:
        """Whether the staging has ended, well or not."""
        return self._task.over

    def wait(self, timeout: float | None = None) -> Staged:
        """Wait, for at most `timeout` seconds, until it is staged and verified.

        Raises StageTimeout, StagingBusy in the staging's own thread, and whatever the staging has raised.
        """
        check_timeout(timeout)
        if self._task.is_mine and not self.done:
            raise StagingBusy("a listener is told of a staging that has not ended, and cannot wait for it or commit it")
        if not self._task.join(timeout):
            raise StageTimeout(f"still {self.progress.phase} after {timeout} s; wait again, or cancel()")
        if self._task.error is not None:
            raise self._task.error
        return self

    def cancel(self) -> None:
        """Stop the staging and discard what is there. When it returns, no thread works on it any more.

        After a commit, or a second time, it does nothing. From a listener, in the staging's own thread, it returns at
        once, and the staging ends when the listener has returned.
        """
        self._task.job.cancel()
        if self._task.is_mine and not self.done:
            self._task.job.abandoned = True
            return
        self._task.join()
        with self._closing:  # a commit that waits for pins ends first
            self._discard()

    def cancel_soon(self) -> None:
        """As `cancel`, without waiting: before it has begun, it then ends at once."""
        self._task.job.cancel()

    def discard(self) -> None:
        """Give the weights up. A second time, or after a commit, it does nothing.

        While they are committed, by another thread or by the one that tells a listener, it returns at once, and is done
        if the commit fails.
        """
        if not self.done:
            self.cancel()
            return
        self._given_up = True
        if not self._committing:
            with self._closing:
                self._discard()

    def _discard(self) -> None:
        if self._committing:
            self._given_up = True
        elif self._task.candidate is not None:
            self._close("discarded")
            self._task.tell_discarded(self._contents)

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
        """What the file was: "full", "delta", or "partial" for a part of it, as in `SwapReceipt`."""
        return self._contents.kind

    @property
    def base(self) -> str:
        """Of a delta, the id of the weights that it starts from; else empty."""
        return self._contents.base

    @property
    def verified(self) -> str:
        """How the weights were tried: "goldens", "finite" or "none", as in `SwapReceipt`."""
        return self._contents.verified

    @property
    def nonfinite(self) -> dict[str, Nonfinite]:
        """The weights that have NaN or infinities which those that are served have not, as in `SwapReceipt`."""
        return dict(self._contents.nonfinite)

    @property
    def _contents(self) -> Contents:
        self._check_done()
        assert self._task.contents is not None
        return self._task.contents

    def commit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve these weights, as soon as they are staged; `timeout` seconds are then waited for calls and pins.

        Raises what the staging has raised; StageClosed; LeaseTimeout (nothing changed, still staged); OutOfMemory;
        ModelFailed; StageCancelled or ModelClosed, where `cancel()` or `Model.close()` ends the waiting.
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
                if self._is_served(candidate):  # something was raised after that
                    self._close("committed")
                elif self._given_up:
                    self.discard()
                raise
            self._close("committed")
        return receipt

    async def acommit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """As `commit`, for asyncio: the loop goes on meanwhile.

        If the task is cancelled while calls and pins are waited for, the weights are given up.
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
        if self._task.candidate is None or not self._task.ticket.holds:  # or staged by a thread that a fork has lost
            raise StageClosed("this staging was already committed or discarded; stage the file again")
        return self._task.candidate

    def _close(self, phase: str) -> None:
        """Free the candidate's memory, and let others stage."""
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
