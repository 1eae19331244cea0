"""Metrics of several processes as those of one: what workers count is added up, and weights are the keeper's.

A process that has ended is still counted, as it was last known, or counters would go back. What only describes the
moment, a gauge, goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Role = Literal["keeper", "worker"]
MOST_SAMPLES = 10_000  # of processes that have ended; the oldest go
_BY_WORKERS = ("weightswap_server_", "weightswap_calls", "weightswap_call_seconds", "weightswap_leases")
_MOMENTARY = ("gauge", "unknown")


class _Key(NamedTuple):
    """One sample: of which family, its own name, its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]


class Totals:
    """What processes have told last, and its sum."""

    def __init__(self) -> None:
        self._living: dict[object, tuple[Role, str]] = {}  # read where somebody asks, as all tell it again and again
        self._ended: dict[_Key, float] = {}
        self._families: dict[str, Metric] = {}  # without samples

    def tell(self, process: object, role: Role, text: str) -> None:
        """What a process shows now, as Prometheus reads it."""
        self._living[process] = role, text

    def end(self, process: object) -> None:
        """A process has ended: its counters stay."""
        if process not in self._living:
            return
        for key, value in self._read(*self._living.pop(process)):
            if self._families[key.family].type not in _MOMENTARY:
                self._ended[key] = self._ended.pop(key, 0.0) + value
        for key in list(self._ended)[: max(0, len(self._ended) - MOST_SAMPLES)]:
            del self._ended[key]

    def text(self) -> str:
        """The sum, as Prometheus reads it."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """As a registry's."""
        sums = dict(self._ended)
        for role, text in self._living.values():
            for key, value in self._read(role, text):
                sums[key] = sums.get(key, 0.0) + value
        made = {name: Metric(name, each.documentation, each.type) for name, each in self._families.items()}
        for key, value in sums.items():
            made[key.family].add_sample(key.name, dict(key.labels), value)
        return iter(made.values())

    def _read(self, role: Role, text: str) -> Iterator[tuple[_Key, float]]:
        """What a process of this role knows best. When its counters began is nobody's business but its own."""
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_BY_WORKERS) == (role == "worker") and not family.name.endswith("_created"):
                self._families[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    yield _Key(family.name, sample.name, tuple(sample.labels.items())), sample.value
