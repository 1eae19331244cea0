"""The one controller of changes: weights are staged and verified, the decision is written, then they are committed.

Watchers, followers, a server's operators and a fleet's nodes differ in who decides, where that is written before the
commit, and how long a change may stay open. What a change is, and what may happen to it meanwhile, is the same for all:

    staging -> ready -> committing -> over      a refused commit stays ready; each but a commit can be discarded

No lock is held between these, only the store's claim, which refuses a second staging. So whoever waits for a decision
keeps nobody from discarding the change.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Literal, TypeVar
from uuid import uuid4

from weightswap_runtime.errors import NothingToRollBack, StageCancelled, StageClosed, StagingBusy, WaitTimeout
from weightswap_runtime.jobs import fork_safe
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.session import Member
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.request import BaseFile, SwapRequest

from .desired_state import SHOWN, DesiredWeights

_DEFAULT = SwapRequest("")
REMEMBERED = 64  # ids of discarded changes, whose requests may still come
NoticeKind = Literal["skipped", "unreachable", "waiting"]
C = TypeVar("C", bound="Change")


class Lease:
    """A lease that is over so many seconds after its last renewal."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self.renew()

    def renew(self) -> None:
        self._until = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until


class Change:
    """A change of a model's weights, from its request to its end."""

    def __init__(
        self,
        weights_id: str = "",
        *,
        id: str = "",  # noqa: A002 - it is called so in messages
        by: str = "",
        lease: Lease | None = None,
        staged: Staged | None = None,
    ) -> None:
        """weights_id: of weights that are still in memory. staged: those of another change, which this one does not
        discard. lease: None: it stays open until it is committed or discarded."""
        self.id = id or uuid4().hex
        self.weights_id, self.by = weights_id, by
        self.lease = lease or Lease()
        self.staged = staged  # None: it has not begun yet, or the weights are in memory
        self.phase: Literal["staging", "ready", "committing", "over"] = "staging"
        self.is_discarded = False
        self.is_borrowed = staged is not None

    def __str__(self) -> str:
        return f"the change {self.id}"

    @property
    def weights(self) -> Staged:
        """What is staged, where something is."""
        assert self.staged is not None
        return self.staged

    @property
    def busy(self) -> str:
        """Why no other change can begin now."""
        return "another change of these weights is open; commit or discard it first"

    def ended(self) -> None:
        """Called once, when the change is over, before another can begin."""


class Controller:
    """The changes of a model's weights, of which one is open at a time. It has no thread; every method may be called
    from any.

    What decides is the owner's: a subclass says when it stops (`check`), and how it stages desired weights (`begin`) or
    serves files (`swap`).
    """

    def __init__(
        self, store: WeightStore, member: Member, options: SwapRequest = _DEFAULT, *, interval: float | None = None
    ) -> None:
        """interval: seconds between two questions whether weights that are being staged are still wanted; None: the
        calling thread stages them itself."""
        self.interval = interval
        self.open: tuple[Change, ...] = ()
        self.store, self._member = store, member
        self._options = options
        self._discarded: deque[str] = deque(maxlen=REMEMBERED)
        # of `open` and of phases; a listener may discard in a commit, and a finalizer interrupt
        self._lock = fork_safe(RLock())

    def check(self) -> None:
        """Raise StageCancelled if the owner is stopping."""

    def begin(self, path: str | Path, weights: DesiredWeights) -> Staged:
        """Begin to stage desired weights. With `interval=None`, they are not started yet."""
        raise NotImplementedError

    def swap(
        self, path: str | Path, weights_id: str | None, known: str | None = None, onto: tuple[BaseFile, ...] = ()
    ) -> str | None:
        """Serve a file, whose header claims `weights_id`, unless its content has the id `known`.

        onto: deltas from the served weights to those from which the file starts. Return the id of its content, or
        `known` if it was not read. Raises what `Model.swap` and `check` raise.
        """
        raise NotImplementedError

    def notify(self, kind: NoticeKind, source: str, error: BaseException) -> None:
        """Tell the owner what cannot be served, or read, and why."""

    def serves(self, weights_id: str) -> bool:
        """Return whether exactly these weights are served now."""
        gate = self.store.gate
        return gate.current is not None and gate.current.weights_id == weights_id and gate.failure is None

    def keeps(self, weights_id: str) -> bool:
        """Return whether a rollback would serve exactly these weights."""
        return self.store.previous_id == weights_id

    @property
    def is_noted(self) -> bool:
        """False while a commit of this controller is served whose receipt is not in the history yet."""
        if not any(change.phase == "committing" for change in self.open):
            return True
        current, receipts = self.store.gate.current, self.store.history
        return current is None or (len(receipts) > 0 and receipts[-1].generation >= current.generation)

    @property
    def serves_nothing(self) -> bool:
        return self.store.gate.current is None

    def turn(self, check: Check | None = None) -> AbstractContextManager[None]:
        """Return a context manager during which nobody else decides on these weights. check: called in the wait."""
        return self.store.turns.wait_for_turn(check or self.check)

    def prepare(
        self, change: C, begin: Callable[[], Staged] | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> C:
        """Stage and verify weights, and keep them ready. begin: None if there is nothing to stage.

        Raises StagingBusy, StageCancelled if the change was discarded, even before it came, and what the staging
        raises. It is then over.
        """
        self._open(change)
        try:
            self.check()
            if begin is not None:
                change.staged = begin()
                if change.is_discarded:  # when there was nothing to cancel
                    change.staged.cancel_soon()
                self._await(change.staged, lambda: is_wanted() and not change.lease.is_over)
            with self._lock:
                self.check_not_discarded(change)
                change.phase = "ready"
        except BaseException:
            self._end(change)
            raise
        return change

    @contextmanager
    def prepared(
        self, change: C, begin: Callable[[], Staged] | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[C]:
        """Prepare a change, which is discarded at the end of the block unless it was committed."""
        self.prepare(change, begin, is_wanted)
        try:
            yield change
        finally:
            self.drop(change)

    def _open(self, change: Change) -> None:
        with self._lock:
            self.check_not_discarded(change)
            for other in self.open:
                if change.staged is None or change.staged is not other.staged:
                    raise StagingBusy(other.busy)
            self.open += (change,)

    def check_not_discarded(self, change: Change) -> None:
        """Raise StageCancelled if a change was discarded, even before it came."""
        if change.is_discarded or change.id in self._discarded:
            raise StageCancelled(f"{change} was discarded")

    def _await(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        if self.interval is None:
            staged.run()
            return
        while not staged.done:
            with suppress(WaitTimeout):
                staged.wait(self.interval)
            if not staged.done and not is_wanted():
                staged.cancel_soon()
        staged.wait()

    def interrupt(self) -> None:
        """Cancel what is being staged, for somebody who waits for the turn."""
        with self._lock:
            for change in self.open:
                change.is_discarded = change.is_discarded or change.phase == "staging"
                if change.phase != "ready" and change.staged is not None:
                    change.staged.cancel_soon()

    def commit(self, change: Change, record: Callable[[], object] = lambda: None) -> SwapReceipt | None:
        """Serve the weights of a change that is ready. Returns None if they are served already.

        record: writes the decision down, where others act on it, before a commit: they would undo what was not
        decided. What it raises, or the commit after it, leaves the change ready.

        Raises StageClosed, what `record` and `Staged.commit` raise, and NothingToRollBack.
        """
        with self.ready(change):
            change.phase = "committing"
        try:
            receipt = self._serve(change, record)
        except BaseException:
            change.phase = "ready"
            if change.is_discarded:
                self._end(change)
            raise
        self._end(change, committed=True)
        return receipt

    def _serve(self, change: Change, record: Callable[[], object]) -> SwapReceipt | None:
        if change.staged is not None:
            change.staged.check_admitted()  # before others are told
            record()
            return change.staged.commit(timeout=self._options.timeout)
        if self.serves(change.weights_id):
            return None
        if self.store.previous_id != change.weights_id:
            raise NothingToRollBack(f"the weights {change.weights_id[:SHOWN]} are no longer in memory")
        record()
        patience, timeout = self._options.patience, self._options.timeout
        return self.store.rollback(self._member, change.by, patience, timeout, change.weights_id)

    @contextmanager
    def ready(self, change: Change) -> Iterator[None]:
        """Keep a change as it is, ready, within the block. Raises StageClosed if it is not."""
        with self._lock:
            if change.phase != "ready":
                raise StageClosed("the weights were committed or discarded in the meantime; stage them again")
            yield

    def discard(self, change_id: str) -> None:
        """Discard a change that is open, is being staged, or has not come yet; in a commit, only if that fails."""
        with self._lock:
            self._discarded.append(change_id)
        if (change := self.find(change_id)) is not None:
            self.drop(change)

    def drop(self, change: Change) -> None:
        """Discard a change, as `discard` does. One that is over stays so."""
        with self._lock:
            change.is_discarded = True
            if change.phase == "committing":
                return
        self._end(change)

    def _end(self, change: Change, committed: bool = False) -> None:
        with self._lock:
            for each in self.open:
                if each is change or (committed and each.staged is change.staged is not None):
                    self.open = tuple(other for other in self.open if other is not each)
                    each.phase = "over"
                    each.ended()
        if change.staged is not None and not change.is_borrowed:
            change.staged.discard()

    def find(self, change_id: str) -> Change | None:
        """Return the open change with an id."""
        return next((change for change in self.open if change.id == change_id), None)

    def close(self) -> None:
        """Discard all that is open."""
        for change in self.open:
            self.drop(change)

    def apply(
        self,
        path: str | Path,
        weights: DesiredWeights,
        is_wanted: Callable[[], bool],
        record: Callable[[], object] = lambda: None,
    ) -> None:
        """Serve exactly these weights, if they are still wanted once they are staged.

        They are not read if they are still in memory. Raises what `prepare` and `commit` raise.
        """
        weights_id, by = weights.weights_id, weights.by or self._options.by
        with self.turn():
            if self.serves(weights_id) or not is_wanted():  # changed during the wait for the turn
                return
            if self.keeps(weights_id):
                # suppressed if another thread has staged or committed meanwhile
                with suppress(NothingToRollBack), self.prepared(Change(weights_id, by=by)) as change:
                    self.commit(change, record)
                    return
            with self.prepared(Change(weights_id, by=by), partial(self.begin, path, weights), is_wanted) as change:
                self.check()
                if is_wanted():
                    self.commit(change, record)
