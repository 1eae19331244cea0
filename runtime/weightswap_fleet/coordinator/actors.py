"""The coordinator of a fleet, and the agents of its nodes, as actors of Ray.

Both are detached and named, so that whoever needs them finds or starts them, and Ray restarts them. The coordinator's
state is in the agents and the desired store, so it may die at any time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightswap_fleet.documents import (
    TRIAL_LEASE,
    DeploymentSpec,
    FleetPlan,
    FleetReceipt,
    NodeMethods,
    NodeStatus,
    PrepareRequest,
    TrialReport,
    UnknownFleet,
)
from weightswap_fleet.node.agent import NodeAgent, joined
from weightswap_fleet.node.relay import Relay, RelayMethods
from weightswap_runtime.errors import (
    StageClosed,
    StagingBusy,
    WeightswapError,
    check_said,
    reason_of,
    text_of,
    with_rule,
)
from weightswap_runtime.following.desired_state import DesiredState, DesiredWeights
from weightswap_runtime.following.desired_store import DesiredStore, Known, described, known_weights

from .agreement import DEADLINES, Agreement, Deadlines, FleetTrial, reader_of

NAMESPACE = "weightswap"
_AGENT, _RELAY = "agent", "relay"
_SHOWN = 12  # characters of a node's id
_ACTOR_OPTIONS: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "max_concurrency": 16,
    "num_cpus": 0,  # a node that has given all of its CPUs to replicas needs an agent, too
    # outside the placement group of the replica that starts it, with which it would end
    "scheduling_strategy": "DEFAULT",
}
_ANSWER = 5.0  # seconds to wait for quick methods
_CHUNK = 60.0  # seconds to wait for a chunk of weights from another node
_IDLE, _POLL = 600.0, 5.0  # seconds without replicas after which an agent ends, and between two polls
_TRIAL_POLL = 1.0  # seconds between two polls of a trial
_ROLLBACK = 3.0  # seconds for which a rollback waits for another one
_ABORT = 20.0  # seconds for which an abort waits for another change
_log = logging.getLogger("weightswap.fleet")
F = TypeVar("F")
T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Coordinator:
    """The coordinator of a fleet, whose methods are those of `client.Fleet`."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._changing, self._rolling_back = threading.Lock(), threading.Lock()
        self._trial: FleetTrial | None = None
        self._trial_key = ""  # of its deployment
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
        """Roll back at once, without waiting for a change that is being staged. Another rollback goes first: each would
        end the other on some nodes. Only one that takes long is ended, too."""
        spec = find_spec(self._fleet)
        desired_store = DesiredStore(spec.desired_store)
        state = desired_store.read()  # what this one goes back from, also if the other has changed it meanwhile
        is_next = self._rolling_back.acquire(timeout=_ROLLBACK)
        try:
            return Agreement(desired_store, RayNodes(spec)).rollback(to, by, why, hold, deadlines, state)
        finally:
            if is_next:
                self._rolling_back.release()

    def hold(self, by: str, why: str) -> DesiredState:
        return self._write(lambda desired_store, revision: desired_store.hold(revision=revision, by=by, why=why))

    def release(self) -> DesiredState:
        return self._write(lambda desired_store, revision: desired_store.release(revision=revision))

    def desired(self) -> DesiredState:
        return DesiredStore(find_spec(self._fleet).desired_store).read()

    def begin_trial(self, source: str, plan: FleetPlan, by: str, why: str, deadlines: Deadlines) -> TrialReport:
        plan.check()
        began, known = time.monotonic(), known_weights(source)
        with self._exclusively(began, deadlines) as remaining:
            self._end_outdated()
            spec = find_spec(self._fleet)
            if self._trial is not None:
                current = self._trial.request.weights
                raise StagingBusy(
                    f"{current.weights_id[:_SHOWN]} is on trial{f' by {current.by}' if current.by else ''}; promote or "
                    "abort it first"
                )
            nodes, desired_store = RayNodes(spec), DesiredStore(spec.desired_store)
            state = desired_store.read() if known.base else DesiredState()
            weights = desired_store.located(described(source, known, by, why, state))
            reader = reader_of(nodes)
            request = PrepareRequest(uuid.uuid4().hex, 0, source, weights, TRIAL_LEASE, reader=reader, plan=plan)
            trial = FleetTrial(request, nodes)
            trial.begin(remaining.prepare)
            self._trial, self._trial_key = trial, spec.key
            return trial.report()

    def promote(self, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        with self._exclusively(time.monotonic(), deadlines) as remaining:
            trial = self._current_trial()
            source, weights = trial.request.source, trial.request.weights
            receipt = self._agreement().swap(source, _known(weights), by, why or weights.why, remaining)
            self._conclude(trial, "promoted", _said(by, why))
            return receipt

    def abort(self, by: str, why: str) -> TrialReport:
        check_said(by, why)
        with self._exclusively(time.monotonic(), Deadlines(prepare=_ABORT)):
            trial = self._current_trial()
            trial.end()
            return self._conclude(trial, "aborted", _said(by, why))

    def trial(self) -> TrialReport | None:
        """Return the report of the current trial, or else of the last one."""
        trial = self._trial
        return trial.report() if trial is not None else self._last

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

    def _agreement(self) -> Agreement:
        spec = find_spec(self._fleet)
        return Agreement(DesiredStore(spec.desired_store), RayNodes(spec))

    def _write(self, write: Callable[[DesiredStore, int], DesiredState]) -> DesiredState:
        spec = find_spec(self._fleet)
        desired_store, nodes = DesiredStore(spec.desired_store), RayNodes(spec)
        state = write(desired_store, desired_store.read().revision)
        nodes.call(nodes.names(), _ANSWER, NodeMethods.reconcile_soon)
        return state

    def _current_trial(self) -> FleetTrial:
        self._find_trial()
        self._end_outdated()
        if self._trial is None:
            raise StageClosed(f"{self._fleet}: nothing is on trial{_ended(self._last)}")
        return self._trial

    def _conclude(self, trial: FleetTrial, outcome: str, reason: str) -> TrialReport:
        self._last, self._trial = trial.report(outcome, reason), None
        return self._last

    def _lead(self) -> None:
        """Lead the trial: renew it, and do what its rules say. A new coordinator finds a running one in the nodes."""
        while True:
            time.sleep(_TRIAL_POLL)
            try:
                if self._may_find:
                    with self._changing:
                        self._find_trial()
                if (trial := self._trial) is not None:
                    self._act_on(trial.poll(), trial)
            except Exception:
                _log.exception("%s: could not check the trial", self._fleet)

    @property
    def _may_find(self) -> bool:
        """True as long as nodes may have a trial of an earlier coordinator, of which this one does not know."""
        return self._trial is None and time.monotonic() < self._started + TRIAL_LEASE

    def _find_trial(self) -> None:
        """Take over the trial of an earlier coordinator, while other changes are excluded."""
        if self._may_find:
            with suppress(UnknownFleet):
                spec = find_spec(self._fleet)
                self._trial, self._trial_key = FleetTrial.find(RayNodes(spec)), spec.key

    def _end_outdated(self) -> None:
        """End a trial that began on the nodes of another graph or desired store, which may live for minutes: it says
        nothing of this deployment, and must not be promoted there."""
        if (trial := self._trial) is None:
            return
        with suppress(UnknownFleet):  # while no node answers, a trial can be aborted nevertheless
            if self._trial_key != find_spec(self._fleet).key:
                trial.end()
                self._conclude(trial, "ended", "the fleet was deployed with another graph or desired store")

    def _act_on(self, verdict: tuple[str, str] | None, trial: FleetTrial) -> None:
        """Do what a verdict says. While another change is made, leave it to the next poll."""
        if verdict is None or not self._changing.acquire(blocking=False):
            return
        try:
            self._end_outdated()
            if self._trial is not trial:  # it was concluded meanwhile
                return
            what, why = verdict
            if what == "promote":
                self._promote_by_rule(trial, why)
            else:
                trial.end()
                self._conclude(trial, "aborted" if what == "abort" else "ended", why)
        finally:
            self._changing.release()

    def _promote_by_rule(self, trial: FleetTrial, rule: str) -> None:
        """Publish the weights as a trainer does. Under a hold the trial goes on; any other error aborts it."""
        source, weights = trial.request.source, trial.request.weights
        try:
            why = with_rule(weights.why, f"trial: {rule}")
            self._agreement().publish(source, _known(weights), weights.by, why, DEADLINES)
        except WeightswapError as error:
            if reason_of(error) == "held":
                _log.info("%s: %s", self._fleet, error)
                return
            trial.end()
            self._conclude(trial, "aborted", f"{type(error).__name__}: {text_of(error)}")
        else:
            self._conclude(trial, "promoted", rule)


def _said(by: str, why: str) -> str:
    return ": ".join(filter(None, (f"by {by}" if by else "", why)))


def _ended(last: TrialReport | None) -> str:
    if last is None:
        return ""
    return f"; the last trial was {last.outcome}{f' ({last.reason})' if last.reason else ''}"


def _known(weights: DesiredWeights) -> Known:
    base = weights.bases[-1].weights_id if weights.bases else ""
    return Known(weights.weights_id, weights.graph_id, dict(weights.labels), base)


def this_node() -> str:
    """Return the name of this process's node."""
    return str(ray.get_runtime_context().get_node_id()[:_SHOWN])


def coordinator_of(fleet: str) -> ActorHandle[Coordinator]:
    """Return the coordinator of a fleet, started if there is none."""
    return ray.remote(Coordinator).options(**_ACTOR_OPTIONS, name=_coordinator_name(fleet)).remote(fleet)


def agent_of_this_node(spec: DeploymentSpec) -> ActorHandle[NodeAgent]:
    """Return the agent of this process's node, started if there is none."""
    node = ray.get_runtime_context().get_node_id()
    options = _ACTOR_OPTIONS | {
        "name": agent_name(spec, this_node()),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
    }
    actor_class = ray.remote(concurrency_groups={_RELAY: 16})(_AgentActor)
    return actor_class.options(**options).remote(spec, this_node())


def _coordinator_name(fleet: str) -> str:
    return f"coordinator:{fleet}"


def agent_name(spec: DeploymentSpec, node: str) -> str:
    """Return the name of an actor with the `NodeMethods`. node: the beginning of its id, and `.` with more for one of
    several there."""
    return f"{_AGENT}:{spec.fleet}:{spec.key}:{node}"


def send(actor: ActorHandle[T], method: Callable[[T, *Ts], R], *arguments: *Ts) -> ray.ObjectRef[R]:
    """Call a method of an actor; `method`, that of its class or protocol, also says which arguments it takes."""
    reference: ray.ObjectRef[R] = getattr(actor, method.__name__).remote(*arguments)
    return reference


class RayNodes:
    """The agents of a fleet's nodes, for one artifact and desired store; see `agreement.Nodes`."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec

    def names(self) -> list[str]:
        """Return the names of living nodes: the beginnings of their ids."""
        prefix = agent_name(self._spec, "")
        return [name.removeprefix(prefix) for name in _agents(self._spec.fleet) if name.startswith(prefix)]

    def call(
        self, names: Sequence[str], timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
    ) -> dict[str, R | Exception]:
        """Call a method of these nodes concurrently. Returns the answer, or the exception, of each."""
        agents = [agent_name(self._spec, name) for name in names]
        return dict(zip(names, _call(agents, timeout, method, *arguments), strict=True))


def _agents(fleet: str) -> list[str]:
    """Return the actor names of agents on living nodes, and of replicas with ranks. fleet: "" for all fleets."""
    living = {node["NodeID"][:_SHOWN] for node in ray.nodes() if node["Alive"]}
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    prefix = f"{_AGENT}:{fleet}:" if fleet else f"{_AGENT}:"
    return sorted(
        name for name in ours if name.startswith(prefix) and name.rpartition(":")[2].partition(".")[0] in living
    )


def _call(
    agents: Sequence[str], timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
) -> list[R | Exception]:
    """Call a method of agents concurrently. Returns their answers in order; an exception instead of a missing one."""
    calls: list[ray.ObjectRef[R] | Exception] = []
    for name in agents:
        try:
            calls.append(send(ray.get_actor(name, NAMESPACE), method, *arguments))
        except (ValueError, RayError) as error:  # the actor has ended
            calls.append(error)
    if sent := [call for call in calls if not isinstance(call, Exception)]:
        ray.wait(sent, num_returns=len(sent), timeout=timeout)
    late = TimeoutError(f"did not answer {method.__name__} within {timeout:g} s")
    return [call if isinstance(call, Exception) else _answer(call, late) for call in calls]


def _answer(reference: ray.ObjectRef[R], late: TimeoutError) -> R | Exception:
    answer: R | Exception
    try:
        answer = ray.get(reference, timeout=0)
    except GetTimeoutError:
        answer = late
    except RayTaskError as error:
        answer = error.cause
    except RayError as error:
        answer = error
    return answer


def metrics(spec: DeploymentSpec) -> str:
    """Return the metrics of all nodes that answer, in Prometheus' text format."""
    nodes = RayNodes(spec)
    answers = nodes.call(nodes.names(), _ANSWER, NodeMethods.metrics)
    return joined({name: text for name, text in answers.items() if isinstance(text, str)})


def statuses(fleet: str) -> list[NodeStatus]:
    """Return the status of each node, also of those that do not answer. Raises UnknownFleet if none does.

    Agents of an earlier deployment, of another graph or desired store, remain for a while, and are left out.
    """
    agents = _agents(fleet)
    answers = dict(zip(agents, _call(agents, _ANSWER, NodeMethods.status), strict=True))
    specs = [answer.spec for answer in answers.values() if not isinstance(answer, Exception)]
    if not specs:
        if answers:
            raise UnknownFleet(f"{fleet}: none of its {len(answers)} nodes answers; try again in a moment")
        others = ", ".join(sorted({name.split(":")[1] for name in _agents("")})) or "none"
        raise UnknownFleet(
            f"{fleet}: no fleet of that name has a node here. Deployed on this cluster: {others}; deploy it first, "
            "or give another name"
        )
    latest = max(specs, key=attrgetter("since"))
    prefix = agent_name(latest, "")
    return [
        answer
        if not isinstance(answer, Exception)
        else NodeStatus.unknown(name.removeprefix(prefix), latest, f"{type(answer).__name__}: {text_of(answer)}")
        for name, answer in answers.items()
        if name.startswith(prefix)
    ]


def find_spec(fleet: str) -> DeploymentSpec:
    """Return the latest deployment of a fleet that its nodes know. Raises UnknownFleet."""
    return max((status.spec for status in statuses(fleet)), key=attrgetter("since"))


def end_actors(fleet: str) -> None:
    """End the agents and the coordinator of a fleet."""
    for name in (*_agents(fleet), _coordinator_name(fleet)):
        with suppress(ValueError):  # the actor has ended
            ray.kill(ray.get_actor(name, NAMESPACE))


# other nodes wait here for chunks of weights; in the actor's own 16 threads they would block changes
_beside_others: Callable[[F], F] = ray.method(concurrency_group=_RELAY)


class _AgentActor(NodeAgent):
    """The actor of a node's agent, with the `RelayMethods` for the agents of other nodes."""

    def __init__(self, spec: DeploymentSpec, node: str) -> None:
        if spec.op_libraries:
            from weightswap_runtime.engines.operators import import_libraries  # needs torch

            import_libraries(spec.op_libraries)
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._reader = Relay(node, _Transfer(spec))
        super().__init__(spec, node, relay=self._reader, again=again)
        self.start()
        threading.Thread(target=_end_when_idle, args=(self,), name="weightswap-idle", daemon=True).start()

    @_beside_others
    def describe(self, url: str) -> tuple[int, str] | None:
        return self._reader.describe(url)

    @_beside_others
    def chunk(self, url: str, tag: str, number: int) -> Any:
        return self._reader.chunk(url, tag, number)

    @_beside_others
    def settle(self, url: str, tag: str) -> None:
        self._reader.settle(url, tag)


def _end_when_idle(agent: NodeAgent) -> None:
    """Free the memory of this process's agent after a while without replicas, as some may come back.

    A restarted agent to which no replica has sent its deployment ends soon: it would block changes of the fleet.
    """
    since = time.monotonic()
    while time.monotonic() - since < (_IDLE if agent.is_deployed else _POLL):
        time.sleep(_POLL)
        if agent.status().replicas:
            since = time.monotonic()
    ray.kill(ray.get_runtime_context().current_actor)


class _Transfer:
    """A `Transfer` through Ray's object store, in which any node with a chunk passes it on."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec

    def relay_of(self, node: str) -> RelayMethods:
        return RemoteRelay(ray.get_actor(agent_name(self._spec, node), NAMESPACE))

    def put(self, content: bytearray) -> Any:
        return [ray.put(np.frombuffer(content, np.uint8))]  # in a list, as Ray would resolve a bare reference

    def get(self, put: Any) -> memoryview:
        return memoryview(ray.get(put[0], timeout=_CHUNK))


class RemoteRelay:
    """The relay of another node, by its actor."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    def describe(self, url: str) -> tuple[int, str] | None:
        found: tuple[int, str] | None = ray.get(send(self._actor, RelayMethods.describe, url), timeout=_CHUNK)
        return found

    def chunk(self, url: str, tag: str, number: int) -> Any:
        return ray.get(send(self._actor, RelayMethods.chunk, url, tag, number), timeout=_CHUNK)

    def settle(self, url: str, tag: str) -> None:
        ray.get(send(self._actor, RelayMethods.settle, url, tag), timeout=_CHUNK)
