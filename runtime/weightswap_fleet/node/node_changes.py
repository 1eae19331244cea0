"""Changes of a node's weights: orders of all nodes, what is tried first, and what the place says.

A node that was told of an order holds the weights ready, and commits them when it is told to, or when it reads in the
place that they are desired; without an order it does what the place says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weightswap_fleet.documents import Committed, Order, Prepared, Spec, TrialOrder
from weightswap_runtime.desired.document import SHOWN, DesiredState, DesiredWeights
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.errors import StageCancelled, StageClosed, StagingBusy, Unsupported, WeightswapError, text_of
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.watching.intake import Told
from weightswap_runtime.live.watching.reconciler import Reconciler
from weightswap_runtime.shared.control import Control
from weightswap_server.canary.judging import Measured

from .node_trial import Lease, NodeTrial
from .node_weights import NodeWeights

_POLL = 0.01  # seconds
_GIVEN_UP = 64  # changes that are known to be
_log = logging.getLogger("weightswap.fleet")


class NodeChanges:
    """One change at a time: an order's, a trial's, or what a look at the place finds. From any thread."""

    def __init__(self, weights: NodeWeights, place: DesiredPlace, control: Control, clock: Callable[[], float]) -> None:
        """place: of the desired state. control: through which replicas are told of trials."""
        self._weights, self._place, self._control, self._clock = weights, place, control, clock
        self._node, self._model = weights.node, weights.model
        self.reconciler = Reconciler(place, weights.spec.interval, clock)
        self.bell = threading.Event()  # whoever looks at the place is to do so now
        self._order: _OpenOrder | None = None
        self._trial: NodeTrial | None = None
        self._given_up: deque[str] = deque(maxlen=_GIVEN_UP)
        self.is_deployed = True  # whether it is known how to verify; until then nothing changes
        self._looked_with = weights.spec
        self._turn = threading.RLock()
        self._taking = threading.Lock()  # not the turn: a replica that begins waits for no staging
        self.stopped = threading.Event()

    def take(self, spec: Spec) -> None:
        """Go on as a deployment says, if it is the latest."""
        with self._taking:
            if spec.since > self._weights.spec.since:
                self._weights.take(spec)
                self.look_soon()
            if not self.is_deployed:
                self.is_deployed = True
                self.look_soon()

    @property
    def preparing(self) -> str:
        """The weights that are staged, or ready, for an order; empty without one."""
        opened = self._order
        return opened.order.weights.weights_id if opened else ""

    def prepare(self, order: Order) -> Prepared:
        """Stage and verify the weights of an order, and keep them ready.

        What is on trial is not staged again, and stays on trial until the commit. A rollback waits for nothing: what is
        being staged or is on trial, and an order that is not decided, are given up.

        Raises what `Model.stage` raises, StageCancelled where the order is given up meanwhile, or was before it came,
        and StagingBusy where another is open, or other weights are on trial.
        """
        began = time.perf_counter()
        if not order.proven:
            self._check_free()
        with self._turn_at_once() if order.proven else self._turn:
            self._check_meant(order)
            if order.proven and self._order is not None and not self._settle(self._order):
                self._drop()
            self._check_free()
            return self._prepare(order, began)

    def _prepare(self, order: Order, began: float) -> Prepared:
        wanted = order.weights.weights_id
        if self._trial is not None and self._trial.is_of(order):
            opening = self._open(order)
            opening.staged, opening.is_on_trial = self._trial.staged, True
            return Prepared(time.perf_counter() - began, True, opening.staged.verified)
        if order.proven:
            self._end_trial()
        self._check_no_trial()
        opening = self._open(order)
        if order.proven and wanted in {self._model.weights_id, self._model.previous_weights_id}:
            return Prepared(time.perf_counter() - began, True, "none")
        try:
            opening.staged = self._weights.stage(order.source, order.weights, order.reader)
            self._weights.wait(
                opening.staged, lambda: self._is_given_up(order) or opening.lease.is_over or self._is_overtaken(order)
            )
        except BaseException:
            self._drop()
            raise
        opening.lease.renew()  # it may have taken long
        return Prepared(time.perf_counter() - began, False, opening.staged.verified)

    def _open(self, order: Order) -> _OpenOrder:
        self._order = opening = _OpenOrder(order, Lease(order.lease, self._clock))
        try:
            self._check_meant(order)  # again: who gives it up from now on sees it
        except StageCancelled:
            self._drop()
            raise
        return opening

    def _is_given_up(self, order: Order | TrialOrder) -> bool:
        return order.id in self._given_up

    def _check_meant(self, order: Order | TrialOrder) -> None:
        """Raise StageCancelled where it was given up: what was sent first may come last, or has waited for its turn."""
        if self._is_given_up(order):
            raise StageCancelled(f"{self._node}: {order.weights.weights_id[:SHOWN]} was given up")

    def _is_overtaken(self, order: Order) -> bool:
        """Whether something else was decided, such as a hold or a rollback by hand."""
        state = self._read()
        return state is not None and state.revision != order.revision and state.weights_id != order.weights.weights_id

    def _desires_others(self) -> bool:
        """Whether the place says other weights than at the last look."""
        before, state = self.reconciler.state, self._read()
        return before is not None and state is not None and state.weights_id != before.weights_id

    def _read(self) -> DesiredState | None:
        """What the place says; None where it cannot be read."""
        try:
            return self._place.read()
        except WeightswapError:
            return None

    @contextmanager
    def _turn_at_once(self) -> Iterator[None]:
        """The turn; what others stage until it comes is given up, and whoever waits for that gets StageCancelled."""
        while not self._turn.acquire(timeout=_POLL):
            self._weights.interrupt()
        try:
            yield
        finally:
            self._turn.release()

    def _check_free(self) -> None:
        if not self.is_deployed:
            raise StagingBusy(
                f"{self._node}: its keeper has begun again, and no replica has told it how yet; try again"
            )
        if (opened := self._order) is not None:
            weights = opened.order.weights
            raise StagingBusy(
                f"{self._node}: has an order{_by(weights)} open, for {weights.weights_id[:SHOWN]}; try again when it "
                "is over"
            )

    def _check_no_trial(self) -> None:
        if (trial := self._trial) is not None:
            weights = trial.order.weights
            raise StagingBusy(
                f"{self._node}: {weights.weights_id[:SHOWN]} is on trial{_by(weights)}; promote or abort it first"
            )

    def renew(self, change_id: str) -> bool:
        """An order, or a trial, is still meant, as others take longer. Whether it is open here."""
        opened = next((each for each in (self._order, self._trial) if each and each.order.id == change_id), None)
        if opened is not None:
            opened.lease.renew()
        return opened is not None

    def commit(self, order_id: str, revision: int) -> Committed:
        """Serve what was prepared for an order, which was decided as a revision of the place.

        Raises StageClosed where it is not prepared any more (what the place says is done all the same, by itself), and
        what `Staged.commit` raises.
        """
        with self._turn:
            opened = self._order
            if opened is None or opened.order.id != order_id:
                self.look_soon()
                raise StageClosed(f"{self._node}: the order {order_id} is not prepared any more")
            return self._commit(opened, revision)

    def _commit(self, opened: _OpenOrder, revision: int) -> Committed:
        weights, seconds = opened.order.weights, 0.0
        if opened.staged is not None:
            seconds = self._weights.commit(opened.staged, revision).seconds_paused
            self._trial = None  # its weights are served, or there was none
        elif self._model.weights_id != weights.weights_id:
            seconds = self._weights.roll_back(weights, revision).seconds_paused
        at, generation = time.time(), self._model.generation
        assert generation is not None
        self._weights.mark(revision)
        self._order = None
        self.look_soon()
        return Committed(at, generation, seconds)

    def discard(self, order_id: str) -> None:
        """Give an order up: one that is open, is being staged, or has not come yet."""
        self._given_up.append(order_id)
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

    def prepare_trial(self, order: TrialOrder) -> Prepared:
        """Stage and verify what is to be tried; `go_on` begins it.

        Raises what `prepare` raises, StageCancelled, too, where nobody renews it, and Unsupported for what is served.
        """
        began = time.perf_counter()
        self._check_free()
        with self._turn:
            self._check_meant(order)
            self._check_free()
            self._check_no_trial()
            if self._model.weights_id in (None, order.weights.weights_id):
                raise Unsupported(
                    "a trial compares weights with others that are served, and this node serves these already, or none"
                )
            staged = self._weights.stage(order.source, order.weights, order.reader)
            self._trial = trial = NodeTrial(order, staged, self._control, self._clock)
            try:
                self._check_meant(order)
                self._weights.wait(
                    staged, lambda: self._is_given_up(order) or trial.lease.is_over or self._desires_others()
                )
                trial.is_ready = True
            except BaseException:
                self._end_trial()
                raise
            return Prepared(time.perf_counter() - began, False, staged.verified)

    def go_on(self, trial_id: str, share: float) -> Measured:
        """Let a share of the requests be answered by what is on trial, once that is staged, which is not waited for;
        what was measured since the last time.

        Raises StageClosed where that trial is over.
        """
        trial = self._trial_of(trial_id)
        if not trial.is_ready:
            trial.lease.renew()
            return trial.measured()
        with self._turn:
            return self._trial_of(trial_id).go_on(share)

    def _trial_of(self, trial_id: str) -> NodeTrial:
        if (trial := self._trial) is None or trial.order.id != trial_id:
            raise StageClosed(f"{self._node}: the trial {trial_id} is over")
        return trial

    def end_trial(self, trial_id: str) -> None:
        """Give a trial up: one that there is, is being staged, or has not come yet."""
        self._given_up.append(trial_id)
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

    def look_soon(self) -> None:
        """Look at the place now, and not only after the interval."""
        self.bell.set()

    def look(self) -> None:
        """Do what the place says; an order that is open waits for its end."""
        with self._turn:
            if not self.is_deployed or (self._order is not None and not self._settle(self._order)):
                return
            if self._trial is not None and self._trial.lease.is_over:
                _log.warning("%s: nothing more was heard of the trial %s", self._node, self._trial.order.id)
                self._end_trial()
            if (spec := self._weights.spec) is not self._looked_with:
                self._looked_with = spec
                self.reconciler.forget_refusal()  # it may be let in now
            self.reconciler.look(_Target(self))
            state = self.reconciler.state
            if state is not None and self.reconciler.reachable:
                self._weights.board.read = state.revision
                if state.weights_id == self._model.weights_id:
                    self._weights.mark(state.revision)

    def _settle(self, opened: _OpenOrder) -> bool:
        """Do what the place says of an order that is open. Whether it is over."""
        state = self._read()
        if state is not None and state.revision != opened.order.revision:
            if state.weights_id == opened.order.weights.weights_id:
                with suppress(WeightswapError):  # the look that follows tries it in its own way
                    self._commit(opened, state.revision)
                    return True
            self._drop()
        elif opened.lease.is_over:
            _log.warning("%s: nothing more was heard of the order %s", self._node, opened.order.id)
            self._drop()
        return self._order is None

    def close(self) -> None:
        """Give up what is open."""
        with self._turn:
            self._drop()
            self._end_trial()


def _by(weights: DesiredWeights) -> str:
    return f" by {weights.by}" if weights.by else ""


@dataclass(eq=False)
class _OpenOrder:
    """An order that this node is ready for, or will be; `staged` where the weights were not in memory."""

    order: Order
    lease: Lease
    staged: Staged | None = None
    is_on_trial: bool = False  # what is staged, which then stays where the order is given up


class _Target:
    """The node's model, as the reconciler keeps it at what is desired."""

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

    def put(self, path: str | Path, weights: DesiredWeights, is_wanted: Callable[[], bool]) -> None:
        changes = self._changes
        if changes._trial is not None:
            if changes._trial.order.weights.weights_id == weights.weights_id and is_wanted():
                self._weights.commit(changes._trial.staged, self._revision_of(weights))
                changes._trial = None
                return
            changes._end_trial()
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
        """That of the place; 0 for earlier weights, which are served as what is desired cannot be."""
        state = self._changes.reconciler.state
        return state.revision if state is not None and state.weights_id == weights.weights_id else 0

    def tell(self, kind: Told, source: str, error: BaseException) -> None:
        _log.warning("%s: %s: %s: %s", self._changes._node, kind, source, text_of(error))
