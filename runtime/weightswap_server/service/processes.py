"""The processes of a server, as operators see them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Role = Literal["server", "keeper", "worker"]


class Serving(Struct, frozen=True, kw_only=True):
    """The weights that new calls of a model use in one process; None before the first weights."""

    generation: int | None
    weights_id: str | None


class Process(Struct, frozen=True, kw_only=True):
    """One process; times in seconds since the epoch.

    role: a "server" answers and changes weights, a "keeper" changes them for its "worker"s. heard: when it last
    reported that it is alive. answered: the requests it has answered. models: by name.
    """

    role: Role
    name: str
    pid: int
    since: float
    heard: float
    ready: bool
    answered: int = 0
    models: dict[str, Serving] = {}
