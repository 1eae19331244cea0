"""One staging, from its claim to its commit: the work, in whichever thread, and what listeners are told of it."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from weightswap_runtime.errors import OutOfMemory, StageCancelled, StagingBusy
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import Contents, SwapRequest
from weightswap_runtime.threads.claims import POLL_SECONDS, Claim
from weightswap_runtime.threads.ending import Background, stop_at_end
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import forget_frames

from .events import Event, EventKind
from .member import Member
from .receipt import SwapReceipt
from .residency.candidate import Candidate
from .store import Store


class StagingTask:
    """The work, its outcome, and the claim that keeps others out until it is over."""

    def __init__(self, store: Store, member: Member, request: SwapRequest, job: Job) -> None:
        self.store = store
        self.job = job
        self.ticket = Claim()
        self.candidate: Candidate | None = None
        self.contents: Contents | None = None
        self.error: BaseException | None = None
        self.over = False
        self._dropped = False
        self._member = member
        self._request = request
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

    def claim(self) -> None:
        """Keep others from staging; where the request says so, wait for them first. Raises StagingBusy."""
        self.store.turns.claim(self.ticket, self._request.patience, self.job)

    def claim_at_once(self) -> None:
        """Keep others from staging, before there is work to do. Raises StagingBusy, and tells of it."""
        try:
            self.claim()
        except StagingBusy as error:
            self._tell("refused", error=error, phase=self.job.progress.phase)
            raise

    def run(self) -> None:
        """Do the work in this thread. Raises what it raises."""
        stop_at_end(self)
        self._thread = threading.get_ident()
        try:
            self._do()
        finally:
            self._end()

    def start(self) -> None:
        """Do the work in a thread of its own, which the end of the interpreter cancels."""
        thread = Background(self._run_in_background, "weightswap-staging", self.stop)
        try:
            thread.start()
        except BaseException as error:
            self.ticket.end()
            if isinstance(error, RuntimeError):
                text = f"no thread can be started to stage in the background ({error})"
                raise OutOfMemory(text) from error
            raise

    def _run_in_background(self) -> None:
        try:
            self.ticket.adopt()
            self._thread = threading.get_ident()
            self._do()
        except BaseException as error:  # wait() raises it
            forget_frames(error)
            self.error = error
        finally:
            self._end()

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

    def drop(self) -> None:
        """Nobody can commit it any more. What the thread still refers to keeps nobody from staging."""
        self.job.cancel()
        self._dropped = True
        if self.over:
            self.ticket.end()

    def _end(self) -> None:
        self.over = True
        if self._dropped:
            self.ticket.end()
        self._bell.put(None)

    def _do(self) -> None:
        try:
            candidate = self._staged()
            self.contents = candidate.contents
            self.candidate = candidate
            self.job.end("staged")
        except BaseException as error:
            self.job.end("cancelled" if isinstance(error, StageCancelled) else "failed")
            self.ticket.end()
            raise

    def _staged(self) -> Candidate:
        """The work, told of."""
        start = time.perf_counter()
        try:
            self.claim()
            self._tell("staging")
            self.job.begin("opening")
            candidate = self.store.stage(self._member, self._request, self.job)
        except BaseException as error:
            refused = isinstance(error, Exception) and not isinstance(error, StageCancelled)
            phase, nbytes, _ = self.job.progress
            seconds = time.perf_counter() - start
            self._tell("refused" if refused else "cancelled", error=error, phase=phase, nbytes=nbytes, seconds=seconds)
            raise
        contents = candidate.contents
        seconds = time.perf_counter() - start
        self._tell("staged", **_described(contents), nbytes=contents.bytes_read, seconds=seconds)
        if self.job.abandoned:
            self.tell_discarded(contents)
            self.job.check()
        return candidate

    def commit(self, candidate: Candidate, timeout: float | None) -> SwapReceipt:
        """Serve what was staged."""
        return self.store.commit(self._member, candidate, self._request.by, timeout, self.job.check)

    def tell_discarded(self, contents: Contents) -> None:
        """Tell that nobody wants what was staged."""
        self._emit("discarded", contents.source, **_described(contents))

    def _tell(self, kind: EventKind, **more: Any) -> None:
        operation = "partial" if self._request.only else None
        self._emit(kind, printable(self._request.path), **({"operation": operation} | more))

    def _emit(self, kind: EventKind, source: str, **more: Any) -> None:
        self.store.events.emit(Event(kind, source, self._request.by, self._member.artifact.graph_id, **more))


def _described(contents: Contents) -> dict[str, Any]:
    """What an event says of weights that are staged."""
    return {
        "weights_id": contents.identity.weights_id,
        "labels": dict(contents.identity.labels),
        "operation": contents.kind,
        "seconds_staged": contents.seconds_staged,
        "seconds_verified": contents.seconds_verified,
        "nonfinite": dict(contents.nonfinite),
    }
