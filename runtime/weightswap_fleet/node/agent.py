"""Agents, which have weights and take part in the fleet's changes; that of a node owns the memory of its replicas."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from weightswap_fleet.documents import DeploymentSpec, NodeStatus
from weightswap_runtime.errors import NoWeights, text_of
from weightswap_runtime.metrics import ModelCollector
from weightswap_runtime.model.served import ServedModel
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import own
from weightswap_server.workers.child_main import Totals

from .changes import NodeChanges
from .memory import NodeMemory, NodeWeights, Slots, open_artifact
from .relay import Relay

_MOST_REPLICAS = 64  # of one node
_log = logging.getLogger("weightswap.fleet")


class Agent(NodeChanges):
    """What has weights, follows the desired store with them, and takes part in changes, with the `NodeMethods` of
    these.

    Every method may be called from any thread; `close` ends it.
    """

    def __init__(
        self, weights: NodeWeights, control: Control | None, clock: Callable[[], float], is_deployed: bool
    ) -> None:
        """The arguments are those of `NodeChanges`. `start` makes it follow the desired store."""
        super().__init__(weights, control, clock, is_deployed)
        self.node, self.model = weights.node, weights.model
        self._metrics = NodeMetrics(weights.spec.model, self.model)
        self._metrics.add_gauge("weightswap_fleet_revision", "The served revision.", lambda: weights.revision)
        self._metrics.add_gauge(
            "weightswap_fleet_unread_seconds",
            "Seconds since the desired store was read.",
            lambda: max(0.0, self._desired_store.unread),
        )
        self._thread = threading.Thread(target=self._run, name="weightswap-agent", daemon=True)

    @property
    def spec(self) -> DeploymentSpec:
        """The latest deployment."""
        return self._weights.spec

    @property
    def replicas(self) -> tuple[int, ...]:
        """The process ids of the replicas that serve the weights."""
        raise NotImplementedError

    @property
    def ranks(self) -> tuple[int, ...]:
        """The process ids of all ranks of a model on several, in their order."""
        return ()

    def start(self) -> None:
        """Start the thread that follows the desired store."""
        self._thread.start()

    def metrics(self) -> str:
        """Return the metrics of this node."""
        return self._metrics.text()

    def status(self) -> NodeStatus:
        """Return the status of this node."""
        state, trial = self.reconciler.state, self.trial()
        return NodeStatus(
            node=self.node,
            spec=self.spec,
            agent=os.getpid(),
            weights_id=self.model.weights_id,
            generation=self.model.generation,
            revision=self._weights.revision,
            since=self.model.history[-1].committed_at if self.model.history else None,
            read=state.revision if state else 0,
            reachable=self.reconciler.reachable and not self._silence,
            preparing=self.preparing,
            trying=trial[0].weights.weights_id if trial else "",
            replicas=self.replicas,
            error=self._error,
            refused=self._weights.refused,
            ranks=self.ranks,
        )

    @property
    def _silence(self) -> str:
        return self._desired_store.silence(self.spec.interval)

    @property
    def _error(self) -> str:
        if self.reconciler.reachable and (silence := self._silence):
            return silence
        error = self.reconciler.last_error
        return text_of(error) if error is not None else ""

    def _check_serves(self) -> None:
        """Raise NoWeights unless the desired weights are served, or were once."""
        if self._weights.revision == 0:
            raise NoWeights(*(self._error or f"{self.spec.desired_store}: no weights are desired yet").splitlines())

    def close(self) -> None:
        """End the agent. Replicas in other processes go on serving the weights that they have."""
        self.stopped.set()
        self.wakeup.set()
        if self._thread.is_alive():
            self._thread.join()
        self._changes.close()
        self._metrics.close()
        self.model.close()

    def _run(self) -> None:
        while not self.stopped.is_set():
            self.wakeup.wait(self.spec.interval)
            self.wakeup.clear()
            self._sweep()
            try:
                self.reconcile()
            except Exception:
                _log.exception("%s: could not follow %s", self.node, self.spec.desired_store)

    def _sweep(self) -> None:
        """Forget what has ended. Called regularly."""


class NodeAgent(Agent):
    """The agent of a node, with the `NodeMethods`. Every method may be called from any thread; `close` ends it."""

    def __init__(
        self,
        spec: DeploymentSpec,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        relay: Relay | None = None,
        again: bool = False,
    ) -> None:
        """Serves the desired weights at once, if possible; `start` makes it follow the desired store.

        node: its unique name. relay: None: each node reads URLs for itself. again: this agent replaces one that has
        died, so `spec` may be of an old deployment. In that case, or if it finds replicas with its memory, which it
        serves on, it changes nothing until a replica has sent its deployment.
        Raises ArtifactError, MissingExtra, OutOfMemory and Unsupported.
        """
        artifact = open_artifact(spec)
        name = f"weightswap.{spec.fleet}.{spec.key}.{node}"  # of its memory, by which a later agent finds it
        adopted = NodeMemory.adopt(name)
        self._memory = adopted or NodeMemory.create(artifact.manifest.weights, _MOST_REPLICAS, name)
        control = Control(self._memory.segment.control)
        weights = NodeWeights(spec, node, own(artifact, self._memory.segment), self._memory.revision_page, relay)
        super().__init__(weights, control, clock, is_deployed=adopted is None and not again)
        self._relay = relay
        self._slots = Slots(control, lambda pid: NodeMemory.is_held_by(pid, name))
        self.reconcile()

    @property
    def replicas(self) -> tuple[int, ...]:
        return self._slots.processes

    def attach(self, pid: int, spec: DeploymentSpec) -> tuple[int, tuple[int, ...], int]:
        """Give a replica of this node a slot, and adopt its deployment if it is the latest.

        Returns the agent's process id, the memory's descriptors, which are opened through it, and the slot's number in
        the memory's control page.

        Raises Unsupported, and NoWeights if the node serves nothing, or not the desired weights.
        """
        self.deploy(spec)
        if self._weights.revision == 0:
            self.reconcile()  # again, with the deployment
        self._check_serves()
        return os.getpid(), self._memory.descriptors, self._slots.assign(pid)

    def report(self, pid: int, metrics: str, spec: DeploymentSpec) -> None:
        """Keep a replica's metrics, in Prometheus' text format, and adopt its deployment if it is the latest."""
        if pid in self._slots.processes:
            self._metrics.update(pid, metrics)
        self.deploy(spec)

    def close(self) -> None:
        super().close()
        self._slots.close()
        self._memory.close()

    def _sweep(self) -> None:
        self._slots.sweep()
        self._metrics.end_others(self._slots.processes)
        if self._relay is not None:
            self._relay.sweep(time.monotonic())


class NodeMetrics:
    """The metrics of one node: those of weights from its agent, and those of calls, summed over its replicas. Every
    method may be called from any thread."""

    def __init__(self, name: str, model: ServedModel) -> None:
        """name: the label `model`."""
        self._name = name
        self._registry = CollectorRegistry()
        self._collector = ModelCollector(model, name, self._registry)
        self._totals = Totals()
        self._replicas: set[int] = set()  # process ids
        self._lock = threading.Lock()

    def update(self, pid: int, text: str) -> None:
        """Replace a replica's metrics. text: Prometheus' text format."""
        with self._lock:
            self._replicas.add(pid)
            self._totals.update(pid, "worker", text)

    def add_gauge(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Add a gauge of the node itself. value: called at each scrape."""
        Gauge(name, description, ["model"], registry=self._registry).labels(self._name).set_function(value)

    def end_others(self, living: Collection[int]) -> None:
        """Keep the counters of all replicas that have ended."""
        with self._lock:
            for pid in self._replicas.difference(living):
                self._totals.end(pid)
                self._replicas.remove(pid)

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        with self._lock:
            self._totals.update("agent", "owner", generate_latest(self._registry).decode())
            return self._totals.text()

    def close(self) -> None:
        self._collector.close()


def joined(nodes: Mapping[str, str]) -> str:
    """Join the metrics of several nodes, with the label `node`.

    Every replica returns those of all, so that no counter jumps if a proxy sends each scrape to another replica.
    """
    return generate_latest(_Joined(nodes)).decode()


class _Joined:
    def __init__(self, nodes: Mapping[str, str]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for node, text in self._nodes.items():
            for family in text_string_to_metric_families(text):
                metric = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, "node": node}, sample.value)
        return iter(joined.values())
