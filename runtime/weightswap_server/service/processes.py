"""The processes of a server, as operators are told of them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Role = Literal["server", "keeper", "worker"]


class Serving(Struct, frozen=True, kw_only=True):
    """What new calls of a model get in one process; None before its first weights."""

    generation: int | None
    weights_id: str | None


class Process(Struct, frozen=True, kw_only=True):
    """One process; times in seconds since the epoch.

    role: "server" answers and changes weights, a "keeper" changes them for its "worker"s. heard: when it said last that
    it goes round. answered: requests, since it began. models: by name.
    """

    role: Role
    name: str
    pid: int
    since: float
    heard: float
    ready: bool
    answered: int = 0
    models: dict[str, Serving] = {}
