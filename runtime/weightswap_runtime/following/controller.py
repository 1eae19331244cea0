"""How a thread keeps a model's weights current: what it does to the model, and what it promotes.

An `Intake` decides by the files of a directory what shall be served, a `Reconciler` by a place. Both have it done by a
`ModelTarget`, which alone touches the model.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from weightswap_runtime.errors import (
    NothingToRollBack,
    StageCancelled,
    Superseded,
    Unproven,
    Unsupported,
    is_number,
    join_seconds,
    listed,
)
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.names import part_of
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.calls import Caller, Methods
from weightswap_runtime.live.receipt import Event, Listener, SwapReceipt
from weightswap_runtime.live.session import Member
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import Store, fingerprint_of
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import BaseFile, PathLike, SwapRequest
from weightswap_runtime.threads import Background

from .desired_state import DesiredBase, DesiredState, DesiredWeights, check_new, check_promotable
from .directory import Entry, order_of_names, without_traceback
from .intake import NoticeKind
from .place import DesiredPlace, Known

Policy = Literal["newest", "proven"]
_log = logging.getLogger("weightswap.watching")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class Watching(AbstractContextManager["Watching"]):
    """A background thread that keeps a model's weights current, until `stop()`, or until the model is dropped.

    Dropping this object does not stop the thread. The end of the interpreter does; a forked child does not have it.
    """

    def __init__(
        self,
        subject: Subject,
        lookers: Sequence[Looker],
        interval: float,
        callback: Listener | None,
        promotion: Promotion | None = None,
    ) -> None:
        """Check the options, and start the thread. Raises Unsupported."""
        check_interval(interval)
        model, self._store, self._member, self._request = subject
        self._promotion = promotion
        self._lookers = lookers
        current = self._store.gate.current
        # rollbacks up to here were made before the watcher began, and do not bind it
        self._first_generation = -1 if current is None or self._store.inherited else current.generation
        self._stopping = False
        self._job: Job | None = None  # of the change under way
        self._interval = interval
        self._admission = fingerprint_of(self._store.admit)
        self._callback = callback
        self._model = weakref.ref(model)  # referred to only during a look, so that it can be dropped
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # reentrant, unlike an Event: a finalizer may interrupt a put
        self._thread = Background(self._run, "weightswap-watching", self._end)
        self._unlisten = self._store.events.listen(self._forward)
        self._finalizer = weakref.finalize(model, self._end)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def last_error(self) -> BaseException | None:
        """The last error; None again once weights were taken, or the place could be read again."""
        return next((looker.last_error for looker in self._lookers if looker.last_error is not None), None)

    @property
    def place(self) -> DesiredPlace | None:
        """The place with the desired state that the model is kept at, if any."""
        return self._promotion.place if self._promotion is not None else None

    def look_soon(self) -> None:
        """Look now instead of after the interval."""
        self._wakeups.put(None)

    def interrupt(self) -> None:
        """Cancel a staging under way. The next look begins it again, if it is still wanted."""
        if (job := self._job) is not None:
            job.cancel()

    def request_for(self, path: str | Path, weights: DesiredWeights, by: str) -> SwapRequest:
        """Return the request with which this thread would stage weights of its place, with absolute sources."""
        onto = tuple(BaseFile(base.source, base.weights_id) for base in weights.bases or ())
        return self._request._replace(source=path, expect=weights.weights_id, by=by, onto=onto)

    def stop(self, timeout: float | None = None) -> bool:
        """Stop the thread. A staging under way is cancelled; a commit that waits for calls or pins is not.

        Wait for at most `timeout` seconds until the thread has ended, and return whether it has. In a callback it does
        not wait.
        """
        seconds = join_seconds(timeout)
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _described(self, where: str) -> str:
        return f"{type(self).__name__}({where!r}, {'alive' if self.alive else 'stopped'})"

    def _end(self) -> None:
        self._stopping = True
        self.interrupt()
        self.look_soon()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._notice_admission()
                self._wait(min(map(self._look, self._lookers)))
        finally:
            self._unlisten()
            self._finalizer.detach()
            del self._store, self._member  # a reference to this object must not keep the weights alive

    def _notice_admission(self) -> None:
        """Try refused weights again if other ones are admitted now, such as by a new key."""
        before, self._admission = self._admission, fingerprint_of(self._store.admit)
        if self._admission != before:
            for looker in self._lookers:
                looker.forget_refusal()

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._wakeups.get(timeout=min(seconds, threading.TIMEOUT_MAX))

    def _look(self, looker: Looker) -> float:
        model = self._model()
        if model is None:
            self._end()
            return 0.0
        try:
            return looker.look(ModelTarget(model._methods, self))
        except BaseException as error:  # a listener may raise SystemExit, which would end this thread silently
            _log.exception("a poll failed")
            looker.last_error = without_traceback(error)
            return self._interval

    def _forward(self, event: Event) -> None:
        """Call the callback with the events that this thread causes."""
        if self._callback is not None and threading.current_thread() is self._thread:
            try:
                self._callback(event)
            except BaseException:  # also SystemExit
                _log.exception("%r failed", self._callback)


class Subject(NamedTuple):
    """The model to swap weights into."""

    model: Caller
    store: Store
    member: Member
    request: SwapRequest  # the options of every swap


class Looker(Protocol):
    """The work of each look."""

    last_error: BaseException | None

    def look(self, target: ModelTarget) -> float:
        """Serve what can be served. Return the seconds until the next look."""
        ...

    def forget_refusal(self) -> None:
        """Try what was refused again at the next look."""
        ...


def check_interval(interval: Any) -> None:
    """Raise Unsupported for an invalid time between two looks."""
    if not (is_number(interval) and interval > 0):
        raise Unsupported(f"interval={interval!r}: expected seconds, more than 0")


class ModelTarget:
    """The model, for one look."""

    def __init__(self, methods: Methods, watching: Watching) -> None:
        self._methods = methods
        self._watching = watching
        self._store, self._member, self._request = watching._store, watching._member, watching._request
        self._promotion = watching._promotion

    def check(self) -> None:
        if self._watching._stopping:
            raise StageCancelled("watching was stopped")

    def serves(self, weights_id: str) -> bool:
        gate = self._store.gate
        return gate.current is not None and gate.current.weights_id == weights_id and gate.failure is None

    @property
    def serves_nothing(self) -> bool:
        return self._store.gate.current is None

    def swap(
        self, path: str | Path, weights_id: str | None, known: str | None = None, onto: tuple[BaseFile, ...] = ()
    ) -> str | None:
        with self._turn() as job:
            # the id that a part results in is known only after its staging
            if weights_id is not None and not self._request.only and not self._needs(path, weights_id):
                return known
            for each in onto:
                self._needs(each.path, each.weights_id)  # nothing is built on what was rolled back
            promotion, current = self._promotion, self._store.gate.current
            if promotion is not None:
                promotion.check((*onto, BaseFile(path, weights_id or "")), self.check)
            base = current.weights_id if current is not None and onto else None
            with self._staged(job, self._request._replace(source=path, onto=onto)) as staged:
                content = self._content(staged)
                if content != known and self._needs(path, staged.weights_id):
                    if promotion is not None:
                        through = tuple(DesiredBase(source=str(each.path), weights_id=each.weights_id) for each in onto)
                        graph_id = self._member.artifact.graph_id
                        known_now = Known(staged.weights_id, graph_id, staged.labels, base or staged.base, through)
                        promotion.promote(path, staged, known_now)
                    staged.commit(timeout=self._request.timeout)
                return content

    def apply(self, path: str | Path, weights: DesiredWeights, is_wanted: Callable[[], bool]) -> None:
        """Serve exactly these weights, if `is_wanted` is still true when they are staged. Raises what `swap` raises."""
        with self._turn() as job:
            if self.serves(weights.weights_id) or not is_wanted():  # changed during the wait for the turn
                return
            by = weights.by or self._request.by
            if self._try_rollback(weights.weights_id, by):
                return
            with self._staged(job, self._watching.request_for(path, weights, by)) as staged:
                if is_wanted():
                    staged.commit(timeout=self._request.timeout)

    def _try_rollback(self, weights_id: str, by: str) -> bool:
        """Roll back to these weights, without reading, if they are still in memory. Return whether they were."""
        if self._store.previous_id != weights_id:
            return False
        try:
            self._store.rollback(self._member, by, self._request.patience, self._request.timeout, weights_id)
        except NothingToRollBack:  # another thread has staged or committed meanwhile
            return False
        return True

    @contextmanager
    def _turn(self) -> Iterator[Job]:
        """Hold this thread's turn to swap within the block; yield a job that `stop()` cancels."""
        with self._store.turns.wait_for_turn(self.check):
            self._watching._job = job = Job(self._request.rate_limit)
            if self._watching._stopping:
                job.cancel()
            try:
                yield job
            finally:
                self._watching._job = None

    @contextmanager
    def _staged(self, job: Job, request: SwapRequest) -> Iterator[Staged]:
        with Staged(self._methods, self._store, self._member, request, job).run() as staged:
            job.check()
            yield staged

    def _content(self, staged: Staged) -> str:
        """Return the weights id; for a part, the id of the part alone."""
        manifest, identity = self._member.artifact.manifest, staged.identity
        if not (only := self._request.only):
            return identity.weights_id
        return identify(part_of(manifest, only).weights, identity.digests, {}).weights_id

    def _needs(self, path: PathLike, weights_id: str) -> bool:
        """Return whether these weights are not served yet. Raises Superseded if they were rolled back.

        With a promotion, the place knows what was rolled back.
        """
        if self._promotion is None and (receipt := self._rollback_of(weights_id)):
            where, by = printable(path), f" by {receipt.by}" if receipt.by else ""
            raise Superseded(
                f"{where}: its weights {weights_id[:12]} were served, then rolled back{by} (generation "
                f"{receipt.generation}). Write other weights, or swap these in by hand."
            )
        return not self.serves(weights_id)

    def _rollback_of(self, weights_id: str) -> SwapReceipt | None:
        """Return the rollback from these weights since the watcher began; None if they were committed again."""
        for receipt in reversed(tuple(self._store.history)):
            if receipt.generation <= self._watching._first_generation or receipt.weights_id == weights_id:
                return None
            if receipt.kind == "rollback" and receipt.previous_weights_id == weights_id:
                return receipt
        return None

    def notify(self, kind: NoticeKind, source: str, error: BaseException) -> None:
        graph_id = self._member.artifact.graph_id
        self._store.events.emit(Event(kind, source, self._request.by, graph_id, error=error))


class Promotion(NamedTuple):
    """What a watcher does before it serves a file: it makes its weights the desired ones."""

    place: DesiredPlace
    policy: Policy
    by: str  # the promoter

    def check(self, files: Iterable[BaseFile], check: Check) -> None:
        """Raise Held, Superseded or DesiredError if a staging of files could not be promoted anyway."""
        state = self.place.read(check)
        for path, weights_id in files:
            self._check(path, weights_id, state)

    def promote(self, path: str | Path, staged: Staged, known: Known) -> None:
        """Make the staged weights the desired ones. Raises Unproven, and what `DesiredPlace.promote` raises."""
        if self.policy == "proven":
            check_proven(printable(path), staged.verified, list(staged.nonfinite))
        may = partial(self._check, path, staged.weights_id)
        self.place.promote(path, known=known, by=self.by, why=self.policy, may=may)

    def known_names(self, entries: Iterable[Entry]) -> AbstractSet[str]:
        """Return the names of those files of a directory that the place knows. Raises DesiredError."""
        known = {str(self.place.locate(weights)) for weights in self.place.read().known}
        return {entry.name for entry in entries if str(entry.path) in known}

    def _check(self, path: PathLike, weights_id: str, state: DesiredState) -> None:
        """Raise Held, or Superseded if a watcher that comes late would go back: nobody has asked for this file."""
        if state.weights_id == weights_id:
            return
        check_promotable(state, weights_id, printable(path))
        check_new(state, weights_id, printable(path))
        folder, _, name = str(path).rpartition("/")
        for weights in state.known:
            known_folder, _, known_name = str(self.place.locate(weights)).rpartition("/")
            if known_folder == folder and order_of_names(known_name) > order_of_names(name):
                raise Superseded(f"{printable(path)}: not promoted, because {known_name} comes later and already was")


def check_promotion_policy(policy: str) -> None:
    """Raise Unsupported for an unknown policy."""
    if policy not in get_args(Policy):
        raise Unsupported(f"policy={policy!r}: expected {' or '.join(map(repr, get_args(Policy)))}")


def check_proven(where: str, verified: str, nonfinite: list[str]) -> None:
    """Raise Unproven unless recorded outputs were reproduced by finite weights."""
    if nonfinite:
        raise Unproven(f"{where}: not promoted, because {listed(nonfinite)} are not finite")
    if verified != "goldens":
        raise Unproven(
            f"{where}: not promoted, because no outputs were recorded for these weights (verified: {verified!r}). "
            "Record them with pack(goldens=...) or publish(goldens=...), or promote with policy='newest'"
        )
