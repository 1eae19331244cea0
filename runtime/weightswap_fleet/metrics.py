"""Metrics of a fleet: of each node, what its keeper counts of weights, and the sum of what its replicas count of calls.

Any replica shows those of all nodes, so that no counter jumps where a proxy asks another one each time.

weightswap_fleet_revision        gauge: the revision of the desired state that a node serves
weightswap_fleet_unread_seconds  gauge: since a node has read the desired state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from weightswap_runtime.live.model import Model
from weightswap_runtime.metrics import ModelCollector
from weightswap_server.workers.totals import Totals


class NodeMetrics:
    """Those of one node, which its keeper has. Every method may be called from any thread."""

    def __init__(self, name: str, model: Model) -> None:
        """name: the label `model`."""
        self._name = name
        self._registry = CollectorRegistry()
        self._collector = ModelCollector(model, name, self._registry)
        self._totals = Totals()
        self._told: set[int] = set()
        self._lock = Lock()

    def tell(self, pid: int, text: str) -> None:
        """What a replica shows now, as Prometheus reads it."""
        with self._lock:
            self._told.add(pid)
            self._totals.update(pid, "worker", text)

    def show(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A number of the node itself, as it is whenever it is asked for."""
        Gauge(name, what, ["model"], registry=self._registry).labels(self._name).set_function(value)

    def keep(self, living: Collection[int]) -> None:
        """Other replicas have ended: their counters stay."""
        with self._lock:
            for pid in self._told.difference(living):
                self._totals.end(pid)
                self._told.remove(pid)

    def text(self) -> str:
        """As Prometheus reads it."""
        with self._lock:
            self._totals.update("keeper", "keeper", generate_latest(self._registry).decode())
            return self._totals.text()

    def close(self) -> None:
        self._collector.close()


def joined(nodes: Mapping[str, str]) -> str:
    """The metrics of several nodes, with the label `node`."""
    return generate_latest(_Joined(nodes)).decode()


class _Joined:
    """As a registry."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        made: dict[str, Metric] = {}
        for node, text in self._nodes.items():
            for family in text_string_to_metric_families(text):
                found = made.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    found.add_sample(sample.name, {**sample.labels, "node": node}, sample.value)
        return iter(made.values())
