"""Listening sockets, and uvicorn with limits: of connections, slow requests, and responses that are not read."""

from __future__ import annotations

import asyncio
import ctypes
import re
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weightswap_server.settings import Settings

from .bodies import RECEIVED

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n%s"
_BUSY = b'{"error":"too many connections"}'
_TOO_MANY = _REFUSAL % (b"503 Service Unavailable", b"retry-after: 1\r\n", len(_BUSY), _BUSY)
_LONG = b'{"error":"the headers have more than 65536 bytes"}'
_TOO_LONG = _REFUSAL % (b"431 Request Header Fields Too Large", b"", len(_LONG), _LONG)
_LARGE = _MOST_HEADERS = 1 << 16
_H2C_UPGRADE = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
ON_DISCONNECT = "weightswap.on_disconnect"  # in a scope: a callback for a client that disconnects before its response
_Timer = Literal["request", "reading", "closing"]
_DRAIN_CHECKS, _DRAIN_PAUSE = 20, 0.05  # of the accept queue; seconds before each check, for pending handshakes
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not define
_NO_SYN = b"".join(  # a classic BPF program over the TCP header
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags
        (0x45, 0, 1, 2),  # is it a SYN?
        (0x06, 0, 0, 0),  # drop it
        (0x06, 0, 0, 0xFFFFFFFF),  # accept the whole packet
    )
)
_IDLE = 75  # seconds, longer than load balancers keep a connection: they shall close it, between two requests
_LAST_REQUEST = 1.0  # seconds in which a client that is idle when the server stops may send one more request


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. A connection whose client is too slow is aborted."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        super().__init__(**options)
        self.settings = settings
        self._timers: dict[_Timer, asyncio.TimerHandle] = {}
        self._is_last_request = self._reads_headers = False
        self._header_bytes = 0  # bytes that the parser has not passed on, or has taken for headers
        self._is_between_requests = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("Any", _JoinedWrites(transport, self.loop)))
        if len(self.connections) > self.settings.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_timer("request")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in tuple(self._timers):
            self._stop_timer(timer)
        if self.cycle is not None and not self.cycle.response_complete:
            cast("dict[str, Any]", self.cycle.scope).get(ON_DISCONNECT, bool)()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(_without_h2c_upgrade(data) if self._is_between_requests else data)
        if self._header_bytes > _MOST_HEADERS:
            self.transport.write(_TOO_LONG)
            self.transport.close()
        elif self._reads_headers and "request" not in self._timers:  # most requests come at once, and need no timer
            self._start_timer("request")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes, self._is_between_requests = 0, False
        self._stop_timer("closing")
        self._stop_timer("request")
        self._reads_headers = True

    def on_headers_complete(self) -> None:
        self._reads_headers, self._header_bytes = False, 0
        self._stop_timer("request")
        super().on_headers_complete()
        if self._is_last_request:
            self._close_after_response()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._header_bytes, self._is_between_requests = 0, True
        self._stop_timer("request")
        cast("dict[str, Any]", self.cycle.scope)[RECEIVED] = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.more_body:  # the request was answered before its body was read
            self._start_timer("request")
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close after the next response; an idle client gets a moment, as its request may be in the socket already."""
        self._is_last_request = True
        if self.cycle is None or self.cycle.response_complete:
            seconds = min(_LAST_REQUEST, self.settings.grace / 2)
            self._timers["closing"] = self.loop.call_later(seconds, self._close_after_response)
        else:
            self._close_after_response()

    def _close_after_response(self) -> None:
        self._stop_timer("closing")
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("reading")

    def _start_timer(self, timer: _Timer) -> None:
        """Abort the connection unless the client sends its request, or reads its response, in time."""
        self._stop_timer(timer)
        self._timers[timer] = self.loop.call_later(self.settings.body_timeout, self.transport.abort)

    def _stop_timer(self, timer: _Timer) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()


def _without_h2c_upgrade(data: bytes) -> bytes:
    """Rename the header with which a client, such as Java's, offers to upgrade to HTTP/2: the parser would take the
    body for that protocol, and a server may ignore the offer (RFC 9113 3.1)."""
    if data.find(b"h2c", 0, _LARGE) < 0:
        return data
    end = data.find(b"\r\n\r\n")
    match = _H2C_UPGRADE.search(data, 0, end + 2 if end >= 0 else len(data))
    return data[: match.start()] + b"\r\nx-upgrade:" + data[match.end() :] if match else data


class _JoinedWrites:
    """A transport that joins the writes of one turn of the loop, such as headers and body, into one system call."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if len(data) > _LARGE:
            self._flush()
            self._transport.write(data)
            return
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()


class HttpServer(uvicorn.Server):
    """uvicorn, with the limits of the settings. shared: other processes accept on its sockets, too, and may go on."""

    def __init__(self, app: Any, settings: Settings, shared: bool = False) -> None:
        self._shared = shared
        config = uvicorn.Config(
            app,
            http=cast("Any", partial(GuardedProtocol, settings)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=max(1, round(settings.grace)),
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the queued connections first, as closing a socket resets them; then shut down as uvicorn does."""
        for listener in sockets or () if not self._shared else ():
            await accept_no_more(listener)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Server`, which exits with 0 after SIGTERM and SIGINT."""
        yield


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop, if installed, else of asyncio."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = new_event_loop()
    return loop


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket for a block. Raises OSError if the port is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio sets TCP_NODELAY, without which responses are delayed by 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(listener, host, port)
        listener.listen(2048)
        yield listener


def bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind a socket. Raises OSError that names the address and says what to do."""
    try:
        listener.bind((host, port))
    except OSError as error:
        text = f"cannot listen: {error.strerror}; choose another port, or stop the process that uses it"
        raise OSError(error.errno, text, f"{host}:{port}") from error


async def accept_no_more(listener: socket.socket) -> None:
    """Stop new connections, and wait until those in the queue are accepted, by whichever process.

    A client that connects meanwhile retries after a second, and is refused if the socket is closed by then.
    """
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    with suppress(OSError):  # without packet filters, some connections may still be reset
        listener.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(program))
        )
    queue = select.poll()
    queue.register(listener, select.POLLIN)
    for _ in range(_DRAIN_CHECKS):
        await asyncio.sleep(_DRAIN_PAUSE)
        if not queue.poll(0):
            return
