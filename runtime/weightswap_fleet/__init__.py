"""Fleets on Ray Serve that change their weights together; docs/fleet.md.

Ray is imported on the first use of a name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weightswap_fleet.coordinator.agreement import Deadlines
from weightswap_runtime.errors import MissingExtra

from .documents import (
    FleetError,
    FleetPlan,
    FleetReceipt,
    FleetRefused,
    FleetUndecided,
    NodeReceipt,
    NodeStatus,
    StaleReplica,
    TrialReport,
    UnknownFleet,
)

if TYPE_CHECKING:
    from .client import Fleet, FleetClient, connect
    from .deploying import deployment
    from .replica import FleetAnswer


_MODULES = {
    "Fleet": "client",
    "FleetAnswer": "replica",
    "FleetClient": "client",
    "connect": "client",
    "deployment": "deploying",
}

__all__ = [
    "Deadlines",
    "Fleet",
    "FleetAnswer",
    "FleetClient",
    "FleetError",
    "FleetPlan",
    "FleetReceipt",
    "FleetRefused",
    "FleetUndecided",
    "NodeReceipt",
    "NodeStatus",
    "StaleReplica",
    "TrialReport",
    "UnknownFleet",
    "connect",
    "deployment",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is None:
        raise MissingExtra("a fleet", "ray")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
