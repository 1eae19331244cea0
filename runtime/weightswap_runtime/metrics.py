"""Metrics of models for Prometheus.

A model tells its listeners what happens. Counters are updated then; all else is asked of the model at each scrape.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

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

import re
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from weightswap_runtime.live.receipt import Event

from .errors import CallError, Unsupported
from .jobs import fork_safe

if TYPE_CHECKING:
    from weightswap_runtime.model.served import ServedModel

CALL_BUCKETS = tuple(value * 10.0**power for power in range(-5, 2) for value in (1, 2.5, 5))  # 10 us to 50 s
PAUSE_BUCKETS = tuple(value * 10.0**power for power in range(-7, 2) for value in (1, 2.5, 5))  # 100 ns to 50 s
MOST_LABELS = 20  # of the weights: each set of values is a series of its own, which Prometheus keeps
LONGEST_LABEL = 200  # characters of its name
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_ENDINGS = {"committed": "committed", "rolled back": "committed", "cancelled": "cancelled", "discarded": "discarded"}
F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily, InfoMetricFamily)


class ModelCollector(AbstractContextManager["ModelCollector"]):
    """A collector that counts what a model does from now on, and exposes it in a registry until `close()`.

    name: the label `model`, unique within a registry. Each of several models that share weights counts the swaps made
    through any of them. The registry keeps the collector alive but not the model: the metrics of a dropped model
    disappear. At most 20 labels of the weights are shown, each with at most 200 characters.

    Raises Unsupported if the registry has another model of that name. Importing this module raises MissingExtra
    without prometheus_client.
    """

    def __init__(self, model: ServedModel, name: str = "default", registry: CollectorRegistry = REGISTRY) -> None:
        self.name = name
        self._model = weakref.ref(model)
        self._tallies = Tallies()
        self._group = _join(registry, self)
        self._stops = (model.listen(self._tallies.on_event), model.observe(self._tallies.on_call))

    @property
    def model(self) -> ServedModel | None:
        """The model; None once it was dropped."""
        return self._model()

    def close(self) -> None:
        """Stop counting, and leave the registry. A second call does nothing."""
        for stop in self._stops:
            stop()
        self._group.leave(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_to(self, families: _Families, model: ServedModel) -> None:
        """Add the model's samples to all metrics."""
        families.add_served(self.name, model)
        with self._tallies.lock:
            families.add_tallies(self.name, self._tallies)


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
        return iter(vars(_Families()).values())

    def collect(self) -> Iterator[Metric]:
        families = _Families()
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
_lock = fork_safe(RLock())


class _Families:
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
        self.hash_trees = new(gauge, "hash_trees_bytes", "Memory for the digests of tables of which rows change.")
        self.calls = new(counter, "calls", "Calls.", "method", "outcome")
        self.call_seconds = new(histogram, "call_seconds", "Seconds of calls that were answered.", "method")
        self.swaps = new(counter, "swaps", "Stagings and rollbacks that have ended.", "kind", "outcome")
        self.failures = new(counter, "failures", "What was refused, failed or unreachable, by error.", "reason")
        self.skipped = new(counter, "skipped", "Files passed over by a watcher.")
        self.staged_bytes = new(counter, "staged_bytes", "Bytes read by stagings.")
        self.phase_seconds = new(SummaryMetricFamily, "phase_seconds", "Seconds of the phases of a staging.", "phase")
        self.pause_seconds = new(histogram, "pause_seconds", "Seconds that a commit could keep calls waiting.")

    def add_served(self, name: str, model: ServedModel) -> None:
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
        self.hash_trees.add_metric([name], model._store.trees.nbytes)
        progress = model.progress
        self.staging.add_metric([name], progress is not None)
        self.done.add_metric([name], progress.bytes_done if progress else 0)
        self.expected.add_metric([name], progress.bytes_total if progress else 0)

    def add_tallies(self, name: str, tallies: Tallies) -> None:
        for (method, outcome), count in tallies.calls.items():
            self.calls.add_metric([name, method, outcome], count)
        for method, latencies in tallies.latencies.items():
            self.call_seconds.add_metric([name, method], latencies.cumulative(), latencies.sum)
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


class Tallies:
    """Counters that `on_call` and `on_event` update. Readers hold `lock`, and may delay a call by that."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (method, outcome)
        self.latencies: dict[str, Distribution] = {}  # by method
        self.swaps: Counter[tuple[str, str]] = Counter()  # (operation, outcome)
        self.failures: Counter[str] = Counter()  # by error class
        self.skipped = 0
        self.staged_bytes = 0
        self.stagings = 0
        self.seconds_staged = 0.0
        self.seconds_verified = 0.0
        self.pauses = Distribution(PAUSE_BUCKETS)
        self.lock = fork_safe(RLock())  # reentrant: a signal handler may call the model while this thread holds it

    def on_call(self, method: str, seconds: float, error: BaseException | None) -> None:
        outcome = "ok" if error is None else "refused" if isinstance(error, CallError) else "failed"
        with self.lock:
            self.calls[method, outcome] += 1
            if error is None:
                if method not in self.latencies:
                    self.latencies[method] = Distribution(CALL_BUCKETS)
                self.latencies[method].observe(seconds)

    def on_event(self, event: Event) -> None:
        outcome = _outcome(event)
        with self.lock:
            if outcome is not None:
                self.swaps[event.operation or "unknown", outcome] += 1
            if event.kind in ("refused", "failed", "unreachable"):
                self.failures[type(event.error).__name__] += 1
            if event.kind in ("staged", "refused", "cancelled"):
                self.staged_bytes += event.nbytes
            if event.kind == "staged":
                self.stagings += 1
                self.seconds_staged += event.seconds_staged
                self.seconds_verified += event.seconds_verified
            if event.receipt is not None:
                self.pauses.observe(event.receipt.seconds_paused)
            self.skipped += event.kind == "skipped"


def _outcome(event: Event) -> str | None:
    """Return the outcome of the staging or rollback that this event ends. A refused commit does not end its staging."""
    if event.kind in ("refused", "failed"):
        is_end = event.phase != "committing" or event.operation == "rollback"
        return event.kind if is_end else None
    return _ENDINGS.get(event.kind)


class Distribution:
    """A histogram of seconds. `bounds` are the inclusive upper ends of its buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs (upper end as a text, count of values up to it); the last is for +Inf."""
        ends = [*(f"{bound:.10g}" for bound in self.bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))
