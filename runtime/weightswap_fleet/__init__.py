"""Fleets on Ray Serve that change their weights together; docs/fleet.md."""

from .agreement import Deadlines
from .client import Fleet, FleetClient, connect
from .deploying import deployment
from .documents import FleetReceipt, NodeReceipt, NodeStatus
from .errors import FleetError, FleetRefused, FleetUndecided, StaleReplica, UnknownFleet
from .replica import FleetAnswer

__all__ = [
    "Deadlines",
    "Fleet",
    "FleetAnswer",
    "FleetClient",
    "FleetError",
    "FleetReceipt",
    "FleetRefused",
    "FleetUndecided",
    "NodeReceipt",
    "NodeStatus",
    "StaleReplica",
    "UnknownFleet",
    "connect",
    "deployment",
]
