"""A set of weights that serves nobody yet, from the beginning of its staging to its commit."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from .candidates import Candidate
from .ending import Background, stop_at_end
from .errors import OutOfMemory, StageCancelled, StageClosed, StageTimeout, StagingBusy
from .forks import renew_in_children
from .gate import POLL_SECONDS, Claim, Gate
from .identity import Identity
from .job import Job, Progress
from .nonfinite import Nonfinite
from .receipts import SwapReceipt
from .session import Caller, Methods, Session
from .staging import Contents
from .workers import forget_frames

LEASE_TIMEOUT = 60.0


class Staging:
    """One staging: the work, its outcome, and the claim that keeps others out until it is over."""

    def __init__(self, work: Callable[[Job], Candidate], job: Job, ticket: Claim) -> None:
        self._work: Callable[[Job], Candidate] | None = work
        self.job = job
        self.ticket = ticket
        self.candidate: Candidate | None = None
        self.contents: Contents | None = None
        self.error: BaseException | None = None
        self.over = False
        self._bell: SimpleQueue[None] = SimpleQueue()  # an Event may stay locked where an interrupt leaves it
        self._process = os.getpid()
        self._thread: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread does the work."""
        return self._thread == threading.get_ident()

    def is_alive(self) -> bool:
        return not self.over

    def stop(self) -> None:
        """Let it end soon."""
        self.job.cancel()

    def run(self) -> None:
        """Do the work. Raises what it raises."""
        stop_at_end(self)
        self._thread = threading.get_ident()
        try:
            self._do()
        finally:
            self._end()

    def _do(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self.candidate = work(self.job)
            self.contents = self.candidate.contents
            self.job.end("staged")
        except BaseException as error:
            self.job.end("cancelled" if isinstance(error, StageCancelled) else "failed")
            self.ticket.end()
            raise

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended. A forked child does not have the thread that works on it."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.over:
            if self._process != os.getpid():
                self.error = StageCancelled("the process was forked while another thread staged; stage again")
                self._end()
            elif (left := deadline - time.monotonic()) <= 0:
                return False
            else:
                self._listen(min(left, POLL_SECONDS))
        return True

    def _listen(self, seconds: float) -> None:
        with suppress(Empty):
            self._bell.get(timeout=seconds)
            self._bell.put(None)  # for others who wait

    def _end(self) -> None:
        self.over = True
        self._bell.put(None)

    def start(self) -> None:
        """Do the work in a thread of its own, which the end of the interpreter cancels."""

        def run() -> None:
            try:
                self.ticket.adopt()
                self._thread = threading.get_ident()
                self._do()
            except BaseException as error:  # wait() raises it
                forget_frames(error)
                self.error = error
            finally:
                self._end()

        thread = Background(run, "weightswap-staging", self.stop)
        try:
            thread.start()
        except RuntimeError as error:
            self.ticket.end()
            raise OutOfMemory(f"no thread can be started to stage in the background ({error})") from error
        except BaseException:
            self.ticket.end()
            raise


class Staged(Caller, AbstractContextManager["Staged"]):
    """A set of weights that serves nobody yet. Call it to try it; then `commit()` or `discard()`.

    One that is staged in the background is not ready at once: `progress`, `wait()`, `cancel()`. Leaving its `with`
    block, or dropping the last reference, discards it.
    """

    _serves = False

    def __init__(
        self,
        methods: Methods,
        gate: Gate[Session],
        staging: Staging,
        commit: Callable[[Candidate, float | None], SwapReceipt],
        discarded: Callable[[Contents], None],
    ) -> None:
        super().__init__(methods)
        self._gate = gate
        self._staging = staging
        self._commit = commit
        self._discarded = discarded
        self._renew()
        renew_in_children(self)
        self._committing = self._given_up = False

    def _renew(self) -> None:
        self._closing = threading.RLock()  # a listener may discard what is being committed

    def start(self) -> Staged:
        """Stage in the background, until the last reference to this is dropped."""
        weakref.finalize(self, self._staging.job.cancel)
        self._staging.start()
        return self

    def run(self) -> Staged:
        """Stage now, in this thread. Raises what the staging raises."""
        self._staging.run()
        return self

    @property
    def progress(self) -> Progress:
        """The phase, bytes done, and of how many."""
        return self._staging.job.progress

    @property
    def done(self) -> bool:
        """Whether the staging has ended, well or not."""
        return self._staging.over

    def wait(self, timeout: float | None = None) -> Staged:
        """Wait, for at most `timeout` seconds, until it is staged and verified.

        Raises StageTimeout, StagingBusy in the staging's own thread, and whatever the staging has raised.
        """
        if self._staging.is_mine and not self.done:
            raise StagingBusy("a listener is told of a staging that has not ended, and cannot wait for it or commit it")
        if not self._staging.join(timeout):
            raise StageTimeout(f"still {self.progress.phase} after {timeout} s; wait again, or cancel()")
        if self._staging.error is not None:
            raise self._staging.error
        return self

    def cancel(self) -> None:
        """Stop the staging and discard what is there. When it returns, no thread works on it any more.

        After a commit, or a second time, it does nothing. From a listener, in the staging's own thread, it returns at
        once, and the staging ends when the listener has returned.
        """
        self._staging.job.cancel()
        if self._staging.is_mine and not self.done:
            self._staging.job.abandoned = True
            return
        self._staging.join()
        self.discard()

    def cancel_soon(self) -> None:
        """As `cancel`, without waiting: before it has begun, it then ends at once."""
        self._staging.job.cancel()

    def discard(self) -> None:
        """Give the weights up. A second time, or after a commit, it does nothing."""
        if not self.done:
            self.cancel()
            return
        with self._closing:
            if self._committing:  # told to by a listener: it is done if the commit fails
                self._given_up = True
            elif self._staging.candidate is not None:
                self._close("discarded")
                self._discarded(self._contents)

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
        assert self._staging.contents is not None
        return self._staging.contents

    def commit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve these weights, as soon as they are staged; `timeout` seconds are then waited for calls and pins.

        Raises what the staging has raised; StageClosed; LeaseTimeout (nothing changed, still staged); ModelFailed.
        """
        self.wait()
        with self._closing:
            candidate = self._opened()
            try:
                self._committing = True
                candidate.check = self._staging.job.check
                receipt = self._commit(candidate, timeout)
            except BaseException:
                self._committing = False
                if self._is_served(candidate):  # something was raised after that
                    self._close("committed")
                elif self._given_up:
                    self.discard()
                raise
            self._close("committed")
        return receipt

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
        if (
            self._staging.candidate is None or not self._staging.ticket.holds
        ):  # or staged by a thread that a fork has lost
            raise StageClosed("this staging was already committed or discarded; stage the file again")
        return self._staging.candidate

    def _close(self, phase: str) -> None:
        """Free the candidate's memory, and let others stage."""
        self._staging.candidate = None
        self._committing = False
        self._staging.job.end(phase)
        self._staging.ticket.end()

    def _run(self, name: str, flat: list[Any]) -> list[Any]:
        lease = Claim()
        with self._closing:
            session = self._opened().session(Job())
            self._gate.acquire_session(session, lease)
        try:
            return session.bound[self._methods.place].run(name, flat)
        finally:
            self._gate.release(session, lease)
