"""Processes that are killed, or do not answer, while a fleet changes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from weightswap_fleet import Deadlines, NodeStatus

from .clusters import NODE, Deployed, calling, frozen, served, soon, until

VICTIMS = ["agent", "frozen agent", "replica", "coordinator", "coordinator's process"]  # on each node, or once


def survive(deployed: Deployed, deaths: Sequence[tuple[str, float]]) -> None:
    """Change a fleet while processes die, each after so many seconds. In the end all serve the desired weights, and no
    answer was wrong."""
    fleet, files, _ = deployed
    refusals: list[str] = []
    with calling(deployed) as clients:
        for turn, (victim, after) in enumerate(deaths):
            nodes = soon(lambda: list(fleet.nodes.values()))
            node = nodes[turn % len(nodes)]
            killing = threading.Timer(after, killer(deployed, victim, node))
            killing.start()
            try:
                fleet.swap(files.weights[1 + turn % 5], deadlines=Deadlines(prepare=10.0, commit=0.5))
            except Exception as error:
                refusals.append(type(error).__name__)
            killing.join()
            if victim == "node":
                deployed.cluster.add_node(**NODE)  # another; not beside the change, as it sets handlers of signals
            time.sleep(1.0)
        assert soon(lambda: fleet.wait(120))
        # a change whose coordinator died is open until its lease is over
        receipt = soon(lambda: fleet.swap(files.weights[1]))
        until(lambda: all(client.has_seen(receipt.revision) for client in clients), 300)  # all replicas may begin again
        assert soon(lambda: fleet.wait(120))  # a node may be late
    # an agent that was killed, or the coordinator, or the agents of all nodes that have replicas
    assert set(refusals) <= {"FleetRefused", "FleetUndecided", "UnknownFleet"}
    assert served(fleet) == {receipt.weights_id}


def killer(deployed: Deployed, victim: str, node: NodeStatus) -> Callable[[], object]:
    """Return a function that kills a victim, on that node if each node has one."""
    import ray

    if victim == "node":
        return partial(deployed.cluster.remove_node, other_node(deployed.cluster), allow_graceful=False)
    if victim == "coordinator":
        return partial(ray.kill, coordinator(), no_restart=False)
    pid = pid_of(coordinator()) if victim == "coordinator's process" else (node.agent if "agent" in victim else 0)
    pid = pid or (*node.replicas, 0)[0]
    if not pid:  # a node that does not answer
        return lambda: None
    return partial(freeze, pid) if victim == "frozen agent" else partial(os.kill, pid, signal.SIGKILL)


def other_node(made: Any) -> Any:
    """Return a node without Ray's head and this process."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    return next(each for each in made.list_all_nodes() if not each.is_head() and each.node_id != mine)


def freeze(pid: int) -> None:
    with frozen(pid):
        time.sleep(1.0)


def coordinator() -> Any:
    import ray

    return ray.get_actor("coordinator:numbered", "weightswap")


def pid_of(actor: Any) -> int:
    """Return the pid of an actor, once it has a process."""
    import ray

    def ask() -> Any:
        with suppress(ray.exceptions.RayActorError):  # it begins again
            return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=120)

    return int(until(ask))
