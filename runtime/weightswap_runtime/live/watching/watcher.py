"""A thread that keeps a model at the newest weights of a directory."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from weightswap_runtime.errors import StageCancelled, Superseded, Unsupported
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.selection import part_of
from weightswap_runtime.live.calling import Caller, Methods
from weightswap_runtime.live.events import Event, Listener
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.staging_task import StagingTask
from weightswap_runtime.live.store import Store
from weightswap_runtime.live.trials import Member
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import SwapRequest
from weightswap_runtime.threads.ending import Background
from weightswap_runtime.threads.job import Job

from .directory import open_directory
from .header_peek import without_traceback
from .intake import Intake, Start, Told

_log = logging.getLogger("weightswap.watching")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class Watcher(AbstractContextManager["Watcher"]):
    """Watches a directory in a thread of its own, until `stop()`, or until the model is dropped.

    Dropping the watcher does not stop it. The end of the interpreter does; a forked child has none.
    """

    def __init__(
        self,
        model: Caller,
        store: Store,
        member: Member,
        request: SwapRequest,
        directory: str | os.PathLike[str],
        interval: float,
        start: Start,
        callback: Listener | None,
    ) -> None:
        _check(interval, start)
        request.check()
        if request.only and store.gate.current is None:
            raise Unsupported(
                "only: a part of a set goes into weights that are served, and none are; load the model with weights "
                "first"
            )
        Job(request.rate_limit)
        self.directory = printable(directory)
        self._intake = Intake(self.directory, open_directory(directory), interval, start)
        self._loop = _Loop(model, store, member, request, self._intake, interval, callback)
        self._thread = Background(self._loop.run, "weightswap-watching", self._loop.stop)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still watches."""
        return self._thread.is_alive()

    @property
    def last_error(self) -> BaseException | None:
        """What went wrong last; None again once weights were taken, or the directory could be listed again."""
        return self._intake.last_error

    @property
    def skipped(self) -> dict[str, BaseException]:
        """Why files were passed over, by name, in order; only those that still are in the directory.

        One whose weights are served all the same, as somebody has swapped them in by hand, goes at the next look.
        """
        return self._intake.skipped

    @property
    def waiting(self) -> dict[str, BaseException]:
        """Why deltas of the directory wait, by name, in order: the weights that they start from are not served."""
        return self._intake.waiting

    def stop(self, timeout: float | None = None) -> bool:
        """Stop watching. A staging under way is cancelled; a commit that waits for calls or pins is not.

        Waits for at most `timeout` seconds until the thread has ended. Returns whether it has. From a callback it
        does not wait.
        """
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self.alive

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Watcher({self.directory!r}, {'alive' if self.alive else 'stopped'})"


def _check(interval: float, start: str) -> None:
    if not (isinstance(interval, int | float) and 0 < interval < math.inf):
        raise Unsupported(f"interval={interval!r}: expected seconds, more than 0")
    if start not in ("newest", "all", "new"):
        raise Unsupported(f'start={start!r}: expected "newest", "all" or "new"')


class _Loop:
    """What the thread does. It refers to the model only while it looks."""

    def __init__(
        self,
        model: Caller,
        store: Store,
        member: Member,
        request: SwapRequest,
        intake: Intake,
        interval: float,
        callback: Listener | None,
    ) -> None:
        self.store = store
        self.member = member
        self.request = request
        self.began = -1 if store.gate.current is None else store.gate.current.generation
        self.stopping = False
        self.job: Job | None = None
        self._intake = intake
        self._interval = interval
        self._callback = callback
        self._model = weakref.ref(model)
        self._thread: int | None = None
        self._bell: SimpleQueue[None] = SimpleQueue()  # safe to ring from a finalizer
        self._unlisten = store.events.listen(self._pass_on)
        self._finalizer = weakref.finalize(model, self.stop)

    def stop(self) -> None:
        self.stopping = True
        if (job := self.job) is not None:
            job.cancel()
        self._bell.put(None)

    def run(self) -> None:
        self._thread = threading.get_ident()
        try:
            while not self.stopping:
                self._wait(self._look())
        finally:
            self._unlisten()
            self._finalizer.detach()
            del self.store, self.member  # whoever keeps the watcher keeps no weights

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._bell.get(timeout=min(seconds, threading.TIMEOUT_MAX))

    def _look(self) -> float:
        model = self._model()
        if model is None:
            self.stop()
            return 0.0
        try:
            return self._intake.look(_ModelTarget(model._methods, self))
        except BaseException as error:  # a listener may raise SystemExit, which would end this thread without a word
            _log.exception("a look at the directory failed")
            self._intake.last_error = without_traceback(error)
            return self._interval

    def _pass_on(self, event: Event) -> None:
        """Only what this thread does is told to the callback."""
        if self._callback is not None and self._thread == threading.get_ident():
            try:
                self._callback(event)
            except BaseException:  # also one that would end the process, elsewhere
                _log.exception("%r failed", self._callback)


class _ModelTarget:
    """The model, for the length of one look."""

    def __init__(self, methods: Methods, loop: _Loop) -> None:
        self._methods = methods
        self._loop = loop
        self._store = loop.store

    def check(self) -> None:
        if self._loop.stopping:
            raise StageCancelled("the watching was stopped")

    def serves(self, weights_id: str) -> bool:
        gate = self._store.gate
        return gate.current is not None and gate.current.weights_id == weights_id and gate.failure is None

    def swap(self, path: str | Path, weights_id: str | None, known: str | None = None) -> str | None:
        request = self._loop.request._replace(path=path)
        with self._store.turns.wait_for_turn(self.check), self._job(Job(request.rate_limit)) as job:
            # of a part, only the staging tells which weights it leads to
            if weights_id is not None and not request.only and not self._wants(path, weights_id):
                return known
            staged = Staged(self._methods, StagingTask(self._store, self._loop.member, request, job))
            with staged.run():
                job.check()
                content = self._content(staged)
                if content != known and self._wants(path, staged.weights_id):
                    staged.commit(timeout=request.timeout)
                return content

    def _content(self, staged: Staged) -> str:
        """The weights id, or of a part what would be that if there were nothing else."""
        manifest, identity = self._loop.member.artifact.manifest, staged.identity
        if not (only := self._loop.request.only):
            return identity.weights_id
        return identify(part_of(manifest, only).weights, identity.digests, {}).weights_id

    def _wants(self, path: str | Path, weights_id: str) -> bool:
        """Whether these weights are not served yet: others may have put them in. Raises Superseded."""
        if receipt := self._rollback_of(weights_id):
            where, by = printable(path), f" by {receipt.by}" if receipt.by else ""
            raise Superseded(
                f"{where}: its weights {weights_id[:12]} were served, and rolled back{by} (generation "
                f"{receipt.generation}). Write other weights, or swap these by hand."
            )
        return not self.serves(weights_id)

    def _rollback_of(self, weights_id: str) -> SwapReceipt | None:
        """The rollback that took these weights away, since the watching began; None if they came back after it."""
        for receipt in reversed(tuple(self._store.history)):
            if receipt.generation <= self._loop.began or receipt.weights_id == weights_id:
                return None
            if receipt.kind == "rollback" and receipt.previous_weights_id == weights_id:
                return receipt
        return None

    @contextmanager
    def _job(self, job: Job) -> Iterator[Job]:
        """A job that `stop()` cancels."""
        self._loop.job = job
        if self._loop.stopping:
            job.cancel()
        try:
            yield job
        finally:
            self._loop.job = None

    def tell(self, kind: Told, source: str, error: BaseException) -> None:
        graph_id = self._loop.member.artifact.graph_id
        self._store.events.emit(Event(kind, source, self._loop.request.by, graph_id, error=error))
