"""The controller of a fleet: the actor that makes its changes and leads its trials."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle

from weightswap_fleet.documents import TRIAL_LEASE, FleetPlan, FleetReceipt, TrialOrder, TrialReport
from weightswap_fleet.errors import UnknownFleet
from weightswap_runtime.desired.document import DesiredState, DesiredWeights
from weightswap_runtime.desired.place import DesiredPlace, Known, described, known_weights
from weightswap_runtime.errors import Held, StageClosed, StagingBusy, WeightswapError, text_of
from weightswap_runtime.options import check_said

from .actors import ACTOR_OPTIONS, ANSWER, SHOWN, RayNodes, controller_name, find_spec
from .agreement import DEADLINES, Agreement, Deadlines, reader_of
from .fleet_trial import FleetTrial, Verdict

_LOOK = 1.0  # seconds between two looks at a trial
_ABORT = 20.0  # seconds for which an abort waits for another change
_log = logging.getLogger("weightswap.fleet")


class Controller:
    """The controller of a fleet. Its state is in the keepers and the place, so it may die at any time."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._changing = threading.Lock()
        self._trial: FleetTrial | None = None
        self._last: TrialReport | None = None
        self._started = time.monotonic()
        threading.Thread(target=self._lead, name="weightswap-trial", daemon=True).start()

    def swap(self, source: str, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        began, known = time.monotonic(), known_weights(source)
        with self._exclusively(began, deadlines) as remaining:
            return self._agreement().swap(source, known, by, why, remaining)

    def publish(self, source: str, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        began, known = time.monotonic(), known_weights(source)
        with self._exclusively(began, deadlines) as remaining:
            return self._agreement().publish(source, known, by, why, remaining)

    def rollback(self, to: str | None, by: str, why: str, hold: bool, deadlines: Deadlines) -> FleetReceipt:
        """Roll back at once, without waiting for a change that is being staged."""
        return self._agreement().rollback(to, by, why, hold, deadlines)

    def hold(self, by: str, why: str) -> DesiredState:
        return self._write("hold", by=by, why=why)

    def release(self) -> DesiredState:
        return self._write("release")

    def begin_trial(self, source: str, plan: FleetPlan, by: str, why: str, deadlines: Deadlines) -> TrialReport:
        plan.check()
        began, known = time.monotonic(), known_weights(source)
        with self._exclusively(began, deadlines) as remaining:
            if self._trial is not None:
                current = self._trial.order.weights
                raise StagingBusy(
                    f"{current.weights_id[:SHOWN]} is on trial{f' by {current.by}' if current.by else ''}; promote or "
                    "abort it first"
                )
            spec = find_spec(self._fleet)
            nodes, place = RayNodes(spec), DesiredPlace(spec.place)
            state = place.read() if known.base else DesiredState()
            weights = place.located(described(source, known, by, why, state))
            order = TrialOrder(uuid.uuid4().hex, source, weights, plan, reader=reader_of(nodes))
            trial = FleetTrial(order, nodes)
            trial.begin(remaining.prepare)
            self._trial = trial
            return trial.report()

    def promote(self, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        with self._exclusively(time.monotonic(), deadlines) as remaining:
            trial = self._current_trial()
            source, weights = trial.order.source, trial.order.weights
            receipt = self._agreement().swap(source, _known(weights), by, why or weights.why, remaining)
            self._conclude(trial, "promoted", f"by {by}" if by else "")
            return receipt

    def abort(self, by: str, why: str) -> TrialReport:
        check_said(by, why)
        with self._exclusively(time.monotonic(), Deadlines(prepare=_ABORT)):
            trial = self._current_trial()
            trial.end()
            return self._conclude(trial, "aborted", ": ".join(filter(None, (f"by {by}" if by else "", why))))

    @contextmanager
    def _exclusively(self, began: float, deadlines: Deadlines) -> Iterator[Deadlines]:
        """Exclude other changes from a block, and yield the deadlines less the time of the wait.

        Raises StagingBusy if that takes longer than the deadline: a change must not begin after its caller has given
        up.
        """
        if not self._changing.acquire(timeout=max(0.0, began + deadlines.prepare - time.monotonic())):
            raise StagingBusy(f"{self._fleet}: another change took all of the {deadlines.prepare:g} s; try again")
        try:
            yield deadlines._replace(prepare=max(0.0, began + deadlines.prepare - time.monotonic()))
        finally:
            self._changing.release()

    def trial(self) -> TrialReport | None:
        """Return the report of the current trial, or else of the last one."""
        trial = self._trial
        return trial.report() if trial is not None else self._last

    def _current_trial(self) -> FleetTrial:
        if self._trial is None:
            raise StageClosed(f"{self._fleet}: nothing is on trial{_ended(self._last)}")
        return self._trial

    def _conclude(self, trial: FleetTrial, outcome: str, reason: str) -> TrialReport:
        self._last, self._trial = trial.report(outcome, reason), None
        return self._last

    def _lead(self) -> None:
        """Lead the trial: renew it, and do what its rules say. A new controller finds a running one in the nodes."""
        while True:
            time.sleep(_LOOK)
            try:
                if self._trial is None and time.monotonic() < self._started + TRIAL_LEASE:
                    self._find_trial()
                if (trial := self._trial) is not None:
                    self._judge(trial, trial.look())
            except Exception:
                _log.exception("%s: could not check the trial", self._fleet)

    def _find_trial(self) -> None:
        with self._changing, suppress(UnknownFleet):
            if self._trial is None:
                self._trial = FleetTrial.find(RayNodes(find_spec(self._fleet)))

    def _judge(self, trial: FleetTrial, verdict: Verdict | None) -> None:
        """Do what a verdict says. While another change is made, leave it to the next look."""
        if verdict is None or not self._changing.acquire(blocking=False):
            return
        try:
            if self._trial is not trial:
                return
            if verdict.what == "promote":
                self._promote_by_rule(trial, verdict.why)
            else:
                trial.end()
                self._conclude(trial, "aborted" if verdict.what == "abort" else "ended", verdict.why)
        finally:
            self._changing.release()

    def _promote_by_rule(self, trial: FleetTrial, rule: str) -> None:
        """Publish the weights as a trainer does. Under a hold the trial goes on; any other error aborts it."""
        source, weights = trial.order.source, trial.order.weights
        try:
            self._agreement().publish(source, _known(weights), weights.by, f"trial: {rule}", DEADLINES)
        except Held as error:
            _log.info("%s: %s", self._fleet, error)
        except WeightswapError as error:
            trial.end()
            self._conclude(trial, "aborted", f"{type(error).__name__}: {text_of(error)}")
        else:
            self._conclude(trial, "promoted", rule)

    def _write(self, method: str, **options: Any) -> DesiredState:
        spec = find_spec(self._fleet)
        place, nodes = DesiredPlace(spec.place), RayNodes(spec)
        state: DesiredState = getattr(place, method)(revision=place.read().revision, **options)
        nodes.ask(nodes.names(), "look_soon", timeout=ANSWER)
        return state

    def desired(self) -> DesiredState:
        return DesiredPlace(find_spec(self._fleet).place).read()

    def _agreement(self) -> Agreement:
        spec = find_spec(self._fleet)
        return Agreement(DesiredPlace(spec.place), RayNodes(spec))


def _ended(last: TrialReport | None) -> str:
    if last is None:
        return ""
    return f"; the last trial was {last.outcome}{f' ({last.reason})' if last.reason else ''}"


def _known(weights: DesiredWeights) -> Known:
    base = weights.bases[-1].weights_id if weights.bases else ""
    return Known(weights.weights_id, weights.graph_id, dict(weights.labels), base)


def controller_of(fleet: str) -> ActorHandle[Any]:
    """Return the controller of a fleet, started if there is none."""
    return ray.remote(Controller).options(**ACTOR_OPTIONS, name=controller_name(fleet)).remote(fleet)
