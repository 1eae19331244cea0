"""A node's part in the changes of a fleet: orders of a coordinator, trials, and what the place desires, one at a time.

The place alone records what was decided. A coordinator may die at any time, and a message may be lost, or come late. So
a node that has prepared an order waits for `commit` or `discard`, but also learns from the place how the order ended:
in `reconcile`, once the place has another revision, or the order's lease is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weightswap_fleet.documents import Committed, Order, Prepared, Spec, TrialOrder
from weightswap_runtime.errors import (
    StageCancelled,
    StageClosed,
    StagingBusy,
    Unsupported,
    WeightswapError,
    text_of,
)
from weightswap_runtime.following.desired_state import SHOWN, DesiredState, DesiredWeights
from weightswap_runtime.following.intake import NoticeKind
from weightswap_runtime.following.place import DesiredPlace, Source
from weightswap_runtime.following.reconciler import Reconciler
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import fingerprint_of
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.keeper import begin_trial
from weightswap_runtime.sources.byte_source import Check
from weightswap_server.canary import Judgement, Measured
from weightswap_server.workers.trials import read_measures

from .weights import NodeWeights

_POLL = 0.01  # seconds
_SILENT = 30.0  # seconds without a read of the place, after which a node reports it
_MOST_DISCARDED = 64  # ids of discarded orders and trials that are remembered, as their messages may still come
_log = logging.getLogger("weightswap.fleet")


class NodeChanges:
    """The changes of one node. Thread-safe: every change takes the turn, and `_order` and `_trial` change within it.

    What must not wait for a staging (`renew`, `discard`, `end_trial`, what the node's status says, and the refusal of a
    second order) reads them without the turn.
    """

    def __init__(self, weights: NodeWeights, control: Control, clock: Callable[[], float], is_deployed: bool) -> None:
        """control: the page on which trials are announced to replicas. is_deployed: the deployment is known; without it
        nothing changes."""
        self._weights, self._control, self._clock = weights, control, clock
        self._node, self._model = weights.node, weights.model
        self._place = _NodePlace(weights.spec.place, clock)
        self.reconciler = Reconciler(self._place, weights.spec.interval, clock)
        self.is_deployed = is_deployed
        self.wakeup = threading.Event()  # of the thread that follows the place
        self.stopped = threading.Event()
        self._order: _OpenOrder | None = None
        self._trial: _NodeTrial | None = None
        self._discarded: deque[str] = deque(maxlen=_MOST_DISCARDED)
        self._last_conditions: Hashable = None  # of the last reconciliation
        self._turn = threading.RLock()
        self._deploying = threading.Lock()  # not the turn: a starting replica must not wait for a staging

    def deploy(self, spec: Spec) -> None:
        """Adopt a deployment if it is the latest."""
        with self._deploying:
            if spec.since > self._weights.spec.since:
                self._weights.deploy(spec)
                self.reconcile_soon()
            if not self.is_deployed:
                self.is_deployed = True
                self.reconcile_soon()

    @property
    def preparing(self) -> str:
        """The weights id of the open order; empty without one."""
        opened = self._order
        return opened.order.weights.weights_id if opened else ""

    def prepare(self, order: Order) -> Prepared:
        """Stage and verify the weights of an order, and keep them ready.

        Weights on trial are not staged again, and stay on trial until the commit. A rollback does not wait: it cancels
        a staging, ends a trial, and discards an undecided order.

        Raises what `Model.stage` raises, StageCancelled if the order is discarded meanwhile, or was before it came, and
        StagingBusy if another order is open, or other weights are on trial.
        """
        began = time.perf_counter()
        if not order.is_rollback:
            self._check_free()  # at once: the turn may come only after a long staging
        with self._turn_at_once() if order.is_rollback else self._turn:
            self._check_not_discarded(order)
            if order.is_rollback and self._order is not None and not self._resolve(self._order):
                self._drop()
            self._check_free()
            resident, verified = self._prepare(order)
            return Prepared(time.perf_counter() - began, resident, verified)

    def _prepare(self, order: Order) -> tuple[bool, str]:
        """Prepare an order. Returns whether its weights were still in memory, and how they are verified."""
        if self._trial is not None and self._trial.is_of(order):
            opened = self._open(order)
            opened.staged, opened.is_on_trial = self._trial.staged, True
            return True, opened.staged.verified
        if order.is_rollback:
            self._end_trial()
        self._check_no_trial()
        opened = self._open(order)
        if order.is_rollback and order.weights.weights_id in (self._model.weights_id, self._model.previous_weights_id):
            return True, "none"
        try:
            opened.staged = self._weights.stage(order.source, order.weights, order.reader)
            self._weights.wait(
                opened.staged,
                lambda: self._is_discarded(order) or opened.lease.is_over or self._is_overtaken(order),
            )
        except BaseException:
            self._drop()
            raise
        opened.lease.renew()  # the staging may have taken long
        return False, opened.staged.verified

    def _open(self, order: Order) -> _OpenOrder:
        self._order = opened = _OpenOrder(order, _Lease(order.lease, self._clock))
        try:
            self._check_not_discarded(order)  # again, now that `discard` finds the order
        except StageCancelled:
            self._drop()
            raise
        return opened

    def _is_discarded(self, order: Order | TrialOrder) -> bool:
        return order.id in self._discarded

    def _check_not_discarded(self, order: Order | TrialOrder) -> None:
        """Raise StageCancelled if the order was discarded, before it came or while it waited for its turn."""
        if self._is_discarded(order):
            raise StageCancelled(f"{self._node}: {order.weights.weights_id[:SHOWN]} was discarded")

    def _is_overtaken(self, order: Order) -> bool:
        """Return True if the place was changed otherwise, such as by a hold or a rollback."""
        state = self._read()
        return state is not None and state.revision != order.revision and state.weights_id != order.weights.weights_id

    def _read(self) -> DesiredState | None:
        """Return the place's state, or None if it cannot be read."""
        try:
            return self._place.read()
        except WeightswapError:
            return None

    @contextmanager
    def _turn_at_once(self) -> Iterator[None]:
        """Take the turn, cancelling the stagings of others until it comes; those raise StageCancelled."""
        while not self._turn.acquire(timeout=_POLL):
            self._weights.interrupt()
        try:
            yield
        finally:
            self._turn.release()

    def _check_free(self) -> None:
        if not self.is_deployed:
            raise StagingBusy(
                f"{self._node}: its keeper was restarted, and no replica has sent it the deployment yet; try again"
            )
        if (opened := self._order) is not None:
            weights = opened.order.weights
            raise StagingBusy(
                f"{self._node}: has an open order{_by(weights)} for {weights.weights_id[:SHOWN]}; try again after it"
            )

    def _check_no_trial(self) -> None:
        if (trial := self._trial) is not None:
            weights = trial.order.weights
            raise StagingBusy(
                f"{self._node}: {weights.weights_id[:SHOWN]} is on trial{_by(weights)}; promote or abort it first"
            )

    def renew(self, change_id: str) -> bool:
        """Renew the lease of an order or a trial. Returns False if it is not open here."""
        for change in (self._order, self._trial):
            if change is not None and change.order.id == change_id:
                change.lease.renew()
                return True
        return False

    def commit(self, order_id: str, revision: int) -> Committed:
        """Commit the weights of an order, which was written to the place as a revision.

        Raises StageClosed if they are not prepared any more, whereupon the node follows the place by itself, and what
        `Staged.commit` raises.
        """
        with self._turn:
            opened = self._order
            if opened is None or opened.order.id != order_id:
                self.reconcile_soon()
                raise StageClosed(f"{self._node}: the order {order_id} is no longer prepared")
            return self._commit(opened, revision)

    def _commit(self, opened: _OpenOrder, revision: int) -> Committed:
        weights = opened.order.weights
        if opened.staged is not None:
            self._weights.commit(opened.staged, revision)
            self._trial = None  # a trial's weights are now served
        elif self._model.weights_id != weights.weights_id:
            self._weights.roll_back(weights, revision)
        at, generation = time.time(), self._model.generation
        assert generation is not None
        self._weights.mark(revision)  # of weights that were served already
        self._order = None
        self.reconcile_soon()
        return Committed(at, generation)

    def discard(self, order_id: str) -> None:
        """Discard an order that is open, is being staged, or has not come yet."""
        self._discarded.append(order_id)  # before the look for it: see `_open`
        opened = self._order
        if opened is not None and opened.order.id == order_id:
            if opened.staged is not None and not opened.is_on_trial:
                opened.staged.cancel_soon()  # a staging holds the turn
            with self._turn:
                if self._order is opened:
                    self._drop()

    def _drop(self) -> None:
        opened, self._order = self._order, None
        if opened is not None and opened.staged is not None and not opened.is_on_trial:
            opened.staged.discard()

    def prepare_trial(self, order: TrialOrder) -> Prepared:
        """Stage and verify the weights of a trial, which `continue_trial` starts.

        Raises what `prepare` raises, StageCancelled also if the lease runs out, and Unsupported for served weights.
        """
        began = time.perf_counter()
        self._check_free()
        with self._turn:
            self._check_not_discarded(order)
            self._check_free()
            self._check_no_trial()
            if self._model.weights_id in (None, order.weights.weights_id):
                raise Unsupported(
                    "a trial compares weights with the served ones, but this node serves none, or already serves these"
                )
            staged = self._weights.stage(order.source, order.weights, order.reader)
            self._trial = trial = _NodeTrial(order, staged, self._control, self._clock)
            try:
                self._check_not_discarded(order)  # again, now that `end_trial` finds the trial
                self._weights.wait(
                    staged, lambda: self._is_discarded(order) or trial.lease.is_over or self._desires_others()
                )
                trial.is_ready = True
            except BaseException:
                self._end_trial()
                raise
            return Prepared(time.perf_counter() - began, False, staged.verified)

    def _desires_others(self) -> bool:
        """Return True if the place desires other weights than at the last reconciliation."""
        before, state = self.reconciler.state, self._read()
        return before is not None and state is not None and state.weights_id != before.weights_id

    def continue_trial(self, trial_id: str, share: float) -> Measured:
        """Let the weights on trial answer a share of the requests, once they are staged. Does not wait for that.

        Returns the measures since the last call. Raises StageClosed if the trial is over.
        """
        trial = self._trial_of(trial_id)
        if not trial.is_ready:  # its staging holds the turn; calls that wait would use up the keeper's concurrency
            trial.lease.renew()
            return trial.measured()
        with self._turn:
            return self._trial_of(trial_id).renew(share)

    def _trial_of(self, trial_id: str) -> _NodeTrial:
        if (trial := self._trial) is None or trial.order.id != trial_id:
            raise StageClosed(f"{self._node}: the trial {trial_id} is over")
        return trial

    def end_trial(self, trial_id: str) -> None:
        """End a trial that is there, is being staged, or has not come yet."""
        self._discarded.append(trial_id)
        trial = self._trial
        if trial is not None and trial.order.id == trial_id:
            trial.staged.cancel_soon()
            with self._turn:
                if self._trial is trial:
                    self._end_trial()

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.end()

    def trial(self) -> TrialOrder | None:
        """Return the order of the current trial."""
        trial = self._trial
        return trial.order if trial is not None else None

    def add_measures(self, text: str) -> None:
        """Add a replica's measures of a trial."""
        if (trial := self._trial) is not None:
            trial.add(text)

    def reconcile_soon(self) -> None:
        """Wake the thread that follows the place."""
        self.wakeup.set()

    def reconcile(self) -> None:
        """Do what the place says, unless an order is open and undecided."""
        with self._turn:
            if not self.is_deployed or (self._order is not None and not self._resolve(self._order)):
                return
            if self._trial is not None and self._trial.lease.is_over:
                _log.warning("%s: the lease of the trial %s has expired", self._node, self._trial.order.id)
                self._end_trial()
            conditions = (self._weights.spec.since, fingerprint_of(self._model._store.admit))
            if conditions != self._last_conditions:
                self._last_conditions = conditions
                self.reconciler.forget_refusal()  # a new deployment, or new keys, may accept the weights
            self.reconciler.look(_Target(self))
            state = self.reconciler.state
            if state is not None and self.reconciler.reachable:
                self._weights.board.read = state.revision
                if state.weights_id == self._model.weights_id:
                    self._weights.mark(state.revision)

    def _resolve(self, opened: _OpenOrder) -> bool:
        """Do what the place says about an open order. Returns True if it is over.

        While the place cannot be read, the order stays open until its lease is over: it may have been decided.
        """
        state = self._read()
        if state is not None and state.revision != opened.order.revision:
            if state.weights_id == opened.order.weights.weights_id:
                with suppress(WeightswapError):  # the reconciler then stages the weights itself
                    self._commit(opened, state.revision)
                    return True
            self._drop()
        elif opened.lease.is_over:
            _log.warning("%s: the lease of the order %s has expired", self._node, opened.order.id)
            self._drop()
        return self._order is None

    def abandon(self) -> None:
        """Discard an open order, and end a trial."""
        with self._turn:
            self._drop()
            self._end_trial()


def _by(weights: DesiredWeights) -> str:
    return f" by {weights.by}" if weights.by else ""


class _Target:
    """The node's model, as the reconciler's target, within the turn."""

    def __init__(self, changes: NodeChanges) -> None:
        self._changes, self._weights = changes, changes._weights
        self._model = changes._model

    def check(self) -> None:
        if self._changes.stopped.is_set():
            raise StageCancelled("the keeper was stopped")

    def serves(self, weights_id: str) -> bool:
        return self._model.weights_id == weights_id

    @property
    def serves_nothing(self) -> bool:
        return self._model.weights_id is None

    def apply(self, path: str | Path, weights: DesiredWeights, is_wanted: Callable[[], bool]) -> None:
        trial = self._changes._trial
        if trial is not None and trial.order.weights.weights_id == weights.weights_id and is_wanted():
            self._weights.commit(trial.staged, self._revision_of(weights))
            self._changes._trial = None
            return
        self._changes._end_trial()  # whose weights are in the memory that is staged into
        if self._model.previous_weights_id == weights.weights_id:
            if is_wanted():
                self._weights.roll_back(weights, self._revision_of(weights))
            return
        with self._weights.stage(path, weights) as staged:
            self._weights.wait(staged, lambda: not is_wanted())
            self.check()
            if is_wanted():
                self._weights.commit(staged, self._revision_of(weights))

    def _revision_of(self, weights: DesiredWeights) -> int:
        """Return the place's revision, or 0 for earlier weights, served because the desired ones cannot be."""
        state = self._changes.reconciler.state
        return state.revision if state is not None and state.weights_id == weights.weights_id else 0

    def notify(self, kind: NoticeKind, source: str, error: BaseException) -> None:
        _log.warning("%s: %s: %s: %s", self._changes._node, kind, source, text_of(error))


class _Lease:
    """A lease that is over so many seconds after its last renewal."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self.renew()

    def renew(self) -> None:
        self._until = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until


@dataclass(eq=False)
class _OpenOrder:
    """An order whose weights are ready or being staged."""

    order: Order
    lease: _Lease
    staged: Staged | None = None  # None: the weights are still in memory, or nothing is staged yet
    is_on_trial: bool = False  # the staged weights belong to a trial, and are not discarded with the order


class _NodeTrial:
    """Staged weights that replicas call from `renew` on, until `end` or their commit."""

    def __init__(self, order: TrialOrder, staged: Staged, control: Control, clock: Callable[[], float]) -> None:
        self.order, self.staged = order, staged
        self.lease = _Lease(order.lease, clock)
        self.is_ready = False  # the weights are staged
        self._control = control
        self._judgement = Judgement(order.plan.judged)
        self._share: float | None = None
        self._word = 0  # by which replicas and their measures name this trial

    def is_of(self, order: Order) -> bool:
        """True if an order is of the weights on trial, from the same source, which will be the desired one.

        From another source they are staged again: nobody has verified it, but later nodes would have to start with it.
        """
        return (self.order.weights.weights_id, self.order.source) == (order.weights.weights_id, order.source)

    def renew(self, share: float) -> Measured:
        """Continue with a share of the requests, and return the replicas' measures since the last call.

        Raises StageClosed if the weights were committed or discarded.
        """
        if share != self._share:
            terms = self.order.plan.judged._replace(share=share, promote_if="", abort_if="")  # the leader alone judges
            self._word = begin_trial(self._control, self.staged, msgspec.msgpack.encode(terms))
            self._share = share
        self.lease.renew()
        return self.measured()

    def measured(self) -> Measured:
        """Return the replicas' measures since the last call."""
        return self._judgement.take()

    def add(self, text: str) -> None:
        """Add a replica's measures. Those of an earlier trial are ignored."""
        measures = read_measures(text)
        if measures.trial == self._word:
            self._judgement.add(measures.measured)

    def end(self) -> None:
        """End the calls of the weights, and discard them."""
        self._control.end_trial()
        self.staged.discard()


class _NodePlace(DesiredPlace):
    """A place that knows the time since its last read, even while a read hangs, as on a network file system."""

    def __init__(self, place: Source, clock: Callable[[], float]) -> None:
        super().__init__(place)
        self._clock = clock
        self._read_at = clock()

    def read(self, check: Check | None = None) -> DesiredState:
        state = super().read(check)
        self._read_at = self._clock()
        return state

    @property
    def unread(self) -> float:
        """Seconds since the last read."""
        return self._clock() - self._read_at

    def silence(self, interval: float) -> str:
        """Return a sentence if the last read is too long ago, else "". interval: seconds between two reads."""
        most = max(_SILENT, 3 * interval)
        return f"{self.where}: has not been read for more than {most:g} s" if self.unread > most else ""
