"""The audit log: who has asked for what, from where, and what came of it. Tokens and credentials are not in it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import time
from threading import Lock
from typing import Any

from weightswap_runtime.errors import Unsupported
from weightswap_server.errors import NotReady, log

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
