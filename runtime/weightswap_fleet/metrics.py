"""Metrics of a fleet: for each node, those of weights from its agent, and those of calls, summed over its replicas.

Every replica returns those of all nodes, so that no counter jumps if a proxy sends each scrape to another replica.

weightswap_fleet_revision        gauge: the revision of the desired state that a node serves
weightswap_fleet_unread_seconds  gauge: seconds since a node has read the desired state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from weightswap_runtime.metrics import ModelCollector
from weightswap_runtime.model.served import ServedModel
from weightswap_server.workers.child_main import Totals


class NodeMetrics:
    """The metrics of one node, in its agent. Every method may be called from any thread."""

    def __init__(self, name: str, model: ServedModel) -> None:
        """name: the label `model`."""
        self._name = name
        self._registry = CollectorRegistry()
        self._collector = ModelCollector(model, name, self._registry)
        self._totals = Totals()
        self._replicas: set[int] = set()  # process ids
        self._lock = Lock()

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
    """Join the metrics of several nodes, with the label `node`."""
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
