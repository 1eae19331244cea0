"""The audit log: who has asked for what, from where, and what came of it. Tokens and credentials are not in it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.sources.location import redact
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_server.errors import NotReady, log

from .errors import refused
from .operations import ModelOperations

_DENIALS_EACH = 1.0  # seconds: denied calls in between are counted


class AuditLog:
    """JSON lines, each appended by one write; `path` None keeps none. The file may be moved away at any time."""

    def __init__(self, path: str | None) -> None:
        """Raises Unsupported where it cannot be written."""
        self._path = path
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(4)
        self._lock = Lock()
        self._denied_at, self._denied = 0.0, 0
        try:
            self._append(b"")
        except OSError as error:
            raise Unsupported(f"--audit-log {path}: cannot be written ({error})") from error

    def begin(self, **fields: Any) -> str:
        """Note that a call begins; returns its number. Raises NotReady where that cannot be written."""
        number = f"{self._run}-{next(self._numbers)}"
        try:
            self._write(call_id=number, outcome="begun", **fields)
        except OSError as error:
            raise NotReady(f"the audit log cannot be written, so nothing is done ({error.strerror})") from error
        return number

    def end(self, number: str, **fields: Any) -> None:
        """Note what came of it."""
        try:
            self._write(call_id=number, **fields)
        except OSError as error:
            log.error("the audit log cannot be written: %s; lost: %s", error, fields)

    def deny(self, peer: str, call: str) -> None:
        """Note a call without a token; of many in a second the first, and then how many."""
        with self._lock:
            self._denied += 1
            if time.monotonic() < self._denied_at + _DENIALS_EACH:
                return
            count, self._denied, self._denied_at = self._denied, 0, time.monotonic()
        self.end("", peer=peer, call=call, outcome="denied", count=count)

    def _write(self, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), **fields}) + "\n"  # in ASCII: no byte steers a terminal, or ends a line
        self._append(line.encode())

    def _append(self, line: bytes) -> None:
        if self._path is None:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)


T = TypeVar("T")


async def audited(
    audit: AuditLog,
    request: Request,
    call: str,
    operations: ModelOperations | None,
    asked: Any,
    work: Callable[[], T] | Awaitable[T],
) -> T:
    """Do it, in a thread, between two lines of the audit log. It goes on if the client has gone."""
    arguments = _without_secrets(asked)
    with _noted(audit, operations, who(request), peer(request.scope), call, arguments):
        return await (in_thread(work) if callable(work) else work)


def obey(audit: AuditLog, operations: ModelOperations, verdict: str, rule: str) -> None:
    """Do what a canary's rule says, between two lines of the audit log. Raises what `operations.obey` raises."""
    with _noted(audit, operations, operations.staged_by, "", f"{verdict} by rule", {"rule": rule}):
        operations.obey(verdict, rule)


@contextmanager
def _noted(
    audit: AuditLog, operations: ModelOperations | None, by: str, where: str, call: str, arguments: Any
) -> Iterator[None]:
    """A block between two lines of the audit log."""
    model = operations.model if operations else None
    fields = {
        "who": by,
        "peer": where,
        "call": call,
        "model": operations.name if operations else None,
        "arguments": arguments,
        "weights_before": model.weights_id if model else None,
    }
    number = audit.begin(**fields)
    outcome = {"outcome": "broken off"}
    try:
        yield
        outcome = {"outcome": "done"}
    except Exception as error:
        told = refused(error)
        outcome = {"outcome": "refused", "error": told.kind, "message": told.text}
        raise
    finally:
        audit.end(number, **fields, weights_after=model.weights_id if model else None, **outcome)


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
