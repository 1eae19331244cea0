"""The audit log: user, peer, request and outcome of every operation. It has no tokens and credentials."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.sources.location import redact
from weightswap_runtime.threads import in_thread
from weightswap_server.errors import NotReady, admin_failure_of, log

from .operations import ModelOperations

_DENIAL_INTERVAL = 1.0  # seconds between two lines about denied calls


class AuditLog:
    """A file of JSON lines, each appended by one write; no file if `path` is None. It may be rotated at any time."""

    def __init__(self, path: str | None) -> None:
        """Raises Unsupported if the file cannot be written."""
        self._path = path
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(4)
        self._lock = Lock()
        self._denied_at, self._denied = 0.0, 0
        self._is_torn = False  # the last line ends early, as on a full disk: the next must not continue it
        try:
            self._append(b"")
        except OSError as error:
            raise Unsupported(f"--audit-log {path}: cannot be written ({error})") from error
        self._is_torn = path is not None and _ends_early(path)  # by an earlier process

    def begin(self, **fields: Any) -> str:
        """Log the begin of a call, and return its number. Raises NotReady if the log cannot be written."""
        number = f"{self._run}-{next(self._numbers)}"
        try:
            self._write(call_id=number, outcome="begun", **fields)
        except OSError as error:
            raise NotReady(f"the audit log cannot be written, so nothing was done ({error.strerror})") from error
        return number

    def end(self, number: str, **fields: Any) -> None:
        """Log the outcome of a call."""
        try:
            self._write(call_id=number, **fields)
        except OSError as error:
            log.error("the audit log cannot be written: %s; lost: %s", error, fields)

    def deny(self, peer: str, call: str) -> None:
        """Log a call without a token. Of many in a second, the first is logged, and later their number."""
        with self._lock:
            self._denied += 1
            if time.monotonic() < self._denied_at + _DENIAL_INTERVAL:
                return
            count, self._denied, self._denied_at = self._denied, 0, time.monotonic()
        self.end("", peer=peer, call=call, outcome="denied", count=count)

    def _write(self, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), **fields}) + "\n"  # ASCII: without control characters or line breaks
        self._append(line.encode())

    def _append(self, line: bytes) -> None:
        if self._path is None:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            line = b"\n" + line if self._is_torn else line
            self._is_torn = os.write(fd, line) < len(line)
            if self._is_torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)


def _ends_early(path: str) -> bool:
    """Return whether the last line of a file has no end. False for what is no file, or cannot be read."""
    if not Path(path).is_file():  # opening a pipe would wait for its other end
        return False
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read(1) not in (b"", b"\n")
    except OSError:
        return False


T = TypeVar("T")


async def audited(
    audit: AuditLog,
    request: Request,
    call: str,
    operations: ModelOperations | None,
    arguments: Any,
    work: Callable[[], T] | Awaitable[T],
) -> T:
    """Do the work, and log it. A function runs in a thread, and goes on if the client disconnects."""
    with _logged(audit, operations, user_of(request), peer(request.scope), call, _without_secrets(arguments)):
        return await (in_thread(work) if callable(work) else work)


def act_on(audit: AuditLog, operations: ModelOperations, verdict: str, rule: str) -> None:
    """Do what a canary's rule says, and log it. Raises what `operations.act_on` raises."""
    with _logged(audit, operations, operations.staged_by, "", f"{verdict} by rule", {"rule": rule}):
        operations.act_on(verdict, rule)


@contextmanager
def _logged(
    audit: AuditLog, operations: ModelOperations | None, by: str, peer: str, call: str, arguments: Any
) -> Iterator[None]:
    """Log the begin and the outcome of a block."""
    model = operations.model if operations else None
    fields = {
        "who": by,
        "peer": peer,
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
        failure = admin_failure_of(error)
        outcome = {"outcome": "refused", "error": failure.kind, "message": failure.text}
        raise
    finally:
        audit.end(number, **fields, weights_after=model.weights_id if model else None, **outcome)


def user_of(request: Request) -> str:
    """Return the name of the request's token."""
    return str(request.state.who)


def peer(scope: Scope) -> str:
    """Return the client's address, or "unix"."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unix"


def _without_secrets(arguments: Any) -> Any:
    """Return the arguments of a call with credentials in URLs redacted."""
    if isinstance(arguments, msgspec.Struct):
        arguments = msgspec.to_builtins(arguments)
    if isinstance(arguments, dict):
        return {name: _without_secrets(value) for name, value in arguments.items()}
    return redact(arguments) if isinstance(arguments, str) else arguments
