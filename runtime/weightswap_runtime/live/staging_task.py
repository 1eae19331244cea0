"""One staging, from its claim to its commit: the work, in the caller's or a background thread, and its events."""

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
