"""What a model serves with, which its public face does not show: sessions, and their memory."""

from __future__ import annotations

from typing import Any

from weightswap_runtime import Model
from weightswap_runtime.live.gate import Version
from weightswap_runtime.live.session import Session


def live(model: Model) -> Version:
    """Return the version that new calls get."""
    current = model._gate.current
    assert current is not None
    return current


def sessions_of(model: Model) -> list[Session]:
    return list(model._store._residency.sessions)


def bound_of(model: Model, session: Session | None = None) -> Any:
    """Return what a session, by default the served one, calls for a model."""
    return (session or live(model).session).bound[model._member.id]


def live_bytes(model: Model) -> dict[str, bytes]:
    """Return every weight's bytes in the served arena."""
    arena = live(model).session.arena
    return {name: bytes(arena.fetch(*slot)) for name, slot in arena.layout.slots.items()}


def addresses(model: Model) -> list[int]:
    return [session.arena.address for session in sessions_of(model)]
