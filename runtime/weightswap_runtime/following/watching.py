"""What `Model.watch` and `Model.follow` return: threads that keep a model at a directory's files, or at a desired
store."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, get_args

from weightswap_runtime.errors import (
    NotPromoted,
    StageCancelled,
    Unsupported,
    check_timeout,
    is_number,
    listed,
    text_of,
)
from weightswap_runtime.format.identity import identify
from weightswap_runtime.format.names import part_of
from weightswap_runtime.jobs import POLL_SECONDS, Job
from weightswap_runtime.live.calls import Caller
from weightswap_runtime.live.receipt import Event, Listener
from weightswap_runtime.live.session import Member
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import WeightStore, fingerprint_of
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import BaseFile, PathLike, SwapRequest
from weightswap_runtime.threads import Background, UntilStopped

from .controller import Change, Controller, NoticeKind
from .desired_state import DesiredBase, DesiredState, DesiredWeights, check_new, check_promotable
from .desired_store import DesiredStore, Known
from .directory import Entry, open_directory, order_of_names, without_traceback
from .file_queue import FileQueue, Start
from .reconciler import Reconciler

Policy = Literal["newest", "proven"]
_log = logging.getLogger("weightswap.watching")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class Watching(UntilStopped):
    """A background thread that keeps a model's weights current, until `stop()`, or until the model is dropped.

    `stop()` cancels a staging under way, but not a commit that waits for calls or pins.
    """

    def __init__(
        self,
        subject: Subject,
        pollables: Sequence[Pollable],
        interval: float,
        callback: Listener | None,
        promotion: Promotion | None = None,
    ) -> None:
        """Check the options, and start the thread. Raises Unsupported."""
        check_interval(interval)
        self.request = subject.request
        self._promotion = promotion
        self._pollables = pollables
        self._interval = interval
        self._admission = fingerprint_of(subject.store.admit)
        self._callback = callback
        self._target: ModelTarget | None = ModelTarget(subject, promotion)  # None: the thread has ended
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # reentrant, unlike an Event: a finalizer may interrupt a put
        self._thread = Background(self._run, "weightswap-watching", self._end)
        self._unlisten = subject.store.events.listen(self._forward)
        self._finalizer = weakref.finalize(subject.model, self._end)
        self._thread.start()

    @property
    def last_error(self) -> BaseException | None:
        """The last error; None again once weights were taken, or the desired store could be read again."""
        return next((pollable.last_error for pollable in self._pollables if pollable.last_error is not None), None)

    @property
    def desired_store(self) -> DesiredStore | None:
        """The desired store with the desired state that the model is kept at, if any."""
        return self._promotion.desired_store if self._promotion is not None else None

    def poll_now(self) -> None:
        """Poll now instead of after the interval."""
        self._wakeups.put(None)

    def interrupt(self) -> None:
        """Cancel a staging under way. The next poll begins it again, if it is still wanted."""
        if (target := self._target) is not None:
            target.interrupt()

    def _end(self) -> None:
        if (target := self._target) is not None:
            target.is_stopping = True
        self.interrupt()
        self.poll_now()

    def _run(self) -> None:
        target = self._target
        assert target is not None
        try:
            while not target.is_stopping:
                self._notice_admission(target)
                self._wait(min(self._poll(pollable, target) for pollable in self._pollables))
        finally:
            self._unlisten()
            self._finalizer.detach()
            self._target = None  # a reference to this object must not keep the weights alive

    def _notice_admission(self, target: ModelTarget) -> None:
        """Try refused weights again if other ones are admitted now, such as by a new key."""
        before, self._admission = self._admission, fingerprint_of(target.store.admit)
        if self._admission != before:
            for pollable in self._pollables:
                pollable.forget_refusal()

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._wakeups.get(timeout=min(seconds, threading.TIMEOUT_MAX))

    def _poll(self, pollable: Pollable, target: ModelTarget) -> float:
        model = target.model()  # referred to only during a poll, so that it can be dropped
        if model is None:
            self._end()
            return 0.0
        try:
            return pollable.poll(target)
        except BaseException as error:  # a listener may raise SystemExit, which would end this thread silently
            _log.exception("a poll failed")
            pollable.last_error = without_traceback(error)
            return self._interval

    def _forward(self, event: Event) -> None:
        """Call the callback with the events that this thread causes."""
        if self._callback is not None and threading.current_thread() is self._thread:
            try:
                self._callback(event)
            except BaseException:  # also SystemExit
                _log.exception("%r failed", self._callback)


class Watcher(Watching):
    """A thread that watches a directory, until `stop()`, or until the model is dropped. Made by `Model.watch()`.

    Dropping the watcher does not stop it. The end of the interpreter does; a forked child does not have the thread.
    """

    def __init__(
        self,
        subject: Subject,
        directory: str | os.PathLike[str],
        interval: float,
        start: Start,
        callback: Listener | None,
        promotion: Promotion | None,
    ) -> None:
        if start not in ("newest", "all", "new"):
            raise Unsupported(f'start={start!r}: expected "newest", "all" or "new"')
        _check_part(subject, promotion)
        self.directory = self._where = printable(directory)
        listing = open_directory(directory)
        known_names = promotion.known_names if promotion else None
        self._queue = FileQueue(self.directory, listing, interval, start, known_names=known_names)
        pollables: tuple[Pollable, ...] = (self._queue,)
        if promotion is not None:  # desired weights come first: an operator or another watcher may have set them
            pollables = (Reconciler(promotion.desired_store, interval), self._queue)
        super().__init__(subject, pollables, interval, callback, promotion)

    @property
    def skipped(self) -> dict[str, BaseException]:
        """The errors of skipped files that are still in the directory, by name, in order.

        A file whose weights were swapped in by hand is no longer listed after the next poll.
        """
        return self._queue.skipped

    @property
    def waiting(self) -> dict[str, BaseException]:
        """The reasons why files of the directory wait, by name, in order.

        Deltas wait for their base weights, truncated files for their writer: after a minute without a change, they are
        skipped.
        """
        return self._queue.waiting


def _check_part(subject: Subject, promotion: Promotion | None) -> None:
    if not subject.request.only:
        return
    if promotion is not None:
        raise Unsupported("only, promote: a new process could not start from a part of a set; promote full sets")
    if subject.store.gate.current is None:
        raise Unsupported(
            "only: a part of a set goes into served weights, and none are served; load the model with weights first"
        )


class FollowStatus(NamedTuple):
    """The status of a process that follows a desired store."""

    desired_store: str
    revision: int | None  # that of the last read; None before the first
    desired: str | None  # the desired weights id; None if there is none
    served: str | None  # the weights id that new calls use
    agrees: bool  # it serves exactly the desired weights
    reachable: bool  # the desired store could be read
    on_hold: bool
    error: str  # why it does not agree, or cannot read the desired store; else empty

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values."""
        return self._asdict()


class Follower(Watching):
    """A thread that follows a desired store, until `stop()`, or until the model is dropped. Made by `Model.follow()`.

    Dropping the follower does not stop it. The end of the interpreter does; a forked child does not have the thread.
    """

    def __init__(
        self, subject: Subject, desired_store: DesiredStore, interval: float, callback: Listener | None
    ) -> None:
        self._desired_store, self._where = desired_store, desired_store.where
        self._reconciler = Reconciler(desired_store, interval, is_only_source=True)
        super().__init__(subject, (self._reconciler,), interval, callback)

    @property
    def desired_store(self) -> DesiredStore:
        return self._desired_store

    @property
    def desired(self) -> DesiredState | None:
        """The desired state at the last read; None before the first."""
        return self._reconciler.state

    @property
    def agrees(self) -> bool:
        """True if the desired weights of the last read are served."""
        return self.status.agrees

    @property
    def status(self) -> FollowStatus:
        """The desired and the served weights, and whether they agree."""
        state, error = self._reconciler.state, self.last_error
        current = target.store.gate.current if (target := self._target) is not None else None
        desired = state.weights_id if state else None
        return FollowStatus(
            desired_store=self.desired_store.where,
            revision=state.revision if state else None,
            desired=desired,
            served=current.weights_id if current else None,
            agrees=current is not None and desired == current.weights_id,
            reachable=self._reconciler.reachable,
            on_hold=state is not None and state.hold is not None,
            error=text_of(error) if error else "",
        )

    def wait(self, timeout: float | None = None, *, revision: int = 0) -> bool:
        """Wait, for at most `timeout` seconds, until the model serves the desired weights. Return whether it does.

        Their receipt is in the history then. revision: wait for the weights of this revision or a later one.
        """
        check_timeout(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._agrees_on(revision) and self.alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._agrees_on(revision)

    def _agrees_on(self, revision: int) -> bool:
        status, target = self.status, self._target
        is_noted = target is None or target.is_noted
        return status.agrees and (status.revision or 0) >= revision and is_noted


class Subject(NamedTuple):
    """The model to swap weights into."""

    model: Caller
    store: WeightStore
    member: Member
    request: SwapRequest  # the options of every swap


class Pollable(Protocol):
    """The work of each poll."""

    last_error: BaseException | None

    def poll(self, target: ModelTarget) -> float:
        """Serve what can be served. Return the seconds until the next poll."""
        ...

    def forget_refusal(self) -> None:
        """Try what was refused again at the next poll."""
        ...


def request_for(options: SwapRequest, path: str | Path, weights: DesiredWeights, by: str) -> SwapRequest:
    """Return the request that stages weights of a desired store, with absolute sources, with a thread's options."""
    onto = tuple((base.source, base.weights_id) for base in weights.bases or ())
    return options._replace(source=path, expect=weights.weights_id, by=by, onto=onto)


def check_interval(interval: Any) -> None:
    """Raise Unsupported for an invalid time between two polls."""
    if not (is_number(interval) and interval > 0):
        raise Unsupported(f"interval={interval!r}: expected seconds, more than 0")


class ModelTarget(Controller):
    """The changes that a watching thread makes to its model, itself, one after another."""

    def __init__(self, subject: Subject, promotion: Promotion | None) -> None:
        model, store, member, request = subject
        super().__init__(store, member, request)
        self.model = weakref.ref(model)
        self._promotion = promotion
        self.is_stopping = False
        self._first_generation = store.first_generation

    def check(self) -> None:
        if self.is_stopping:
            raise StageCancelled("watching was stopped")

    def begin(self, path: str | Path, weights: DesiredWeights) -> Staged:
        return self._staged(request_for(self._options, path, weights, weights.by or self._options.by))

    def _staged(self, request: SwapRequest) -> Staged:
        model = self.model()
        assert model is not None  # during a poll
        return Staged(model._methods, self.store, self._member, request, Job(request.rate_limit, yields=True))

    def swap(
        self, path: str | Path, weights_id: str | None, known: str | None = None, onto: tuple[BaseFile, ...] = ()
    ) -> str | None:
        with self.turn():
            # the id that a part results in is known only after its staging
            if weights_id is not None and not self._options.only and not self._needs(path, weights_id):
                return known
            for earlier in onto:
                self._needs(*earlier)  # nothing is built on what was rolled back
            current = self.store.gate.current
            if self._promotion is not None:
                self._promotion.check((*onto, (path, weights_id or "")), self.check)
            base = current.weights_id if current is not None and onto else None
            begin = partial(self._staged, self._options._replace(source=path, onto=onto))
            with self.prepared(Change(), begin) as change:
                staged = change.weights
                content = self._content(staged)
                if content != known and self._needs(path, staged.weights_id):
                    self.commit(change, partial(self._promote, path, staged, base, onto))
                return content

    def _promote(self, path: str | Path, staged: Staged, base: str | None, onto: tuple[BaseFile, ...]) -> None:
        if self._promotion is not None:
            through = tuple(DesiredBase(source=str(source), weights_id=weights_id) for source, weights_id in onto)
            graph_id = self._member.artifact.graph_id
            known = Known(staged.weights_id, graph_id, staged.labels, base or staged.base, through)
            self._promotion.promote(path, staged, known)

    def _content(self, staged: Staged) -> str:
        """Return the weights id; for a part, the id of the part alone."""
        manifest, identity = self._member.artifact.manifest, staged.identity
        if not (only := self._options.only):
            return identity.weights_id
        return identify(part_of(manifest, only).weights, identity.digests, {}).weights_id

    def _needs(self, path: PathLike, weights_id: str) -> bool:
        """Return whether these weights are not served yet. Raises NotPromoted if they were rolled back.

        With a promotion, the desired store knows what was rolled back.
        """
        if self._promotion is None:
            self.store.check_not_rolled_back(weights_id, self._first_generation, printable(path))
        return not self.serves(weights_id)

    def notify(self, kind: NoticeKind, source: str, error: BaseException) -> None:
        graph_id = self._member.artifact.graph_id
        self.store.events.emit(Event(kind, source, self._options.by, graph_id, error=error))


class Promotion(NamedTuple):
    """What a watcher does before it serves a file: it makes its weights the desired ones."""

    desired_store: DesiredStore
    policy: Policy
    by: str  # the promoter

    def check(self, files: Iterable[BaseFile], check: Check) -> None:
        """Raise NotPromoted or DesiredError if a staging of files could not be promoted anyway."""
        state = self.desired_store.read(check)
        for path, weights_id in files:
            self._check(path, weights_id, state)

    def promote(self, path: str | Path, staged: Staged, known: Known) -> None:
        """Make the staged weights the desired ones. Raises NotPromoted, and what `DesiredStore.promote` raises."""
        if self.policy == "proven":
            check_proven(printable(path), staged.verified, list(staged.nonfinite))
        may = partial(self._check, path, staged.weights_id)
        self.desired_store.promote(path, known=known, by=self.by, why=self.policy, may=may)

    def known_names(self, entries: Iterable[Entry]) -> AbstractSet[str]:
        """Return the names of those files of a directory that the desired store knows. Raises DesiredError."""
        known = {str(self.desired_store.locate(weights)) for weights in self.desired_store.read().known}
        return {entry.name for entry in entries if str(entry.path) in known}

    def _check(self, path: PathLike, weights_id: str, state: DesiredState) -> None:
        """Raise NotPromoted under a hold, or if a late watcher would go back: nobody has asked for this file."""
        if state.weights_id == weights_id:
            return
        check_promotable(state, weights_id, printable(path))
        check_new(state, weights_id, printable(path))
        folder, _, name = str(path).rpartition("/")
        for weights in state.known:
            known_folder, _, known_name = str(self.desired_store.locate(weights)).rpartition("/")
            if known_folder == folder and order_of_names(known_name) > order_of_names(name):
                raise NotPromoted(
                    f"{printable(path)}: not promoted, because {known_name} comes later and already was",
                    reason="superseded",
                )


def check_promotion_policy(policy: str) -> None:
    """Raise Unsupported for an unknown policy."""
    if policy not in get_args(Policy):
        raise Unsupported(f"policy={policy!r}: expected {' or '.join(map(repr, get_args(Policy)))}")


def check_proven(where: str, verified: str, nonfinite: list[str]) -> None:
    """Raise NotPromoted unless recorded outputs were reproduced by finite weights."""
    if nonfinite:
        raise NotPromoted(f"{where}: not promoted, because {listed(nonfinite)} are not finite", reason="unproven")
    if verified != "goldens":
        raise NotPromoted(
            f"{where}: not promoted, because no outputs were recorded for these weights (verified: {verified!r}). "
            "Record them with pack(goldens=...) or publish(goldens=...), or promote with policy='newest'",
            reason="unproven",
        )
