"""Prometheus metrics of models: `ModelCollector(model, name="digits")`.

Every metric has the label `model`. Counters begin at 0 when the collector is made.

weightswap_generation                   gauge
weightswap_committed_timestamp_seconds  gauge: when the weights that are served were committed
weightswap_failed                       gauge: 1 while calls are refused after an in-place commit failed, else 0
weightswap_model_info                   graph_id, weights_id, and labels of the weights that are served as label_<name>
weightswap_leases                       gauge: calls and pins that hold weights now
weightswap_calls_total                  method; outcome: ok, refused (a CallError), failed (any other error)
weightswap_call_seconds                 histogram: method; calls with the outcome ok
weightswap_swaps_total                  kind: full, partial, delta, rollback, unknown (refused before that was known);
                                        outcome: committed, refused, cancelled, discarded, failed (rollbacks).
                                        Each staging and each rollback counts once, when it ends
weightswap_failures_total               reason: the error class of each refusal, failure and unreachable source
weightswap_skipped_total                files of watched directories that were skipped
weightswap_staged_bytes_total           bytes read by all stagings, committed or not
weightswap_phase_seconds                summary: phase: staging (reading and hashing), verifying
weightswap_pause_seconds                histogram: how long each commit could keep calls waiting
weightswap_staging                      gauge: 1 while a staging is under way, else 0
weightswap_staging_done_bytes           gauge: bytes done in the current phase of that staging
weightswap_staging_expected_bytes       gauge: total bytes of that phase
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from .errors import MissingExtra, Unsupported
from .live.tallies import Tallies
from .threads.job import Progress

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
        SummaryMetricFamily,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtra("weightswap_runtime.metrics", "metrics") from error

if TYPE_CHECKING:
    from .live.model import Model

MOST_LABELS = 20
LONGEST_LABEL = 200
F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily, InfoMetricFamily)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class ModelCollector(AbstractContextManager["ModelCollector"]):
    """A collector that counts what a model does from now on, and exposes it in a registry until `close()`.

    name: the label `model`, unique within a registry. Each of several models that share weights counts the swaps made
    through any of them. The registry keeps the collector alive but not the model: the metrics of a dropped model
    disappear. At most 20 labels of the weights are shown, each with at most 200 characters.

    Raises Unsupported if the registry has another model of that name. Importing this module raises MissingExtra
    without prometheus_client.
    """

    def __init__(self, model: Model, name: str = "default", registry: CollectorRegistry = REGISTRY) -> None:
        self.name = name
        self._model = weakref.ref(model)
        self._tallies = Tallies()
        self._group = _join(registry, self)
        self._stops = (model.listen(self._tallies.on_event), model.observe(self._tallies.on_call))

    @property
    def model(self) -> Model | None:
        """The model; None once it was dropped."""
        return self._model()

    def close(self) -> None:
        """Stop counting, and leave the registry. A second call does nothing."""
        for stop in self._stops:
            stop()
        self._group.leave(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_to(self, families: Families, model: Model) -> None:
        """Add the model's samples to all metrics."""
        families.add_served(self.name, model)
        families.add_staging(self.name, model.progress)
        with self._tallies.lock:
            families.add_calls(self.name, self._tallies)
            families.add_swaps(self.name, self._tallies)


class Families:
    """The metrics of a registry; each appears once, with samples of every model."""

    def __init__(self) -> None:
        def new(kind: type[F], name: str, documentation: str, *labels: str) -> F:
            return kind(f"weightswap_{name}", documentation, labels=("model", *labels))

        gauge, counter, histogram = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
        self.generation = new(gauge, "generation", "The generation of the weights that are served.")
        self.committed = new(gauge, "committed_timestamp_seconds", "When the weights that are served were committed.")
        self.failed = new(gauge, "failed", "1 while calls are refused after an in-place commit failed.")
        self.info = new(InfoMetricFamily, "model", "The weights that are served.")
        self.leases = new(gauge, "leases", "Calls and pins that hold weights now.")
        self.staging = new(gauge, "staging", "1 while a staging is under way.")
        self.done = new(gauge, "staging_done_bytes", "Bytes done in the phase of the staging that is under way.")
        self.expected = new(gauge, "staging_expected_bytes", "Bytes of that phase in all.")
        self.calls = new(counter, "calls", "Calls.", "method", "outcome")
        self.call_seconds = new(histogram, "call_seconds", "Seconds of calls that were answered.", "method")
        self.swaps = new(counter, "swaps", "Stagings and rollbacks that have ended.", "kind", "outcome")
        self.failures = new(counter, "failures", "What was refused, failed or unreachable, by error.", "reason")
        self.skipped = new(counter, "skipped", "Files passed over by a watcher.")
        self.staged_bytes = new(counter, "staged_bytes", "Bytes read by stagings.")
        self.phase_seconds = new(SummaryMetricFamily, "phase_seconds", "Seconds of the phases of a staging.", "phase")
        self.pause_seconds = new(histogram, "pause_seconds", "Seconds that a commit could keep calls waiting.")

    def add_served(self, name: str, model: Model) -> None:
        current, history = model._gate.current, model.history
        info = {"graph_id": model.graph_id}
        if current is not None:
            info |= {"weights_id": current.weights_id, **_info_labels(current.labels)}
            self.generation.add_metric([name], current.generation)
        if history:
            self.committed.add_metric([name], history[-1].committed_at)
        self.info.add_metric([name], info)
        self.failed.add_metric([name], model.failed)
        self.leases.add_metric([name], model._store.leases)

    def add_staging(self, name: str, progress: Progress | None) -> None:
        self.staging.add_metric([name], progress is not None)
        _, done, total = progress or Progress("", 0, 0)
        self.done.add_metric([name], done)
        self.expected.add_metric([name], total)

    def add_calls(self, name: str, tallies: Tallies) -> None:
        for (method, outcome), count in tallies.calls.items():
            self.calls.add_metric([name, method, outcome], count)
        for method, latencies in tallies.latencies.items():
            self.call_seconds.add_metric([name, method], latencies.cumulative(), latencies.sum)

    def add_swaps(self, name: str, tallies: Tallies) -> None:
        for (kind, outcome), count in tallies.swaps.items():
            self.swaps.add_metric([name, kind, outcome], count)
        for reason, count in tallies.failures.items():
            self.failures.add_metric([name, reason], count)
        self.skipped.add_metric([name], tallies.skipped)
        self.staged_bytes.add_metric([name], tallies.staged_bytes)
        self.phase_seconds.add_metric([name, "staging"], tallies.stagings, tallies.seconds_staged)
        self.phase_seconds.add_metric([name, "verifying"], tallies.stagings, tallies.seconds_verified)
        self.pause_seconds.add_metric([name], tallies.pauses.cumulative(), tallies.pauses.sum)


def _info_labels(labels: Mapping[str, str]) -> dict[str, str]:
    shown: dict[str, str] = {}
    for name, text in sorted(labels.items())[:MOST_LABELS]:
        label = f"label_{_NOT_IN_NAMES.sub('_', name)}"[:LONGEST_LABEL]
        while label in shown:  # two names may differ only in characters that Prometheus does not allow
            label += "_"
        shown[label] = text[:LONGEST_LABEL]
    return shown


class _Group(Collector):
    """All model collectors of one registry, as one: a registry accepts each metric from one collector only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = weakref.ref(registry)
        self._members: dict[str, ModelCollector] = {}

    def join(self, member: ModelCollector) -> None:
        other = self._members.get(member.name)
        if other is not None and other.model is not None:
            raise Unsupported(
                f"name={member.name!r}: another model in this registry has this name; give each its own, or "
                "close() the other's collector"
            )
        self._members[member.name] = member
        if other is not None:
            other.close()

    def leave(self, member: ModelCollector) -> None:
        with _lock:
            if self._members.get(member.name) is member:
                del self._members[member.name]
            if not self._members and (registry := self._registry()) in _groups:
                assert registry is not None
                del _groups[registry]
                registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        return iter(vars(Families()).values())

    def collect(self) -> Iterator[Metric]:
        families = Families()
        with _lock:
            members = list(self._members.values())
        for member in members:
            model = member.model
            if model is None:
                member.close()
            else:
                member.add_to(families, model)
        return iter(vars(families).values())


def _join(registry: CollectorRegistry, member: ModelCollector) -> _Group:
    with _lock:
        group = _groups.get(registry)
        if group is None:
            group = _Group(registry)
            registry.register(group)
            _groups[registry] = group
        group.join(member)
        return group


_groups: weakref.WeakKeyDictionary[CollectorRegistry, _Group] = weakref.WeakKeyDictionary()
_lock = RLock()


def _after_fork() -> None:
    """Replace the lock: a thread that held it in the parent does not exist in the child."""
    global _lock  # noqa: PLW0603
    _lock = RLock()


os.register_at_fork(after_in_child=_after_fork)
