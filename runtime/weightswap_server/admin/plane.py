"""The admin plane from start to stop: an HTTP server of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

from weightswap_runtime.errors import Unsupported
from weightswap_server.errors import log
from weightswap_server.http.listening import HttpServer, listening
from weightswap_server.service.service import Service

from .access import AdminSettings, AllowList, TokenGuard, read_tokens
from .app import OPEN_PATHS, AdminEndpoints
from .audit import AuditLog, act_on
from .journal import EVERY, LoadSeries
from .operations import ModelOperations
from .uploads import UploadDirectory

_CHECK_INTERVAL = 0.5  # seconds between two checks of staged weights


class AdminPlane:
    """The admin plane of a server. It serves while its block runs."""

    def __init__(self, service: Service, settings: AdminSettings) -> None:
        """Raises Unsupported."""
        settings.check()
        self.settings = settings
        tokens, self._audit = read_tokens(settings.token_file), AuditLog(settings.audit_log)
        uploads = None
        if settings.upload_dir is not None:
            uploads = UploadDirectory(
                settings.upload_dir, settings.max_uploads, settings.body_timeout, settings.upload_timeout
            )
        allowed = AllowList(settings.allow, uploads.folder if uploads else None)
        timeout = settings.staged_timeout
        self.models = {served.name: ModelOperations(served, allowed, timeout) for served in service.served}
        if uploads is not None and settings.upload_keep is not None:
            for operations in self.models.values():
                operations.on_change = partial(
                    uploads.remove_unneeded, self.models.values(), allowed.files, settings.upload_keep
                )
        self._load = LoadSeries(
            service.load_metrics, {served.name: {served.name, *served.methods} for served in service.served}
        )
        self._endpoints = AdminEndpoints(service, self.models, self._load, self._audit, uploads, settings)
        guard = TokenGuard(self._endpoints.app(), tokens, self._endpoints.refuse, OPEN_PATHS)
        self._http = HttpServer(guard, settings.http)
        self._service = service
        self._ending = Event()
        self.port = 0

    @property
    def where(self) -> str:
        """The address, as `weightswap status` takes it."""
        if self.settings.socket is not None:
            return f"unix://{os.path.abspath(self.settings.socket)}"  # noqa: PTH100 - Path.resolve() follows links
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self.port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve while the block runs. Raises OSError if the port or the socket is not available."""
        with self._listener() as listener:
            self.port = 0 if self.settings.socket is not None else listener.getsockname()[1]
            threads = (
                Thread(target=self._serve, args=(listener,), name="weightswap-admin"),
                Thread(target=self._check_staged, name="weightswap-admin-operations", daemon=True),
                Thread(target=self._count, name="weightswap-admin-load", daemon=True),
            )
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._endpoints.ending = True
                self._ending.set()
                for operations in self.models.values():
                    operations.close()
                grace = min(self.settings.grace, self._service.grace_left)  # in the grace of all, not after it
                self._http.config.timeout_graceful_shutdown = max(1, round(grace))
                self._http.should_exit = True
                for thread in threads:
                    thread.join()

    def _serve(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._http.serve(sockets=[listener]))
        except BaseException:
            log.exception("the admin plane has ended")

    def _check_staged(self) -> None:
        while not self._ending.wait(_CHECK_INTERVAL):
            for operations in self.models.values():
                try:
                    operations.discard_outdated()
                    if verdict := operations.verdict():
                        act_on(self._audit, operations, *verdict)
                except Exception:
                    log.exception("%s: could not check the staged weights", operations.name)

    def _count(self) -> None:
        while not self._ending.wait(EVERY):
            try:
                self._load.sample()
            except Exception:
                log.exception("could not sample the load")

    def _listener(self) -> AbstractContextManager[socket.socket]:
        if self.settings.socket is not None:
            return _listening_at(Path(self.settings.socket))
        return listening(self.settings.host, self.settings.port or 0)


@contextmanager
def _listening_at(path: Path) -> Iterator[socket.socket]:
    """Listen at a Unix socket that its owner alone may connect to. A stale socket is replaced."""
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(128)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise Unsupported(f"--admin-socket {path}: exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise Unsupported(f"--admin-socket {path}: another process is listening there")
