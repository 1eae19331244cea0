"""The interface of a fleet for operators, trainers and clients."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, TypeVarTuple

import ray
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from weightswap_fleet.coordinator.actors import (
    Coordinator,
    coordinator_of,
    end_actors,
    find_spec,
    metrics,
    send,
    statuses,
)
from weightswap_fleet.coordinator.agreement import DEADLINES, Deadlines
from weightswap_runtime.errors import DesiredError, Unsupported
from weightswap_runtime.following.desired_state import DesiredState
from weightswap_runtime.sources.location import as_location, fixed_text

from .documents import (
    FleetError,
    FleetPlan,
    FleetReceipt,
    FleetUndecided,
    NodeStatus,
    StaleReplica,
    TrialReport,
    UnknownFleet,
)
from .replica import FleetAnswer

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_Path = str | os.PathLike[str]
_POLL = 0.05  # seconds between two questions to the coordinator
_SLACK = 30.0  # seconds beyond those of a change's phases


def connect(name: str = "weightswap") -> Fleet:
    """Return the fleet of a name in the Ray cluster that this process is connected to. Raises UnknownFleet."""
    statuses(name)
    return Fleet(name)


class Fleet:
    """A deployed fleet. Every method may be called from any thread; made by `connect`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Fleet({self.name!r})"

    def swap(self, weights: _Path, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Change the weights of all nodes, at one revision: all nodes or none.

        weights: a packed file, an index of shards, or a URL, which all nodes can read. deadlines: for each phase.

        Raises FleetRefused with the reasons of all nodes that cannot take them, RevisionConflict if the desired store
        was changed meanwhile, FleetUndecided if the desired store did not say whether the change was written,
        DesiredError, WeightFileError, and UnknownFleet.
        """
        source = fixed_text(as_location(weights))
        return self._call(sum(deadlines), Coordinator.swap, source, by, why, deadlines)

    def publish(self, weights: _Path, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Change the weights as a trainer, which never undoes an operator's hold or rollback.

        Raises NotPromoted during a hold and for weights that were withdrawn, and what `swap` raises.
        """
        source = fixed_text(as_location(weights))
        return self._call(sum(deadlines), Coordinator.publish, source, by, why, deadlines)

    def rollback(
        self,
        to: str | None = None,
        *,
        by: str = "",
        why: str = "",
        hold: bool = True,
        deadlines: Deadlines = DEADLINES,
    ) -> FleetReceipt:
        """Serve earlier weights again on all nodes, and withdraw all later ones.

        to: the beginning of a weights id of the history; None: the previously desired weights. A node that still has
        them in memory reads nothing. hold: promote nothing until `release`. Raises NothingToRollBack, and what `swap`
        raises.
        """
        return self._call(sum(deadlines), Coordinator.rollback, to, by, why, hold, deadlines)

    def canary(
        self,
        weights: _Path,
        plan: FleetPlan | None = None,
        *,
        by: str = "",
        why: str = "",
        deadlines: Deadlines = DEADLINES,
        **fields: Any,
    ) -> TrialReport:
        """Start a trial of weights on all nodes, before they serve them: a canary, a shadow, or a rollout by steps.

        plan: a `FleetPlan`, or its fields by name: `share=0.1`, `of="nodes"`, `shadow=True`, `steps=(0.1, 0.5, 1.0)`,
        `promote_if=`, `abort_if=`. All nodes stage and verify first. The trial lasts until `promote`, `abort`, or a
        rule.

        Raises StagingBusy if other weights are on trial, Unsupported for a wrong plan, and what `swap` raises.
        """
        if plan is not None and fields:
            raise Unsupported(f"a plan and {', '.join(fields)}: give one or the other")
        plan = FleetPlan(**fields) if plan is None else plan
        source = fixed_text(as_location(weights))
        return self._call(deadlines.prepare, Coordinator.begin_trial, source, plan, by, why, deadlines)

    def promote(self, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Serve the weights on trial on all nodes, at one revision: all nodes or none. If none, the trial goes on.

        Raises StageClosed without a trial, and what `swap` raises.
        """
        return self._call(sum(deadlines), Coordinator.promote, by, why, deadlines)

    def abort(self, *, by: str = "", why: str = "") -> TrialReport:
        """End the trial, and discard its weights. Raises StageClosed without a trial."""
        return self._call(0.0, Coordinator.abort, by, why)

    @property
    def trial(self) -> TrialReport | None:
        """The current trial, or else the last one, as long as the coordinator remembers it."""
        return self._read(Coordinator.trial)

    def hold(self, *, by: str = "", why: str = "") -> DesiredState:
        """Hold promotions until `release`. Raises RevisionConflict and DesiredError."""
        return self._call(0.0, Coordinator.hold, by, why)

    def release(self) -> DesiredState:
        """Allow promotions again. Raises RevisionConflict and DesiredError."""
        return self._call(0.0, Coordinator.release)

    @property
    def desired(self) -> DesiredState:
        """The desired state, read from the desired store. Raises DesiredError."""
        return self._read(Coordinator.desired)

    def _read(self, method: Callable[[Coordinator], R]) -> R:
        """Call a method of the coordinator that changes nothing, again if the coordinator was restarted."""
        deadline = time.monotonic() + _SLACK
        while True:
            try:
                return self._call(0.0, method)
            except FleetUndecided:  # the coordinator is restarted
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL)

    @property
    def nodes(self) -> dict[str, NodeStatus]:
        """The status of each node, by name; `error` says if one does not answer. Raises UnknownFleet."""
        return {status.node: status for status in statuses(self.name)}

    @property
    def replicas(self) -> int:
        """The number of replicas that Ray Serve runs or is starting. Raises UnknownFleet."""
        states = serve.status().applications[_application(self.name)].deployments[self.name].replica_states
        return sum(count for state, count in states.items() if state not in ("STOPPING", "STOPPED"))

    def metrics(self) -> str:
        """Return the metrics of all nodes in Prometheus' text format, with the label `node`. Raises UnknownFleet."""
        return metrics(find_spec(self.name))

    def wait(self, timeout: float = 60.0) -> bool:
        """Wait until all nodes serve the desired weights. Returns False after the timeout.

        Raises what `desired` and `nodes` raise at the timeout.
        """
        deadline = time.monotonic() + timeout
        while True:
            is_last = time.monotonic() >= deadline
            try:
                agree = self._agrees()
            except (DesiredError, FleetError):  # agents may be restarting, or the desired store unreachable
                if is_last:
                    raise
            else:
                if agree or is_last:
                    return agree
            time.sleep(_POLL)

    def _agrees(self) -> bool:
        desired = self.desired.weights_id
        return all(desired is not None and node.weights_id == desired for node in self.nodes.values())

    def remove(self) -> None:
        """End the replicas and agents, and free their memory. The desired state stays."""
        serve.delete(_application(self.name))
        end_actors(self.name)

    def client(self) -> FleetClient:
        """Return a client whose answers never go back to an earlier revision."""
        return FleetClient(serve.get_deployment_handle(self.name, _application(self.name)))

    def _call(self, timeout: float, method: Callable[[Coordinator, *Ts], R], *arguments: *Ts) -> R:
        """Call a method of the coordinator. Raises its error, or FleetUndecided if it ended or did not answer.

        timeout: the seconds that the method itself may take.
        """
        sent = send(coordinator_of(self.name), method, *arguments)
        try:
            answer: R = ray.get(sent, timeout=timeout + _SLACK)
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, GetTimeoutError) as error:
            raise FleetUndecided(
                f"{self.name}: the coordinator ended or did not answer during {method.__name__} "
                f"({type(error).__name__}). The desired state holds what was decided, and all nodes "
                "follow it: look there"
            ) from error
        return answer


def _application(fleet: str) -> str:
    """Return the name of a fleet's application. Raises UnknownFleet."""
    for name, application in serve.status().applications.items():
        if fleet in application.deployments:
            return str(name)
    raise UnknownFleet(f"{fleet}: no Ray Serve application has a deployment with that name")


class FleetClient:
    """A client of a fleet, through Ray. Once it has seen a revision, no older one answers. Thread-safe."""

    def __init__(self, handle: DeploymentHandle[Any], *, patience: float = 30.0) -> None:
        """handle: of the fleet's deployment. patience: seconds to wait for a replica that is not behind."""
        self._method, self._patience = handle.infer, patience
        self._seen = 0
        self._lock = threading.Lock()

    @property
    def revision(self) -> int:
        """The newest revision that it has seen."""
        return self._seen

    def close(self) -> None:
        """Stop tracking the replicas, which would otherwise go on as long as the process."""
        self._method.shutdown()

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, inputs: Mapping[str, NDArray[Any]], *, model: str = "", canary: bool | None = None) -> FleetAnswer:
        """Call a method with arrays by the inputs' names, and wait. model: as over HTTP; empty: the default method.
        canary: True asks for the weights on trial, False for the served ones; None leaves the choice to the fleet.

        Raises StaleReplica if no replica has caught up in time, and what the call raises.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._note(self._method.remote(inputs, model, self._seen, canary).result())
            except RayTaskError as error:
                self._raise_unless_retry(error, deadline)

    async def ainfer(
        self, inputs: Mapping[str, NDArray[Any]], *, model: str = "", canary: bool | None = None
    ) -> FleetAnswer:
        """Call a method as `infer` does, for asyncio."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._note(await self._method.remote(inputs, model, self._seen, canary))
            except RayTaskError as error:
                self._raise_unless_retry(error, deadline)

    @staticmethod
    def _raise_unless_retry(error: RayTaskError, deadline: float) -> None:
        """Raise a call's error, unless it is worth a retry."""
        if not isinstance(error.cause, StaleReplica) or time.monotonic() >= deadline:
            raise error.cause from None

    def _note(self, answer: FleetAnswer) -> FleetAnswer:
        with self._lock:
            self._seen = max(self._seen, answer.revision)
        return answer
