"""Calls of operators between two lines of the audit log: that it begins, and what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weightswap_runtime.sources.location import redact
from weightswap_runtime.threads.awaiting import in_thread

from .audit import AuditLog
from .desk import Desk
from .errors import refused
from .tokens import Scope

T = TypeVar("T")


async def audited(
    audit: AuditLog, request: Request, call: str, desk: Desk | None, asked: Any, work: Callable[[], T] | Awaitable[T]
) -> T:
    """Do it, in a thread, between two lines of the audit log. It goes on if the client has gone."""
    arguments = _without_secrets(asked)
    fields = {
        "who": who(request),
        "peer": peer(request.scope),
        "call": call,
        "model": desk.name if desk else None,
        "arguments": arguments,
    }
    before = desk.model.weights_id if desk else None
    number = audit.begin(**fields, weights_before=before)
    outcome: dict[str, Any] = {"outcome": "broken off"}
    try:
        found = await (in_thread(work) if callable(work) else work)
        outcome = {"outcome": "done"}
    except Exception as error:
        told = refused(error)
        outcome = {"outcome": "refused", "error": told.kind, "message": told.text}
        raise
    finally:
        after = desk.model.weights_id if desk else None
        audit.end(number, **fields, weights_before=before, weights_after=after, **outcome)
    return found


def obey(audit: AuditLog, desk: Desk, verdict: str, rule: str) -> None:
    """Do what the rule of a canary says, between two lines of the audit log. Raises what `Desk.obey` raises."""
    fields: dict[str, Any] = {
        "who": desk.staged_by,
        "peer": "",
        "call": f"{verdict} by rule",
        "model": desk.name,
        "arguments": {"rule": rule},
        "weights_before": desk.model.weights_id,
    }
    number, outcome = audit.begin(**fields), "refused"
    try:
        desk.obey(verdict, rule)
        outcome = "done"
    finally:
        audit.end(number, **fields, weights_after=desk.model.weights_id, outcome=outcome)


def who(request: Request) -> str:
    """Whose token it is."""
    return str(request.state.who)


def peer(scope: Scope) -> str:
    """Where a call comes from."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unix"


def _without_secrets(asked: Any) -> Any:
    """The arguments of a call as they are logged."""
    if isinstance(asked, msgspec.Struct):
        asked = msgspec.to_builtins(asked)
    if isinstance(asked, dict):
        return {name: _without_secrets(value) for name, value in asked.items()}
    return redact(asked) if isinstance(asked, str) else asked
