"""Metrics of a server's requests for Prometheus, beside `weightswap_runtime.metrics` of its models.

weightswap_server_requests_total       model, weights_id, status: that of HTTP, for gRPC requests, too
weightswap_server_request_seconds      histogram: model, weights_id; from a request's arrival in the queue to its answer
weightswap_server_queue_seconds        histogram: model, weights_id; until the call of the model began
weightswap_server_batch_calls          histogram: model, weights_id; requests that one call of the model answered
weightswap_server_canary_errors_total, _compared_total, _differing_total   model, weights_id: of a canary
weightswap_server_queued               gauge: model; requests in the queue
weightswap_server_streams              gauge: open generations
"""

from __future__ import annotations

import time
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from weightswap_runtime.metrics import ModelCollector
from weightswap_runtime.model.served import ServedModel
from weightswap_server.protocol import Answer

if TYPE_CHECKING:
    from .batching import Call, ModelThread


MOST_WEIGHTS = 8  # weights ids per model whose series are kept; those of older ones are removed
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALLS = (1, 2, 4, 8, 16, 32, 64, 128)
_LABELS = ("model", "weights_id")


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "weightswap_server_requests", "Requests that were answered.", (*_LABELS, "status"), registry=registry
        )
        histogram = partial(Histogram, namespace="weightswap_server", labelnames=_LABELS, registry=registry)
        self.seconds = histogram("request_seconds", "From a request's arrival to its answer.", buckets=_SECONDS)
        self.queue_seconds = histogram(
            "queue_seconds", "From a request's arrival to a call of the model.", buckets=_SECONDS
        )
        self.batch_calls = histogram("batch_calls", "Requests that one call answered.", buckets=_CALLS)
        self.queued = Gauge("weightswap_server_queued", "Waiting requests.", ("model",), registry=registry)
        self.streams = Gauge("weightswap_server_streams", "Open generations.", registry=registry)
        counter = partial(Counter, namespace="weightswap_server_canary", labelnames=_LABELS, registry=registry)
        self._trials = {
            "errors": counter("errors", "Calls of a canary that failed."),
            "compared": counter("compared", "Answers that a canary gave beside the served weights."),
            "differing": counter("differing", "Answers of a canary that differed."),
        }
        self._known: dict[tuple[str, str], _Series] = {}
        self._lock = Lock()
        self.answers = 0  # of any weights
        self._collectors: list[ModelCollector] = []

    def watch(self, name: str, model: ServedModel, thread: ModelThread) -> None:
        """Add a model's own metrics, and the length of its queue."""
        self._collectors.append(ModelCollector(model, name, self._registry))
        self.queued.labels(name).set_function(lambda: thread.queued)

    def answered(self, name: str, weights_id: str) -> None:
        """Count a request that was answered."""
        self._answered(self._series(name, weights_id))

    def called(self, call: Call, answer: Answer, began: float, together: int) -> None:
        """Observe one request's call. Its answer may still not reach the client: it is late, or cannot be JSON."""
        series = self._series(call.name, answer.weights_id)
        series.seconds.observe(time.perf_counter() - call.arrived)
        series.queue_seconds.observe(began - call.arrived)
        series.batch_calls.observe(together)

    def generated(self, name: str, weights_id: str, seconds: float) -> None:
        """Count a generation that has ended."""
        series = self._series(name, weights_id)
        self._answered(series)
        series.seconds.observe(seconds)

    def tried(self, name: str, kind: str, weights_id: str) -> None:
        """Count an event of a canary. kind: "errors", "compared" or "differing"."""
        self._series(name, weights_id)
        self._trials[kind].labels(name, weights_id).inc()

    def refused(self, name: str, weights_id: str | None, status: int) -> None:
        """Count a request that was not answered. name: "" if no such model is served."""
        self._series(name, weights_id or "")
        self.requests.labels(name, weights_id or "", str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def load(self) -> list[Metric]:
        """Return the counts and latencies of requests."""
        return [*self.seconds.collect(), *self.requests.collect()]

    def close(self) -> None:
        for collector in self._collectors:
            collector.close()

    def _answered(self, series: _Series) -> None:
        series.answered.inc()
        with self._lock:
            self.answers += 1

    def _series(self, name: str, weights_id: str) -> _Series:
        """Return the series of these weights. The oldest of a model with too many weights are removed."""
        if (known := self._known.get((name, weights_id))) is not None:
            return known
        with self._lock:
            keys = [key for key in self._known if key[0] == name]
            for old in keys[: max(0, len(keys) + 1 - MOST_WEIGHTS)]:
                del self._known[old]
                series = (self.requests, self.seconds, self.queue_seconds, self.batch_calls)
                for metric in (*series, *self._trials.values()):
                    metric.remove_by_labels(dict(zip(_LABELS, old, strict=True)))
            created = self._known[name, weights_id] = _Series(
                self.requests.labels(name, weights_id, "200"),
                *(metric.labels(name, weights_id) for metric in (self.seconds, self.queue_seconds, self.batch_calls)),
            )
        return created


class _Series(NamedTuple):
    answered: Counter
    seconds: Histogram
    queue_seconds: Histogram
    batch_calls: Histogram
