"""Metrics of several processes as those of one: what workers count is added up, and weights are the keeper's.

A process that has ended is still counted, as it was last known, or counters would go back. What only describes the
moment, a gauge, goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


class _Counted(NamedTuple):
    """What one process shows."""

    families: dict[str, Metric]  # without samples
    samples: dict[_Key, float]


class _Told(NamedTuple):
    """What one process has told last; read only where somebody asks, as all tell it again and again."""

    role: Role
    text: str

    def read(self) -> _Counted:
        return _read(self.text, self.role)


class Totals:
    """What processes have told last, and its sum."""

    def __init__(self) -> None:
        self._living: dict[object, _Told] = {}
        self._ended: dict[_Key, float] = {}
        self._families: dict[str, Metric] = {}

    def tell(self, process: object, role: Role, text: str) -> None:
        """What a process shows now, as Prometheus reads it."""
        self._living[process] = _Told(role, text)

    def end(self, process: object) -> None:
        """A process has ended: its counters stay."""
        told = self._living.pop(process, None)
        counted = told.read() if told else _Counted({}, {})
        self._families |= counted.families
        for key, value in counted.samples.items():
            if counted.families[key.family].type not in _MOMENTARY:
                self._ended[key] = self._ended.pop(key, 0.0) + value
        for key in list(self._ended)[: max(0, len(self._ended) - MOST_SAMPLES)]:
            del self._ended[key]

    def text(self) -> str:
        """The sum, as Prometheus reads it."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """As a registry's."""
        sums = dict(self._ended)
        for told in self._living.values():
            counted = told.read()
            self._families |= counted.families
            for key, value in counted.samples.items():
                sums[key] = sums.get(key, 0.0) + value
        made = {name: Metric(name, each.documentation, each.type) for name, each in self._families.items()}
        for key, value in sums.items():
            made[key.family].add_sample(key.name, dict(key.labels), value)
        return iter(made.values())


def _read(text: str, role: Role) -> _Counted:
    counted = _Counted({}, {})
    for family in _theirs(text_string_to_metric_families(text), role):
        counted.families[family.name] = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            counted.samples[_Key(family.name, sample.name, tuple(sample.labels.items()))] = sample.value
    return counted


def _theirs(families: Iterable[Metric], role: Role) -> Iterator[Metric]:
    """What a process of this role knows best. When its counters began is nobody's business but its own."""
    for family in families:
        if family.name.startswith(_BY_WORKERS) == (role == "worker") and not family.name.endswith("_created"):
            yield family
