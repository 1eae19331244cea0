"""A fleet as its operators, trainers and clients see it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.errors import DesiredError, Unsupported
from weightswap_runtime.sources.location import as_location, fixed_text

from .coordinator.actors import end_actors, find_spec, metrics, statuses
from .coordinator.agreement import DEADLINES, Deadlines
from .coordinator.controller import controller_of
from .documents import FleetPlan, FleetReceipt, NodeStatus, TrialReport
from .errors import FleetError, FleetUndecided, StaleReplica, UnknownFleet
from .replicas.replica import FleetAnswer

_Path = str | os.PathLike[str]
_POLL = 0.05
_SLACK = 30.0  # seconds beside those of a change's phases


def connect(name: str = "weightswap") -> Fleet:
    """The fleet of a name, in the Ray cluster that this process is connected to. Raises UnknownFleet."""
    statuses(name)
    return Fleet(name)


class Fleet:
    """A deployed fleet. Every method may be called from any thread; made by `connect`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Fleet({self.name!r})"

    def swap(self, weights: _Path, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Let all nodes serve other weights, at one revision: all of them, or none.

        weights: a packed file, an index of shards, or a URL, which all nodes can read. deadlines: for each phase.

        Raises FleetRefused with the reasons of all nodes that could not take them, RevisionConflict where others have
        decided something meanwhile, FleetUndecided where the place did not say whether it was written, DesiredError,
        WeightFileError, and UnknownFleet.
        """
        source = fixed_text(as_location(weights))
        return cast("FleetReceipt", self._ask("swap", source, by, why, deadlines, timeout=sum(deadlines)))

    def publish(self, weights: _Path, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Let all nodes serve new weights, unless that would undo what an operator has done: for trainers.

        Raises Held, Superseded for weights that were desired or withdrawn before, and what `swap` raises.
        """
        source = fixed_text(as_location(weights))
        return cast("FleetReceipt", self._ask("publish", source, by, why, deadlines, timeout=sum(deadlines)))

    def rollback(
        self,
        to: str | None = None,
        *,
        by: str = "",
        why: str = "",
        hold: bool = True,
        deadlines: Deadlines = DEADLINES,
    ) -> FleetReceipt:
        """Let all nodes serve earlier weights again, and withdraw what came after them.

        to: the beginning of a weights id of the history; None: what was desired before. A node that has them in memory
        reads nothing. hold: take nothing new until `release`. Raises NothingToRollBack, and what `swap` raises.
        """
        return cast("FleetReceipt", self._ask("rollback", to, by, why, hold, deadlines, timeout=sum(deadlines)))

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
        """Let weights answer some requests on all nodes, before all of them get it: a canary, a shadow, or by steps.

        plan: a `FleetPlan`, or its fields by name: `share=0.1`, `of="nodes"`, `shadow=True`, `steps=(0.1, 0.5, 1.0)`,
        `promote_if=`, `abort_if=`. All nodes stage and verify first. It goes on until `promote`, `abort`, or what its
        rules say.

        Raises StagingBusy where others are on trial, Unsupported for a plan that cannot be meant, and what `swap`
        raises.
        """
        if plan is not None and fields:
            raise Unsupported(f"a plan beside {', '.join(fields)}: expected one of them")
        wanted = FleetPlan(**fields) if plan is None else plan
        source, timeout = fixed_text(as_location(weights)), deadlines.prepare
        return cast("TrialReport", self._ask("begin_trial", source, wanted, by, why, deadlines, timeout=timeout))

    def promote(self, *, by: str = "", why: str = "", deadlines: Deadlines = DEADLINES) -> FleetReceipt:
        """Let all nodes serve what is on trial, at one revision: all of them, or none, and then the trial goes on.

        Raises StageClosed where nothing is on trial, and what `swap` raises.
        """
        return cast("FleetReceipt", self._ask("promote", by, why, deadlines, timeout=sum(deadlines)))

    def abort(self, *, by: str = "", why: str = "") -> TrialReport:
        """Give up what is on trial. Raises StageClosed where nothing is."""
        return cast("TrialReport", self._ask("abort", by, why))

    @property
    def trial(self) -> TrialReport | None:
        """What is on trial; else how the last one has ended, as long as the controller knows that."""
        return cast("TrialReport | None", self._ask_again("trial"))

    def hold(self, *, by: str = "", why: str = "") -> DesiredState:
        """Let nothing be promoted until `release`. Raises RevisionConflict and DesiredError."""
        return cast("DesiredState", self._ask("hold", by, why))

    def release(self) -> DesiredState:
        """Let promotions through again. Raises RevisionConflict and DesiredError."""
        return cast("DesiredState", self._ask("release"))

    @property
    def desired(self) -> DesiredState:
        """What the place says. Raises DesiredError."""
        return cast("DesiredState", self._ask_again("desired"))

    def _ask_again(self, method: str) -> Any:
        """What the controller answers, or the next one."""
        deadline = time.monotonic() + _SLACK
        while True:
            try:
                return self._ask(method)
            except FleetUndecided:  # it begins again
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL)

    @property
    def nodes(self) -> dict[str, NodeStatus]:
        """How the nodes stand, by name; one that does not answer says so in `error`. Raises UnknownFleet."""
        return {status.node: status for status in statuses(self.name)}

    def metrics(self) -> str:
        """What all nodes have counted, as Prometheus reads it, with the label `node`. Raises UnknownFleet."""
        return metrics(find_spec(self.name))

    def wait(self, timeout: float = 60.0) -> bool:
        """Wait until all nodes serve what is desired. Returns whether they do.

        Raises what `desired` and `nodes` raise, if they do so when the time is over.
        """
        deadline = time.monotonic() + timeout
        while True:
            is_last = time.monotonic() >= deadline
            try:
                agree = self._agrees()
            except (DesiredError, FleetError):  # as long as keepers begin again, or the place is away
                if is_last:
                    raise
            else:
                if agree or is_last:
                    return agree
            time.sleep(_POLL)

    def _agrees(self) -> bool:
        wanted = self.desired.weights_id
        return all(wanted is not None and each.weights_id == wanted for each in self.nodes.values())

    def remove(self) -> None:
        """End its replicas, keepers and memory. What is desired stays as it is."""
        serve.delete(_application(self.name))
        end_actors(self.name)

    def client(self) -> FleetClient:
        """A client whose answers never go back to earlier weights."""
        return FleetClient(serve.get_deployment_handle(self.name, _application(self.name)))

    def _ask(self, method: str, *arguments: Any, timeout: float = 0.0) -> Any:
        """What the controller answers. Whether one that has ended meanwhile had changed anything, the place says."""
        try:
            return ray.get(getattr(controller_of(self.name), method).remote(*arguments), timeout=timeout + _SLACK)
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, GetTimeoutError) as error:
            raise FleetUndecided(
                f"{self.name}: the controller ended, or did not answer, while it was asked to {method} "
                f"({type(error).__name__}). What is desired now is what was decided, and all nodes do that: look there"
            ) from error


def _application(fleet: str) -> str:
    """Under which a fleet was deployed. Raises UnknownFleet."""
    for name, application in serve.status().applications.items():
        if fleet in application.deployments:
            return str(name)
    raise UnknownFleet(f"{fleet}: no application of Ray Serve has a deployment of that name")


class FleetClient:
    """Calls a fleet through Ray. Once it has seen a revision, no older one answers it. From any thread."""

    def __init__(self, handle: DeploymentHandle[Any], *, patience: float = 30.0) -> None:
        """handle: of the fleet's deployment. patience: seconds for a replica that is not behind."""
        self._method, self._patience = handle.infer, patience
        self._seen = 0
        self._lock = threading.Lock()

    @property
    def revision(self) -> int:
        """The newest that it has seen."""
        return self._seen

    def close(self) -> None:
        """Stop following which replicas there are, which else goes on as long as the process."""
        self._method.shutdown()

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, inputs: Mapping[str, NDArray[Any]], *, model: str = "", canary: bool | None = None) -> FleetAnswer:
        """Call a method with arrays by the inputs' names, and wait. model: as over HTTP; empty: the default method.
        canary: ask for what is on trial, or for what is served; None: whichever it is.

        Raises StaleReplica where no replica has caught up in time, and what the call raises.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._note(self._method.remote(inputs, model, self._seen, canary).result())
            except RayTaskError as error:
                self._check(error, deadline)

    async def ainfer(
        self, inputs: Mapping[str, NDArray[Any]], *, model: str = "", canary: bool | None = None
    ) -> FleetAnswer:
        """As `infer`, for asyncio."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._note(await self._method.remote(inputs, model, self._seen, canary))
            except RayTaskError as error:
                self._check(error, deadline)

    @staticmethod
    def _check(error: RayTaskError, deadline: float) -> None:
        """Whether to try again."""
        if not isinstance(error.cause, StaleReplica) or time.monotonic() >= deadline:
            raise error.cause from None

    def _note(self, answer: FleetAnswer) -> FleetAnswer:
        with self._lock:
            self._seen = max(self._seen, answer.revision)
        return answer
