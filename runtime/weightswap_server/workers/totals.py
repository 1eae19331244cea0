"""Metrics of several processes as those of one: requests are summed over workers, weights are the keeper's.

The last counters of a process that has ended still count, or totals would go backwards. Its gauges are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Role = Literal["keeper", "worker"]
MOST_SAMPLES = 10_000  # of processes that have ended; the oldest are dropped
_BY_WORKERS = ("weightswap_server_", "weightswap_calls", "weightswap_call_seconds", "weightswap_leases")
_MOMENTARY = ("gauge", "unknown")


class _Key(NamedTuple):
    """The key of a sample: its family, its name, its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]


class Totals:
    """The latest metrics of each process, and their totals."""

    def __init__(self) -> None:
        self._living: dict[object, tuple[Role, str]] = {}  # parsed on request alone: reports come each second
        self._ended: dict[_Key, float] = {}
        self._families: dict[str, Metric] = {}  # without samples

    def update(self, process: object, role: Role, text: str) -> None:
        """Replace a process's metrics. text: Prometheus' text format."""
        self._living[process] = role, text

    def end(self, process: object) -> None:
        """Keep the counters of a process that has ended."""
        if process not in self._living:
            return
        for key, value in self._read(*self._living.pop(process)):
            if self._families[key.family].type not in _MOMENTARY:
                self._ended[key] = self._ended.pop(key, 0.0) + value
        for key in list(self._ended)[: max(0, len(self._ended) - MOST_SAMPLES)]:
            del self._ended[key]

    def text(self) -> str:
        """Return the totals in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Return the totals, as a registry's collector."""
        sums = dict(self._ended)
        for role, text in self._living.values():
            for key, value in self._read(role, text):
                sums[key] = sums.get(key, 0.0) + value
        totals = {name: Metric(name, family.documentation, family.type) for name, family in self._families.items()}
        for key, value in sums.items():
            totals[key.family].add_sample(key.name, dict(key.labels), value)
        return iter(totals.values())

    def _read(self, role: Role, text: str) -> Iterator[tuple[_Key, float]]:
        """Yield the samples that count for a process of this role, without creation times."""
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_BY_WORKERS) == (role == "worker") and not family.name.endswith("_created"):
                self._families[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    yield _Key(family.name, sample.name, tuple(sample.labels.items())), sample.value
