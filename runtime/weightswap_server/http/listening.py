"""Sockets, and uvicorn on them with the limits of the settings."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from weightswap_server.settings import Settings

from .guard import guarded_protocol


class HttpServer(uvicorn.Server):
    """uvicorn, with the limits of the settings."""

    def __init__(self, app: Any, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            http=guarded_protocol(settings),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.grace)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the server's, which exits with 0 where it was asked to stop."""
        yield


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A block with a socket that listens. Raises OSError where the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it sets TCP_NODELAY, without which answers wait for 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
        listener.listen(2048)
        yield listener
