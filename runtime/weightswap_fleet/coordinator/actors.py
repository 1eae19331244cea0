"""The Ray actors of a fleet: a keeper on each node, and a controller.

All are named and detached. A process that needs one starts it if there is none.
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
SHOWN = 12  # characters of a node's id
ACTOR_OPTIONS: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "max_concurrency": 16,
    "num_cpus": 0,
}
IDLE, _LOOK = 600.0, 5.0  # seconds
ANSWER = 5.0  # seconds to wait for quick methods
_CHUNK = 60.0  # seconds to wait for a chunk of weights from another node


class _Keeper:
    """The actor of a `NodeKeeper`."""

    def __init__(self, spec: Spec, node: str) -> None:
        if spec.op_libraries:
            from weightswap_runtime.engines.graphs.libraries import import_libraries  # needs torch

            import_libraries(spec.op_libraries)
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._keeper = NodeKeeper(spec, node, transfer=_Transfer(spec), again=again)
        self._keeper.start()
        threading.Thread(target=self._end_when_idle, name="weightswap-idle", daemon=True).start()

    def _end_when_idle(self) -> None:
        """Free the memory after a while without replicas, as some may come back.

        A restarted keeper to which no replica has sent its deployment ends soon: it would block changes of the fleet.
        """
        since = time.monotonic()
        while time.monotonic() - since < (IDLE if self._keeper.changes.is_deployed else _LOOK):
            time.sleep(_LOOK)
            if self._keeper.status().replicas:
                since = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call `NodeKeeper.ask`."""
        return self._keeper.ask(method, *arguments)


class _Transfer:
    """A `Transfer` through Ray's object store, in which any node with a chunk passes it on."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        keeper = ray.get_actor(_keeper_name(self._spec, node), NAMESPACE)
        ask = keeper.ask.options(concurrency_group=_RELAY)  # so that waiting for chunks blocks no other method
        return ray.get(ask.remote("relayed", method, *arguments), timeout=_CHUNK)

    def put(self, content: bytearray) -> Any:
        return [ray.put(np.frombuffer(content, np.uint8))]  # in a list, as Ray would resolve a bare reference

    def get(self, put: Any) -> memoryview:
        return memoryview(ray.get(put[0], timeout=_CHUNK))


class RayNodes:
    """The keepers of a fleet's nodes, for one artifact and place; see `agreement.Nodes`."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def names(self) -> list[str]:
        """Return the names of living nodes: the beginnings of their ids."""
        prefix = _keeper_name(self._spec, "")
        return [name.removeprefix(prefix) for name in _keepers(self._spec.fleet) if name.startswith(prefix)]

    def ask(self, names: Sequence[str], method: str, *arguments: Any, timeout: float) -> dict[str, Any]:
        """Call a method of these nodes concurrently. Returns the result, or the exception, of each."""
        answers = _ask([_keeper_name(self._spec, name) for name in names], method, *arguments, timeout=timeout)
        return dict(zip(names, answers, strict=True))


def _keepers(fleet: str) -> list[str]:
    """Return the actor names of keepers on living nodes. fleet: "" for all fleets."""
    living = {node["NodeID"][:SHOWN] for node in ray.nodes() if node["Alive"]}
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    prefix = f"{_KEEPER}:{fleet}:" if fleet else f"{_KEEPER}:"
    return sorted(name for name in ours if name.startswith(prefix) and name.rpartition(":")[2] in living)


def _ask(actors: Sequence[str], method: str, *arguments: Any, timeout: float) -> list[Any]:
    """Call `ask` of actors concurrently. Returns their results in order; an exception instead of a missing one."""
    calls = [_send(name, method, arguments) for name in actors]
    sent = [call for call in calls if isinstance(call, ray.ObjectRef)]
    if sent:
        ray.wait(sent, num_returns=len(sent), timeout=timeout)
    late = TimeoutError(f"did not answer {method} within {timeout:g} s")
    return [_answer(call, late) if isinstance(call, ray.ObjectRef) else call for call in calls]


def _send(actor: str, method: str, arguments: Sequence[Any]) -> Any:
    try:
        return ray.get_actor(actor, NAMESPACE).ask.remote(method, *arguments)
    except (ValueError, RayError) as error:  # the actor has ended
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
    """Return the metrics of all nodes that answer, in Prometheus' text format."""
    nodes = RayNodes(spec)
    answers = nodes.ask(nodes.names(), "metrics", timeout=ANSWER)
    return joined({name: text for name, text in answers.items() if isinstance(text, str)})


def statuses(fleet: str) -> list[NodeStatus]:
    """Return the status of each node, also of those that do not answer. Raises UnknownFleet if none does.

    Keepers of an earlier deployment, of another graph or place, remain for a while, and are left out.
    """
    keepers = _keepers(fleet)
    answers = dict(zip(keepers, _ask(keepers, "status", timeout=ANSWER), strict=True))
    specs = [answer.spec for answer in answers.values() if isinstance(answer, NodeStatus)]
    if not specs:
        if answers:
            raise UnknownFleet(f"{fleet}: none of its {len(answers)} nodes answers; try again in a moment")
        others = ", ".join(sorted({name.split(":")[1] for name in _keepers("")})) or "none"
        raise UnknownFleet(
            f"{fleet}: no fleet of that name has a node here. Deployed on this cluster: {others}; deploy it first, "
            "or give another name"
        )
    latest = max(specs, key=attrgetter("since"))
    prefix = _keeper_name(latest, "")
    return [_status(latest, name, answer) for name, answer in answers.items() if name.startswith(prefix)]


def _status(spec: Spec, keeper: str, answer: Any) -> NodeStatus:
    if isinstance(answer, NodeStatus):
        return answer
    return NodeStatus.unknown(keeper.rpartition(":")[2], spec, f"{type(answer).__name__}: {text_of(answer)}")


def find_spec(fleet: str) -> Spec:
    """Return the latest deployment of a fleet that its nodes know. Raises UnknownFleet."""
    return max((status.spec for status in statuses(fleet)), key=attrgetter("since"))


def end_actors(fleet: str) -> None:
    """End the keepers and the controller of a fleet."""
    for name in (*_keepers(fleet), controller_name(fleet)):
        with suppress(ValueError):  # the actor has ended
            ray.kill(ray.get_actor(name, NAMESPACE))


def keeper_of_this_node(spec: Spec) -> ActorHandle[Any]:
    """Return the keeper of this process's node, started if there is none."""
    node = ray.get_runtime_context().get_node_id()
    options = ACTOR_OPTIONS | {
        "name": _keeper_name(spec, node[:SHOWN]),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
    }
    actor_class = ray.remote(concurrency_groups={_RELAY: 16})(_Keeper)
    return actor_class.options(**options).remote(spec, node[:SHOWN])


def controller_name(fleet: str) -> str:
    return f"controller:{fleet}"


def _keeper_name(spec: Spec, node: str) -> str:
    return f"{_KEEPER}:{spec.fleet}:{spec.key}:{node}"
