"""A node's keeper: it has the memory that the node's replicas serve, and takes part in the fleet's changes.

What a fleet has decided is in its place, and nowhere else. A keeper that was told of an order holds the weights ready,
and commits them when it is told to, or when it reads in the place that they are desired; without an order it does what
the place says. So whoever has given an order may die at any moment.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightswap_runtime.desired.document import SHOWN, DesiredState, DesiredWeights
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.errors import (
    NothingToRollBack,
    NoWeights,
    StageCancelled,
    StageClosed,
    StagingBusy,
    Unsupported,
    WeightswapError,
    text_of,
)
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.watching.intake import Told
from weightswap_runtime.live.watching.reconciler import Reconciler
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.keeper import keep
from weightswap_server.canary.judging import Measured
from weightswap_server.signed_weights import requires

from .documents import Committed, NodeStatus, Order, Prepared, Seat, Spec, TrialOrder
from .memory import NodeMemory
from .metrics import NodeMetrics
from .node_trial import NodeTrial
from .relay import Relay, Transfer
from .seats import Seats

MOST_REPLICAS = 64  # of one node
_POLL = 0.01
_log = logging.getLogger("weightswap.fleet")


class NodeKeeper:
    """The keeper of a node. Every method may be called from any thread; `close` ends it."""

    def __init__(
        self,
        spec: Spec,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        transfer: Transfer | None = None,
    ) -> None:
        """Serves what the place says before anybody can take a seat, if that can be served; `start` keeps it so.

        node: its name, which no other has. transfer: how weights go from node to node; None: each reads for
        itself. Memory that replicas of an earlier keeper of the name have is served on.
        Raises ArtifactError, MissingExtra, OutOfMemory and Unsupported.
        """
        self.spec, self.node = spec, node
        artifact = Artifact.open(spec.artifact)
        name = memory_name(spec, node)
        weights = artifact.manifest.weights
        self._memory = NodeMemory.adopt(name) or NodeMemory.create(weights, MOST_REPLICAS, name)
        self._board = self._memory.board
        self.model = keep(artifact, self._memory.segment)
        self._take(spec)
        self._control = Control(self._memory.segment.control)
        self._seats = Seats(self._control, lambda pid: NodeMemory.is_held_by(pid, name))
        self._relay = Relay(node, transfer) if transfer is not None else None
        self._metrics = NodeMetrics(spec.model, self.model)
        self._place = DesiredPlace(spec.place)
        self._reconciler = Reconciler(self._place, spec.interval, clock)
        self._clock = clock
        self._order: _OpenOrder | None = None
        self._trial: NodeTrial | None = None
        self._staging: Staged | None = None  # what is waited for
        self._turn = threading.RLock()  # one change at a time: an order's, or what a look finds
        self._stopped = threading.Event()
        self._bell = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightswap-keeper", daemon=True)
        self.look()

    def start(self) -> None:
        """Look at the place from now on, in a thread."""
        self._thread.start()

    def take_seat(self, pid: int, spec: Spec) -> Seat:
        """A slot for a replica of this node, whose deployment counts if it is the latest.

        Raises Unsupported, and NoWeights where it would have nothing to serve.
        """
        with self._turn:
            if spec.since > self.spec.since:
                self._take(spec)
        if self.model.weights_id is None:
            raise NoWeights(self._error or f"{self.spec.place}: no weights are desired yet")
        return Seat(os.getpid(), self._memory.descriptors, self._seats.take(pid))

    def _take(self, spec: Spec) -> None:
        """Verify as a deployment says; what is served already, it serves on."""
        key = spec.require_signature
        self.model._store.admit = requires(key) if key is not None else None
        self.spec = spec

    def prepare(self, order: Order) -> Prepared:
        """Stage and verify the weights of an order, and keep them ready.

        What is on trial is not staged again, and stays on trial until the commit. A rollback waits for nothing: what is
        being staged or is on trial, and an order that is not decided, are given up.

        Raises what `Model.stage` raises, StageCancelled where the order is given up meanwhile, and StagingBusy where
        another is open, or other weights are on trial.
        """
        began = time.perf_counter()
        if not order.proven:
            self._check_free()
        with self._turn_at_once() if order.proven else self._turn:
            if order.proven and self._order is not None and not self._settle(self._order):
                self._drop()
            self._check_free()
            return self._prepare(order, began)

    def _prepare(self, order: Order, began: float) -> Prepared:
        wanted = order.weights.weights_id
        if self._trial is not None and self._trial.order.weights.weights_id == wanted:
            self._order = opening = _OpenOrder(order, self._clock)
            opening.staged, opening.is_on_trial = self._trial.staged, True
            return Prepared(time.perf_counter() - began, True, opening.staged.verified)
        if order.proven:
            self._end_trial()
        self._check_no_trial()
        self._order = opening = _OpenOrder(order, self._clock)
        if order.proven and wanted in {self.model.weights_id, self.model.previous_weights_id}:
            return Prepared(time.perf_counter() - began, True, "none")
        try:
            opening.staged = self._stage(order.source, order.weights, order.reader)
            self._wait(opening.staged)
        except BaseException:
            self._order = None
            raise
        opening.renew()  # it may have taken long
        return Prepared(time.perf_counter() - began, False, opening.staged.verified)

    def _check_free(self) -> None:
        if (opened := self._order) is not None:
            by = f" by {opened.order.weights.by}" if opened.order.weights.by else ""
            raise StagingBusy(
                f"{self.node}: has an order{by} open, for {opened.order.weights.weights_id[:12]}; try again when it is "
                "over"
            )

    def _check_no_trial(self) -> None:
        if (trial := self._trial) is not None:
            weights = trial.order.weights
            raise StagingBusy(
                f"{self.node}: {weights.weights_id[:SHOWN]} is on trial{f' by {weights.by}' if weights.by else ''}; "
                "promote or abort it first"
            )

    def renew(self, order_id: str) -> None:
        """An order is still meant, as others take longer."""
        opened = self._order
        if opened is not None and opened.order.id == order_id:
            opened.renew()

    def prepare_trial(self, order: TrialOrder) -> Prepared:
        """Stage and verify what is to be tried; `renew_trial` begins it. Raises what `prepare` raises, and Unsupported
        for what is served."""
        began = time.perf_counter()
        self._check_free()
        with self._turn:
            self._check_free()
            self._check_no_trial()
            if self.model.weights_id in (None, order.weights.weights_id):
                raise Unsupported(f"{self.node}: serves these weights, or none, with which a trial could be compared")
            staged = self._stage(order.source, order.weights, order.reader)
            self._trial = NodeTrial(order, staged, self._control, self._clock)
            try:
                self._wait(staged)
                self._trial.keep()  # it may have taken long
            except BaseException:
                self._trial = None
                raise
            return Prepared(time.perf_counter() - began, False, staged.verified)

    def renew_trial(self, trial_id: str, share: float) -> Measured:
        """Let a share of the requests be answered by what is on trial; what was measured since the last time.

        Raises StageClosed where that trial is over.
        """
        with self._turn:
            if self._trial is None or self._trial.order.id != trial_id:
                raise StageClosed(f"{self.node}: the trial {trial_id} is over")
            return self._trial.renew(share)

    def end_trial(self, trial_id: str) -> None:
        """Give a trial up, if it is the one that there is; also while it is being staged."""
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
        """What is on trial here."""
        trial = self._trial
        return trial.order if trial is not None else None

    def tried(self, text: str) -> None:
        """A replica has said what it has measured of a trial."""
        if (trial := self._trial) is not None:
            trial.heard(text)

    def told(self, pid: int, text: str) -> None:
        """A replica of this node has said what it has counted, as Prometheus reads it."""
        if pid in self._seats.processes:
            self._metrics.tell(pid, text)

    def metrics(self) -> str:
        """What was counted on this node."""
        return self._metrics.text()

    @contextmanager
    def _turn_at_once(self) -> Iterator[None]:
        """The turn; what others stage until it comes is given up, and whoever waits for that gets StageCancelled."""
        while not self._turn.acquire(timeout=_POLL):
            if (staging := self._staging) is not None:
                staging.cancel_soon()
        try:
            yield
        finally:
            self._turn.release()

    def _wait(self, staged: Staged) -> None:
        """Until it is staged. Raises StageCancelled where a rollback comes first."""
        self._staging = staged
        try:
            staged.wait()
        finally:
            self._staging = None

    def relayed(self, method: str, *arguments: Any) -> Any:
        """What this node's part of the relay returns."""
        return getattr(self._relay, method)(*arguments)

    def _stage(self, path: str | Path, weights: DesiredWeights, reader: str = "") -> Staged:
        if self._relay is not None and self.spec.relay and isinstance(path, str):
            path = self._relay.route(path, reader)
        return self.model.stage(
            path,
            expect=weights.weights_id,
            allow_other_graph=weights.graph_id not in ("", self.spec.graph_id),
            verify=self.spec.verify,  # type: ignore[arg-type]
            allow_nonfinite=self.spec.allow_nonfinite,
            by=weights.by,
            background=True,
        )

    def discard(self, order_id: str) -> None:
        """Give an order up, if it is the one that is open; also while it is being staged."""
        opened = self._order
        if opened is not None and opened.order.id == order_id:
            if opened.staged is not None and not opened.is_on_trial:
                opened.staged.cancel_soon()
            with self._turn:
                if self._order is opened:
                    self._drop()

    def _drop(self) -> None:
        opened, self._order = self._order, None
        if opened is not None and opened.staged is not None and not opened.is_on_trial:
            opened.staged.discard()

    def commit(self, order_id: str, revision: int) -> Committed:
        """Serve what was prepared for an order, which was decided as a revision of the place.

        Raises StageClosed where it is not prepared any more (what the place says is done all the same, by itself), and
        what `Staged.commit` raises.
        """
        with self._turn:
            opened = self._order
            if opened is None or opened.order.id != order_id:
                self.look_soon()
                raise StageClosed(f"{self.node}: the order {order_id} is not prepared any more")
            return self._commit(opened, revision)

    def _commit(self, opened: _OpenOrder, revision: int) -> Committed:
        weights, seconds = opened.order.weights, 0.0
        if opened.staged is not None:
            self._mark_next(revision)
            seconds = opened.staged.commit().seconds_paused
            self._trial = None  # its weights are served, or there was none
        elif self.model.weights_id != weights.weights_id:
            seconds = self._roll_back(weights, revision).seconds_paused
        at, generation = time.time(), self.model.generation
        assert generation is not None
        self._mark(revision)
        self._order = None
        self.look_soon()
        return Committed(at, generation, seconds)

    def _roll_back(self, weights: DesiredWeights, revision: int) -> SwapReceipt:
        if self.model.previous_weights_id != weights.weights_id:
            raise NothingToRollBack(f"{self.node}: the weights {weights.weights_id[:12]} are not in memory any more")
        self._mark_next(revision)
        return self.model.rollback(by=weights.by)

    def _mark_next(self, revision: int) -> None:
        """Before a commit, so that no replica answers with weights and an older revision."""
        generation = self.model.generation
        self._board.set_revision(0 if generation is None else generation + 1, revision)

    def _mark(self, revision: int) -> None:
        """What is served is that of a revision, too."""
        generation = self.model.generation
        if generation is not None and self._board.revision(generation) < revision:
            self._board.set_revision(generation, revision)

    def look_soon(self) -> None:
        """Look at the place now, and not only after the interval."""
        self._bell.set()

    def status(self) -> NodeStatus:
        """How it stands."""
        state, opened, trial = self._reconciler.state, self._order, self._trial
        return NodeStatus(
            node=self.node,
            spec=self.spec,
            keeper=os.getpid(),
            weights_id=self.model.weights_id,
            generation=self.model.generation,
            revision=self._board.revision(self.model.generation),
            since=self.model.history[-1].committed_at if self.model.history else None,
            read=state.revision if state else 0,
            reachable=self._reconciler.reachable,
            preparing=opened.order.weights.weights_id if opened else "",
            trying=trial.order.weights.weights_id if trial else "",
            replicas=self._seats.processes,
            error=self._error,
        )

    @property
    def _error(self) -> str:
        error = self._reconciler.last_error
        return text_of(error) if error is not None else ""

    def close(self) -> None:
        """End. Replicas serve on what they have."""
        self._stopped.set()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._turn:
            self._drop()
            self._end_trial()
        self._metrics.close()
        self.model.close()
        self._seats.close()
        self._memory.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._bell.wait(self.spec.interval)
            self._bell.clear()
            self._seats.sweep()
            self._metrics.keep(self._seats.processes)
            if self._relay is not None:
                self._relay.sweep(time.monotonic())
            try:
                self.look()
            except Exception:
                _log.exception("%s: a look at %s failed", self.node, self.spec.place)

    def look(self) -> None:
        """Do what the place says; an order that is open waits for its end."""
        with self._turn:
            if self._order is not None and not self._settle(self._order):
                return
            if self._trial is not None and self._trial.is_over:
                _log.warning("%s: nothing more was heard of the trial %s", self.node, self._trial.order.id)
                self._end_trial()
            self._reconciler.look(_Target(self))
            state = self._reconciler.state
            if state is not None and self._reconciler.reachable:
                self._board.read = state.revision
                if state.weights is not None and state.weights.weights_id == self.model.weights_id:
                    self._mark(state.revision)

    def _settle(self, opened: _OpenOrder) -> bool:
        """Do what the place says of an order that is open. Whether it is over."""
        try:
            state = self._place.read()
        except WeightswapError:
            state = None
        if state is not None and state.revision != opened.order.revision:
            if decided(state, opened.order):
                with suppress(WeightswapError):  # the look that follows tries it in its own way
                    self._commit(opened, state.revision)
                    return True
            self._drop()
        elif opened.is_over:
            _log.warning("%s: nothing more was heard of the order %s", self.node, opened.order.id)
            self._drop()
        return self._order is None


def decided(state: DesiredState, order: Order) -> bool:
    """Whether a place that has gone on says what an order wants."""
    return state.weights is not None and state.weights.weights_id == order.weights.weights_id


def memory_name(spec: Spec, node: str) -> str:
    """By which a node's memory is found again."""
    return f"weightswap.{spec.fleet}.{spec.key}.{node}"


class _OpenOrder:
    """An order that this node is ready for, or will be; `staged` where the weights were not in memory."""

    def __init__(self, order: Order, clock: Callable[[], float]) -> None:
        self.order, self._clock = order, clock
        self.staged: Staged | None = None
        self.is_on_trial = False  # what is staged, which then stays where the order is given up
        self.renew()

    def renew(self) -> None:
        self._until = self._clock() + self.order.lease

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until


class _Target:
    """The node's model, as the reconciler keeps it at what is desired."""

    def __init__(self, keeper: NodeKeeper) -> None:
        self._keeper, self._model = keeper, keeper.model

    def check(self) -> None:
        if self._keeper._stopped.is_set():
            raise StageCancelled("the keeper was stopped")

    def serves(self, weights_id: str) -> bool:
        return self._model.weights_id == weights_id

    @property
    def serves_nothing(self) -> bool:
        return self._model.weights_id is None

    def put(self, path: str | Path, weights: DesiredWeights, is_wanted: Callable[[], bool]) -> None:
        keeper = self._keeper
        if keeper._trial is not None:
            if keeper._trial.order.weights.weights_id == weights.weights_id and is_wanted():
                keeper._mark_next(self._revision)
                keeper._trial.staged.commit()
                keeper._trial = None
                return
            keeper._end_trial()
        if self._model.previous_weights_id == weights.weights_id:
            if is_wanted():
                keeper._roll_back(weights, self._revision)
            return
        with keeper._stage(path, weights) as staged:
            keeper._wait(staged)
            self.check()
            if is_wanted():
                keeper._mark_next(self._revision)
                staged.commit()

    @property
    def _revision(self) -> int:
        state = self._keeper._reconciler.state
        return state.revision if state is not None else 0

    def tell(self, kind: Told, source: str, error: BaseException) -> None:
        _log.warning("%s: %s: %s: %s", self._keeper.node, kind, source, text_of(error))
