"""Load of each model in each of the last seconds, from the server's metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from prometheus_client.core import Metric

KEPT = 600  # points of each model
EVERY = 1.0  # seconds between two
_Series = tuple[str, str]  # the requested name, and the weights id


class LoadPoint(Struct, kw_only=True):
    """The requests of about one second, which ended at `time`, in seconds since the epoch.

    refused, failed: responses with 4xx and 5xx. p50, p99: seconds, estimated from the buckets of
    `weightswap_server_request_seconds`; None without answers. weights: answers by weights id.
    """

    time: float
    seconds: float
    answered: int
    refused: int
    failed: int
    p50: float | None
    p99: float | None
    weights: dict[str, int]


class _Totals(NamedTuple):
    """Totals since the server's start: calls by the limit of their bucket, and refusals by status."""

    buckets: dict[_Series, dict[float, float]]
    refusals: dict[str, Counter[str]]


class LoadSeries:
    """The latest points of each model. `sample` is called by one thread, `after` by any."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]], models: Mapping[str, Iterable[str]]) -> None:
        """metrics: returns the metrics so far. models: by model, the names that requests use."""
        self._metrics = metrics
        self._models = {name: frozenset(names) for name, names in models.items()}
        self._points: dict[str, deque[LoadPoint]] = {name: deque(maxlen=KEPT) for name in models}
        self._at, self._totals = time.monotonic(), _totals(metrics())

    def sample(self) -> None:
        """Add a point to each model."""
        before, began = self._totals, self._at
        self._totals, self._at = _totals(self._metrics()), time.monotonic()
        for model, names in self._models.items():
            self._points[model].append(_point(before, self._totals, names, self._at - began))

    def after(self, model: str, moment: float) -> list[LoadPoint]:
        """Return the points after a time, oldest first."""
        return [point for point in list(self._points[model]) if point.time > moment]


def _totals(metrics: Iterable[Metric]) -> _Totals:
    totals = _Totals({}, {})
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name == "weightswap_server_request_seconds_bucket":
            series = sample.labels["model"], sample.labels["weights_id"]
            totals.buckets.setdefault(series, {})[float(sample.labels["le"])] = sample.value
        elif sample.name == "weightswap_server_requests_total" and sample.labels["status"] != "200":
            refusals = totals.refusals.setdefault(sample.labels["model"], Counter())
            refusals[sample.labels["status"]] += int(sample.value)
    return totals


def _point(before: _Totals, after: _Totals, names: frozenset[str], seconds: float) -> LoadPoint:
    weights: Counter[str] = Counter()
    buckets: Counter[float] = Counter()
    for series, now in after.buckets.items():
        if series[0] in names:
            then = before.buckets.get(series, {})
            grown = {limit: int(value - then.get(limit, 0.0)) for limit, value in now.items()}
            weights[series[1]] += max(grown.values())
            buckets.update(grown)
    refusals: Counter[str] = Counter()
    for name in names & after.refusals.keys():
        refusals += after.refusals[name] - before.refusals.get(name, Counter())
    ordered = sorted(buckets.items())
    return LoadPoint(
        time=time.time(),
        seconds=seconds,
        answered=weights.total(),
        refused=sum(count for status, count in refusals.items() if status < "500"),
        failed=sum(count for status, count in refusals.items() if status >= "500"),
        p50=quantile(ordered, 0.5),
        p99=quantile(ordered, 0.99),
        weights={weights_id: count for weights_id, count in weights.items() if count},
    )


def quantile(buckets: Sequence[tuple[float, int]], share: float) -> float | None:
    """Estimate a quantile of a histogram, with values spread evenly over their bucket, as Prometheus does.

    buckets: ascending upper limits with cumulative counts. None if they are empty.
    """
    total = buckets[-1][1] if buckets else 0
    if total == 0:
        return None
    rank, low, below = share * total, 0.0, 0
    for limit, count in buckets:
        if count >= rank and count > below:
            return low if limit == float("inf") else low + (limit - low) * (rank - below) / (count - below)
        low, below = limit, count
    return low
