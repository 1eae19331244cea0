"""The actors of a fleet: a keeper on each node, and the controller through which it is changed.

All are found by their names, outlive who has made them, and are made again by whoever needs them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightswap_fleet.documents import NodeStatus, Spec
from weightswap_fleet.errors import UnknownFleet
from weightswap_fleet.metrics import joined
from weightswap_fleet.node.node_keeper import NodeKeeper
from weightswap_runtime.errors import text_of

NAMESPACE = "weightswap"
_KEEPER, _RELAY = "keeper", "relay"
SHOWN = 12  # letters of a node's id
ACTOR_OPTIONS: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "max_concurrency": 16,
    "num_cpus": 0,
}
IDLE, _LOOK = 600.0, 5.0  # seconds
ANSWER = 5.0  # seconds for what takes no time
_CHUNK = 60.0  # seconds for a chunk of weights from another node


class _Keeper:
    """A `NodeKeeper` that others call."""

    def __init__(self, spec: Spec, node: str) -> None:
        if spec.op_libraries:
            from weightswap_runtime.engines.graphs.libraries import import_libraries  # needs torch

            import_libraries(spec.op_libraries)
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._keeper = NodeKeeper(spec, node, transfer=_Transfer(spec), again=again)
        self._keeper.start()
        threading.Thread(target=self._end_when_idle, name="weightswap-idle", daemon=True).start()

    def _end_when_idle(self) -> None:
        """Without replicas the memory is let go, after a while in which some may come back.

        At once if none has told it of a deployment since it was made again: it would keep all others from changing.
        """
        since = time.monotonic()
        while time.monotonic() - since < (IDLE if self._keeper.changes.is_deployed else _LOOK):
            time.sleep(_LOOK)
            if self._keeper.status().replicas:
                since = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor)

    def ask(self, method: str, *arguments: Any) -> Any:
        """As `NodeKeeper.ask`."""
        return self._keeper.ask(method, *arguments)


class _Transfer:
    """Chunks in Ray's object store, which takes them to each node that gets them, from any that has them."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        keeper = ray.get_actor(_keeper_name(self._spec, node), NAMESPACE)
        apart = keeper.ask.options(concurrency_group=_RELAY)  # who waits for chunks keeps no other question waiting
        return ray.get(apart.remote("relayed", method, *arguments), timeout=_CHUNK)

    def put(self, content: bytearray) -> Any:
        return [ray.put(np.frombuffer(content, np.uint8))]  # a reference alone would be gotten with the answer

    def get(self, put: Any) -> memoryview:
        return memoryview(ray.get(put[0], timeout=_CHUNK))


class RayNodes:
    """The keepers of a fleet's nodes, for one artifact and place; see `agreement.Nodes`."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def names(self) -> list[str]:
        """Of nodes that live: the beginnings of their ids."""
        prefix = _keeper_name(self._spec, "")
        return [name.removeprefix(prefix) for name in _keepers(self._spec.fleet) if name.startswith(prefix)]

    def ask(self, names: Sequence[str], method: str, *arguments: Any, timeout: float) -> dict[str, Any]:
        """What each answers, or why it does not."""
        answers = _ask([_keeper_name(self._spec, name) for name in names], method, *arguments, timeout=timeout)
        return dict(zip(names, answers, strict=True))


def _keepers(fleet: str) -> list[str]:
    """The names of the actors of nodes that live; of all fleets where none is named."""
    living = {node["NodeID"][:SHOWN] for node in ray.nodes() if node["Alive"]}
    named = ray.util.list_named_actors(all_namespaces=True)
    found = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    prefix = f"{_KEEPER}:{fleet}:" if fleet else f"{_KEEPER}:"
    return sorted(name for name in found if name.startswith(prefix) and name.rpartition(":")[2] in living)


def _ask(actors: Sequence[str], method: str, *arguments: Any, timeout: float) -> list[Any]:
    """What each actor answers, in their order; instead of an answer the exception that says why there is none."""
    asked = [_send(name, method, arguments) for name in actors]
    sent = [each for each in asked if isinstance(each, ray.ObjectRef)]
    if sent:
        ray.wait(sent, num_returns=len(sent), timeout=timeout)
    late = TimeoutError(f"has not answered {method} within {timeout:g} s")
    return [_answer(each, late) if isinstance(each, ray.ObjectRef) else each for each in asked]


def _send(actor: str, method: str, arguments: Sequence[Any]) -> Any:
    try:
        return ray.get_actor(actor, NAMESPACE).ask.remote(method, *arguments)
    except (ValueError, RayError) as error:  # it has gone
        return error


def _answer(reference: Any, late: TimeoutError) -> Any:
    try:
        return ray.get(reference, timeout=0)
    except GetTimeoutError:
        return late
    except RayTaskError as error:
        return error.cause
    except RayError as error:
        return error


def metrics(spec: Spec) -> str:
    """What was counted on all nodes that answer, as Prometheus reads it."""
    nodes = RayNodes(spec)
    answers = nodes.ask(nodes.names(), "metrics", timeout=ANSWER)
    return joined({name: each for name, each in answers.items() if isinstance(each, str)})


def statuses(fleet: str) -> list[NodeStatus]:
    """How the nodes of a fleet stand, also those that do not answer. Raises UnknownFleet where none does.

    Keepers of an earlier deployment, of another graph or place, are there for a while; they are not of the fleet.
    """
    keepers = _keepers(fleet)
    answers = dict(zip(keepers, _ask(keepers, "status", timeout=ANSWER), strict=True))
    specs = [each.spec for each in answers.values() if isinstance(each, NodeStatus)]
    if not specs:
        if answers:
            raise UnknownFleet(f"{fleet}: of its nodes, which are {len(answers)}, none answers; try again in a moment")
        others = ", ".join(sorted({name.split(":")[1] for name in _keepers("")})) or "none"
        raise UnknownFleet(
            f"{fleet}: no node of a fleet of that name is there. Deployed on this cluster: {others}; deploy it first, "
            "or give another name"
        )
    latest = max(specs, key=attrgetter("since"))
    mine = _keeper_name(latest, "")
    return [_status(latest, name, each) for name, each in answers.items() if name.startswith(mine)]


def _status(spec: Spec, keeper: str, answer: Any) -> NodeStatus:
    if isinstance(answer, NodeStatus):
        return answer
    return NodeStatus.unknown(keeper.rpartition(":")[2], spec, f"{type(answer).__name__}: {text_of(answer)}")


def find_spec(fleet: str) -> Spec:
    """What a fleet serves, as its nodes say; of several deployments the last one. Raises UnknownFleet."""
    return max((each.spec for each in statuses(fleet)), key=attrgetter("since"))


def end_actors(fleet: str) -> None:
    """End the keepers and the controller of a fleet."""
    for name in (*_keepers(fleet), controller_name(fleet)):
        with suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(name, NAMESPACE))


def keeper_of_this_node(spec: Spec) -> ActorHandle[Any]:
    """The keeper of the node that this process is on; it is made where there is none."""
    node = ray.get_runtime_context().get_node_id()
    options = ACTOR_OPTIONS | {
        "name": _keeper_name(spec, node[:SHOWN]),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
    }
    made = ray.remote(concurrency_groups={_RELAY: 16})(_Keeper)
    return made.options(**options).remote(spec, node[:SHOWN])


def controller_name(fleet: str) -> str:
    return f"controller:{fleet}"


def _keeper_name(spec: Spec, node: str) -> str:
    return f"{_KEEPER}:{spec.fleet}:{spec.key}:{node}"
