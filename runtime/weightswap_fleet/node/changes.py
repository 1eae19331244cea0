"""A node's part in the changes of a fleet: changes of a coordinator, trials, and what the desired store wants, one at a
time.

The desired store alone records what was decided. A coordinator may die at any time, and a message may be lost, or come
late. So a node that has prepared a change waits for `commit` or `discard`, but also learns from the desired store how
the change ended: in `reconcile`, once the desired store has another revision, or the change's lease is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from weightswap_fleet.documents import DeploymentSpec, NodeReceipt, PrepareRequest
from weightswap_runtime.errors import (
    DesiredError,
    StageCancelled,
    StageClosed,
    StagingBusy,
    Unsupported,
    WeightswapError,
    text_of,
)
from weightswap_runtime.following.controller import Change, Controller, Lease, NoticeKind
from weightswap_runtime.following.desired_state import SHOWN, DesiredState, DesiredWeights
from weightswap_runtime.following.desired_store import DesiredStore
from weightswap_runtime.following.document_storage import Source
from weightswap_runtime.following.reconciler import Reconciler
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import fingerprint_of
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import begin_trial
from weightswap_runtime.sources.byte_source import Check
from weightswap_server.canary import CanaryAnalysis, Measured
from weightswap_server.workers.trials import read_measures

from .memory import NodeWeights
from .relay import begun

_READ = 10.0  # seconds for a read of the desired store, which others wait for
_SILENT = 30.0  # seconds without a read of the desired store, after which a node reports it
_log = logging.getLogger("weightswap.fleet")


class NodeChanges:
    """The changes of one node. Thread-safe: whatever stages or commits has the turn.

    What must not wait for a staging (`renew`, `discard`, what the node's status says, and the refusal of a
    second change) does without.
    """

    def __init__(
        self, weights: NodeWeights, control: Control | None, clock: Callable[[], float], is_deployed: bool
    ) -> None:
        """control: the page on which trials are announced to replicas; None: there are no trials. is_deployed: the
        deployment is known; without it nothing changes."""
        self._weights, self._control, self._clock = weights, control, clock
        self._node, self._model = weights.node, weights.model
        self._desired_store = _NodeDesiredStore(weights.spec.desired_store, clock)
        # what is served may be newer than the last document read here: a coordinator, or the agent before, has read it
        self.reconciler = Reconciler(self._desired_store, weights.spec.interval, clock, least=lambda: weights.revision)
        self.is_deployed = is_deployed
        self.wakeup = threading.Event()  # of the thread that follows the desired store
        self.stopped = threading.Event()
        self._changes = _NodeController(self)
        self._last_conditions: Hashable = None  # of the last reconciliation
        self._deploying = threading.Lock()  # not the turn: a starting replica must not wait for a staging

    def deploy(self, spec: DeploymentSpec) -> None:
        """Adopt a deployment if it is the latest. If it refuses other weights than the one before, what that has
        verified and is not served yet is given up."""
        with self._deploying:
            if spec.since > self._weights.spec.since:
                before = self._weights.spec
                self._weights.deploy(spec)
                if spec.admission != before.admission:  # else a promotion would commit what this one refuses
                    self._give_up()
                self._changes.interval = spec.interval
                self.reconcile_soon()
            if not self.is_deployed:
                self.is_deployed = True
                self.reconcile_soon()

    def _give_up(self) -> None:
        """Give up the change and the trial that are open, also while they are staged."""
        for change in (self._requested, self._trial):
            if change is not None:
                self.discard(change.id)

    @property
    def preparing(self) -> str:
        """The weights id of the open change; empty without one."""
        opened = self._requested
        return opened.weights_id if opened else ""

    @property
    def _requested(self) -> _RequestedChange | None:
        return next((change for change in self._changes.open if isinstance(change, _RequestedChange)), None)

    @property
    def _trial(self) -> _NodeTrial | None:
        return next((change for change in self._changes.open if isinstance(change, _NodeTrial)), None)

    def prepare(self, request: PrepareRequest) -> NodeReceipt:
        """Stage and verify the weights of a change, and keep them ready.

        Weights on trial are not staged again, and stay on trial until the commit. A rollback does not wait: it cancels
        a staging, ends a trial, and discards an undecided change.

        Raises what `Model.stage` raises, StageCancelled if the change is discarded meanwhile, or was before it came,
        StagingBusy if another change is open, or other weights are on trial, and DesiredError if the desired store
        went back to an older document.
        """
        began = time.perf_counter()
        if not request.is_rollback:
            self._check_free()  # at once: the turn may come only after a long staging
        with self._changes.turn(partial(self._check_awaited, request)):
            opened = self._open(request)
            opened.lease.renew()  # the staging may have taken long
            resident = opened.staged is None or opened.is_borrowed
            verified = opened.staged.verified if opened.staged is not None else "none"
            return NodeReceipt(time.perf_counter() - began, resident, verified)

    def _check_awaited(self, request: PrepareRequest) -> None:
        """Called while a request waits for the turn. Raises StageCancelled if its coordinator has given it up: each one
        that waits takes one of the agent's threads, without which no rollback gets in."""
        self._changes.check()
        self._changes.check_not_discarded(_NodeChange(request, self._node, self._clock))
        if request.is_rollback:
            self._changes.interrupt()

    def _open(self, request: PrepareRequest) -> _RequestedChange:
        trial = self._trial if self._trial is not None and self._trial.is_of(request) else None
        opened = _RequestedChange(request, self._node, self._clock, trial.staged if trial is not None else None)
        self._changes.check_not_discarded(opened)
        self._check_not_older(request)
        if request.is_rollback:
            self._make_way(keep=trial)
        self._check_free()
        weights_id = opened.weights_id
        in_memory = request.is_rollback and (weights_id == self._model.weights_id or self._weights.keeps(weights_id))
        if trial is not None:
            trial.weights.check_admitted()  # here, where all nodes can still refuse
        if trial is not None or in_memory:
            return self._changes.prepare(opened)
        begin = partial(self._weights.stage, request.source, request.weights, request.reader)
        return self._changes.prepare(opened, begin, lambda: not self._is_overtaken(request))

    def _check_not_older(self, request: PrepareRequest) -> None:
        """Raise DesiredError if the desired store went back to an older document, on which the change is based.

        Its next revision would stand for other weights than those that clients have seen, or for earlier ones.
        """
        read = self.reconciler.state
        known = max(read.revision if read is not None else 0, self._weights.revision)
        if request.revision < known and (state := self._read()) is not None:  # or it was only overtaken
            self.reconciler.check_not_older(state.revision, known)

    def _make_way(self, keep: _NodeTrial | None) -> None:
        """End what a rollback does not wait for: a change, unless it was decided, and a trial."""
        if (opened := self._requested) is not None and not self._resolve(opened):
            self._changes.drop(opened)
        if (trial := self._trial) is not None and trial is not keep:
            self._changes.drop(trial)

    def _is_overtaken(self, request: PrepareRequest) -> bool:
        """Return True if the desired store was changed otherwise, such as by a hold or a rollback."""
        state = self._read()
        return (
            state is not None and state.revision > request.revision and state.weights_id != request.weights.weights_id
        )

    def _read(self) -> DesiredState | None:
        """Return the desired store's state, or None if it cannot be read."""
        try:
            return self._desired_store.read()
        except WeightswapError:
            return None

    def _check_free(self) -> None:
        if not self.is_deployed:
            raise StagingBusy(
                f"{self._node}: its agent was restarted, and no replica has sent it the deployment yet; try again"
            )
        if (opened := self._requested) is not None:
            raise StagingBusy(opened.busy)

    def renew(self, change_id: str) -> bool:
        """Renew the lease of a change or a trial. Returns False if it is not open here."""
        if (change := self._changes.find(change_id)) is None:
            return False
        change.lease.renew()
        return True

    def commit(self, change_id: str, revision: int) -> tuple[float, int]:
        """Commit the weights of a change, which was written to the desired store as a revision.

        Returns the time of the commit, in seconds since the epoch, and the generation.

        Raises StageClosed if they are not prepared any more, whereupon the node follows the desired store by itself,
        and what `Staged.commit` raises.
        """
        with self._changes.turn():
            opened = self._requested
            if opened is None or opened.request.id != change_id:
                self.reconcile_soon()
                raise StageClosed(f"{self._node}: the change {change_id} is no longer prepared")
            return self._commit(opened, revision)

    def _commit(self, opened: _RequestedChange, revision: int) -> tuple[float, int]:
        self._changes.commit(opened, partial(self._weights.mark_next, revision))
        at, generation = time.time(), self._model.generation
        assert generation is not None
        self._weights.mark(revision)  # of weights that were served already
        self.reconcile_soon()
        return at, generation

    def discard(self, change_id: str) -> None:
        """Discard a change, or end a trial, that is there, is being staged, or has not come yet."""
        self._changes.discard(change_id)

    def prepare_trial(self, request: PrepareRequest) -> NodeReceipt:
        """Stage and verify the weights of a trial, which `continue_trial` starts.

        Raises what `prepare` raises, StageCancelled also if the lease runs out, and Unsupported for served weights.
        """
        began = time.perf_counter()
        if (control := self._control) is None:
            raise Unsupported(f"{self._node}: has its model on several ranks, on which weights cannot be on trial")
        self._check_free()
        with self._changes.turn(partial(self._check_awaited, request)):
            self._check_free()
            if self._model.weights_id in (None, request.weights.weights_id):
                raise Unsupported(
                    "a trial compares weights with the served ones, but this node serves none, or already serves these"
                )
            begin = partial(self._weights.stage, request.source, request.weights, request.reader)
            trial = _NodeTrial(request, self._node, self._clock, control)
            self._changes.prepare(trial, begin, lambda: not self._desires_others())
            return NodeReceipt(time.perf_counter() - began, False, trial.weights.verified)

    def _desires_others(self) -> bool:
        """Return True if the desired store wants other weights than at the last reconciliation."""
        before, state = self.reconciler.state, self._read()
        return before is not None and state is not None and state.weights_id != before.weights_id

    def continue_trial(self, trial_id: str, share: float) -> Measured:
        """Let the weights on trial answer a share of the requests, once they are staged. Does not wait for that.

        Returns the measures since the last call. Raises StageClosed if the trial is over.
        """
        trial = self._trial_of(trial_id)
        if trial.phase == "staging":  # it holds the turn; calls that wait would use up the agent's concurrency
            trial.lease.renew()
            return trial.measured()
        with self._changes.turn(), self._changes.ready(trial):
            return trial.renew(share)

    def _trial_of(self, trial_id: str) -> _NodeTrial:
        if (trial := self._trial) is None or trial.request.id != trial_id:
            raise StageClosed(f"{self._node}: the trial {trial_id} is over")
        return trial

    def trial(self) -> tuple[PrepareRequest, bool] | None:
        """Return the request of the current trial, and whether it answers requests, so that all nodes were ready."""
        trial = self._trial
        return (trial.request, trial.has_begun) if trial is not None else None

    def add_measures(self, text: str) -> None:
        """Add a replica's measures of a trial."""
        if (trial := self._trial) is not None:
            trial.add(text)

    def reconcile_soon(self) -> None:
        """Wake the thread that follows the desired store."""
        self.wakeup.set()

    def reconcile(self) -> None:
        """Do what the desired store says, unless a change is open and undecided."""
        with self._changes.turn():
            opened, trial = self._requested, self._trial
            if not self.is_deployed or (opened is not None and not self._resolve(opened)):
                return
            if trial is not None and trial.lease.is_over:
                _log.warning("%s: the lease of the trial %s has expired", self._node, trial.id)
                self._changes.drop(trial)
            conditions = (self._weights.spec.since, fingerprint_of(self._model._store.admit))
            if conditions != self._last_conditions:
                self._last_conditions = conditions
                self.reconciler.forget_refusal()  # a new deployment, or new keys, may accept the weights
            self.reconciler.poll(self._changes)
            state = self.reconciler.state
            if state is not None and self.reconciler.reachable and state.weights_id == self._model.weights_id:
                self._weights.mark(state.revision)

    def _resolve(self, opened: _RequestedChange) -> bool:
        """Do what the desired store says about an open change. Returns True if it is over.

        While the desired store cannot be read, the change stays open until its lease is over: it may have been decided.
        """
        state = self._read()
        # an older document, as from a cache, says nothing: the same weights in it may be those of long ago
        if state is not None and state.revision > opened.request.revision:
            if state.weights_id == opened.request.weights.weights_id:
                with suppress(WeightswapError):  # the reconciler then stages the weights itself
                    self._commit(opened, state.revision)
                    return True
            self._changes.drop(opened)
        elif opened.lease.is_over:
            _log.warning("%s: the lease of the change %s has expired", self._node, opened.id)
            self._changes.drop(opened)
        return opened.phase == "over"


class _NodeController(Controller):
    """The controller of a node's changes, which the reconciler has serve what the desired store says."""

    def __init__(self, changes: NodeChanges) -> None:
        model = changes._model
        super().__init__(model._store, model._member, interval=changes._weights.spec.interval)
        self._changes, self._weights = changes, changes._weights

    def check(self) -> None:
        if self._changes.stopped.is_set():
            raise StageCancelled("the agent was stopped")

    def begin(self, path: str | Path, weights: DesiredWeights) -> Staged:
        return self._weights.stage(path, weights)

    def apply(
        self,
        path: str | Path,
        weights: DesiredWeights,
        is_wanted: Callable[[], bool],
        record: Callable[[], object] | None = None,
    ) -> None:
        record = record or (lambda: self._weights.mark_next(self._revision_of(weights)))
        trial = self._changes._trial
        if trial is not None and trial.weights_id == weights.weights_id and is_wanted():
            self.commit(trial, record)
            return
        if trial is not None:
            self.drop(trial)  # its weights are in the memory that is staged into
        super().apply(path, weights, is_wanted, record)

    def keeps(self, weights_id: str) -> bool:
        return self._weights.keeps(weights_id)

    def _await(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        super()._await(staged, is_wanted)
        self._weights.complete(staged, is_wanted)

    def _revision_of(self, weights: DesiredWeights) -> int:
        """Return the desired store's revision, or 0 for earlier weights, served because the desired ones cannot be."""
        state = self._changes.reconciler.state
        return state.revision if state is not None and state.weights_id == weights.weights_id else 0

    def notify(self, kind: NoticeKind, source: str, error: BaseException) -> None:
        _log.warning("%s: %s: %s: %s", self._weights.node, kind, source, text_of(error))


class _NodeChange(Change):
    """A change or a trial whose weights are ready or being staged."""

    def __init__(
        self,
        request: PrepareRequest,
        node: str,
        clock: Callable[[], float],
        staged: Staged | None = None,
    ) -> None:
        weights, lease = request.weights, Lease(request.lease, clock)
        super().__init__(weights.weights_id, id=request.id, by=weights.by, lease=lease, staged=staged)
        self.request = request
        self._node, self._by = node, f" by {weights.by}" if weights.by else ""

    def __str__(self) -> str:
        return f"{self._node}: {self.weights_id[:SHOWN]}"


class _RequestedChange(_NodeChange):
    """A change; its weights are those of a trial, in memory, or staged for it."""

    @property
    def busy(self) -> str:
        return f"{self._node}: has an open change{self._by} for {self.weights_id[:SHOWN]}; try again after it"


class _NodeTrial(_NodeChange):
    """Staged weights that replicas call from `renew` on, until it is over."""

    def __init__(self, request: PrepareRequest, node: str, clock: Callable[[], float], control: Control) -> None:
        super().__init__(request, node, clock)
        self._control = control
        self._analysis = CanaryAnalysis(request.plan.canary_plan)
        self._share: float | None = None
        self._word = 0  # by which replicas and their measures name this trial

    @property
    def busy(self) -> str:
        return f"{self} is on trial{self._by}; promote or abort it first"

    def is_of(self, request: PrepareRequest) -> bool:
        """True if a change is of the weights on trial, from the same source, which will be the desired one.

        From another source they are staged again: nobody has verified it, but later nodes would have to start with it.
        """
        return (self.weights_id, self.request.source) == (request.weights.weights_id, request.source)

    @property
    def has_begun(self) -> bool:
        return self._share is not None

    def renew(self, share: float) -> Measured:
        """Continue with a share of the requests, and return the replicas' measures since the last call.

        Raises StageClosed if the weights were committed or discarded.
        """
        if share != self._share:
            # the leader alone judges
            terms = self.request.plan.canary_plan._replace(share=share, promote_if="", abort_if="")
            self._word = begin_trial(self._control, self.weights, msgspec.msgpack.encode(terms))
            self._share = share
        self.lease.renew()
        return self.measured()

    def measured(self) -> Measured:
        """Return the replicas' measures since the last call."""
        return self._analysis.drain()

    def add(self, text: str) -> None:
        """Add a replica's measures. Those of an earlier trial are ignored."""
        measures = read_measures(text)
        if measures.trial == self._word:
            self._analysis.add(measures.measured)

    def ended(self) -> None:
        self._control.end_trial()


class _NodeDesiredStore(DesiredStore):
    """A desired store of which a read may hang, as on a network file system: whoever reads has the turn, for which
    changes of the whole fleet wait."""

    def __init__(self, desired_store: Source, clock: Callable[[], float]) -> None:
        super().__init__(desired_store)
        self._clock = clock
        self._read_at = clock()
        self._hanging: Future[DesiredState] | None = None

    def read(self, check: Check | None = None) -> DesiredState:
        """Read it. Raises DesiredError if that takes longer than _READ, and at once as long as that read hangs."""
        if self._hanging is None or self._hanging.done():
            reading = begun(partial(super().read, check))
            if wait([reading], _READ).done:
                state = reading.result()
                self._read_at = self._clock()
                return state
            self._hanging = reading
        raise DesiredError(f"{self.where}: a read of it has not ended within {_READ:g} s")

    @property
    def unread(self) -> float:
        """Seconds since the last read."""
        return self._clock() - self._read_at

    def silence(self, interval: float) -> str:
        """Return a sentence if the last read is too long ago, else "". interval: seconds between two reads."""
        most = max(_SILENT, 3 * interval)
        return f"{self.where}: has not been read for more than {most:g} s" if self.unread > most else ""
