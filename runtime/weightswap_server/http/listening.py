"""Listening sockets, and uvicorn with the limits of a plain server: connections, slow clients, requests' framing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weightswap_server.settings import Settings

from .bodies import RECEIVED
from .handover import Handed

ON_DISCONNECT = "weightswap.on_disconnect"  # in a scope: a callback for a client that disconnects before its response
_BACKLOG = 2048  # connections that the kernel keeps until they are accepted; uvicorn's default
_IDLE = 75  # seconds, longer than load balancers keep a connection: they shall close it, between two requests
_MOST_HEADERS = 1 << 16  # bytes
_LARGE = 1 << 16  # bytes that are sent at once
_MOST_WAITING = 128  # requests of one connection that were sent before their predecessors were answered


class HttpServer(uvicorn.Server):
    """uvicorn, with the limits of the settings."""

    def __init__(self, app: Any, settings: Settings, handed: Handed | None = None) -> None:
        """handed: connections that another process has accepted."""
        on_closed = handed.count_closed if handed is not None else lambda: None
        config = uvicorn.Config(
            app,
            http=cast("Any", partial(GuardedProtocol, settings, on_closed)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=max(1, round(settings.grace)),
        )
        super().__init__(config)
        self._handed = handed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve. sockets: that listen; none if all connections are handed over."""
        await super().startup(sockets)
        if self._handed is not None:
            protocol = cast("Any", self.config.http_protocol_class)  # called as uvicorn's own startup does
            state = self.lifespan.state
            new_protocol = partial(protocol, config=self.config, server_state=self.server_state, app_state=state)
            self._handed.serve(new_protocol)
            self.servers.append(cast("Any", self._handed))

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
        listener.listen(_BACKLOG)
        yield listener


def bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind a socket. Raises OSError that names the address and says what to do."""
    try:
        listener.bind((host, port))
    except OSError as error:
        text = f"cannot listen: {error.strerror}; choose another port, or stop the process that uses it"
        raise OSError(error.errno, text, f"{host}:{port}") from error


def _refusal(status: bytes, error: bytes, more: bytes = b"") -> bytes:
    body = b'{"error":"%s"}' % error
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


_TOO_MANY = _refusal(b"503 Service Unavailable", b"too many connections", b"retry-after: 1\r\n")
_TOO_LONG = _refusal(b"431 Request Header Fields Too Large", b"the headers have more than %d bytes" % _MOST_HEADERS)
_NOT_HTTP = _refusal(b"400 Bad Request", b"not a valid HTTP/1.1 request")


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. A connection whose client is too slow is aborted.

    It is also strict about where a request ends: where the server and a proxy before it could disagree, the body of one
    client's request would be taken for a request of another.
    """

    def __init__(self, settings: Settings, on_closed: Callable[[], object], **options: Any) -> None:
        super().__init__(**options)
        self._settings, self._on_closed = settings, on_closed
        self._timers: dict[Literal["request", "response"], asyncio.TimerHandle] = {}
        self._reads_headers = self._reads_body = False  # of a request, which may be answered before its body ends
        self._header_bytes = 0  # bytes that the parser keeps, or has taken for headers or the frame of a body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("Any", _JoinedWrites(transport, self.loop)))
        if len(self.connections) > self._settings.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_timer("request")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("request")
        self._stop_timer("response")
        if self.cycle is not None and not self.cycle.response_complete:
            cast("dict[str, Any]", self.cycle.scope).get(ON_DISCONNECT, bool)()
        super().connection_lost(exc)
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._refuse(_NOT_HTTP)
            return
        if self._header_bytes > _MOST_HEADERS:
            self._refuse(_TOO_LONG)
        elif self._reads_headers and "request" not in self._timers:  # most requests come at once, and need no timer
            self._start_timer("request")

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. It takes what follows an offer to upgrade for another protocol, but a server may ignore
        the offer (RFC 9110 7.8), which some clients make in each request: such headers are fed again, without it."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                first = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
                lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(b"\r\n".join([b"%s %s HTTP/%s" % first, *lines, b"", b""]))
                data = data[offer.args[0] :]

    def _refuse(self, response: bytes) -> None:
        """Answer what is no request, and close; without an answer if it would be taken for that to another request."""
        if self._reads_body:
            is_answerable = not (self.cycle.response_started or self.pipeline)
            self.cycle.disconnected = True
        elif self.cycle is None or self.cycle.response_complete:
            is_answerable = True
        else:
            self.cycle.keep_alive = False  # the requests before it are answered first
            return
        if is_answerable:
            self.transport.write(response)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_timer("request")
        self._reads_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_headers:  # not a trailer, which is no header of the request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT" or version not in ("1.0", "1.1") or len(self.pipeline) >= _MOST_WAITING:
            raise ValueError("not a request for this server")
        if self.parser.should_upgrade():
            return
        self._reads_headers, self._header_bytes = False, 0
        self._stop_timer("request")
        if version == "1.0":  # whose clients know no 100 Continue, and would take it for the answer
            self.expect_100_continue = False
        super().on_headers_complete()
        self._reads_body = True

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        self.expect_100_continue = False  # the client no longer waits
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._header_bytes, self._reads_body = 0, False
            self._stop_timer("request")
            cast("dict[str, Any]", self.cycle.scope)[RECEIVED] = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.more_body and not self.pipeline:  # the request was answered before its body was read
            if self.expect_100_continue:  # the client may send its body now, or the next request
                self.transport.close()
            else:
                self._start_timer("request")
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("response")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("response")

    def _start_timer(self, what: Literal["request", "response"]) -> None:
        """Abort the connection unless the client sends its request, or reads its response, in time."""
        self._stop_timer(what)
        self._timers[what] = self.loop.call_later(self._settings.body_timeout, self.transport.abort)

    def _stop_timer(self, what: Literal["request", "response"]) -> None:
        if timer := self._timers.pop(what, None):
            timer.cancel()


class _JoinedWrites:
    """A transport that sends what is written in one turn of the loop, such as a head and its body, by one system call.

    By two of them a server of small models answers a quarter fewer requests.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        if len(data) > _LARGE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)
