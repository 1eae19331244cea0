"""Listening sockets, and uvicorn with limits: of connections, slow requests, and responses that are not read."""

from __future__ import annotations

import asyncio
import ctypes
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weightswap_server.settings import Settings

from .bodies import RECEIVED


def _refusal(status: bytes, error: bytes, more: bytes = b"") -> bytes:
    body = b'{"error":"%s"}' % error
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


_LARGE = _MOST_HEADERS = 1 << 16
_MOST_WAITING = 128  # requests of one connection that were sent before their predecessors were answered
_TOO_MANY = _refusal(b"503 Service Unavailable", b"too many connections", b"retry-after: 1\r\n")
_TOO_LONG = _refusal(b"431 Request Header Fields Too Large", b"the headers have more than 65536 bytes")
_NOT_HTTP = _refusal(b"400 Bad Request", b"not a valid HTTP/1.1 request")
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
        self._is_last_request = self._reads_headers = self._reads_body = False
        self._header_bytes = 0  # bytes that the parser has not passed on, or has taken for headers

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
        the offer (RFC 9110 7.8): such headers are fed again, without it."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data, head = data[offer.args[0] :], self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([first, *lines, b"", b""])

    def _refuse(self, response: bytes) -> None:
        """Answer what is no request, and close; without an answer if it would be taken for that to another request."""
        if self._reads_body:
            answerable = not (self.cycle.response_started or self.pipeline)
            self.cycle.disconnected = True
        elif self.cycle is None or self.cycle.response_complete:
            answerable = True
        else:
            self.cycle.keep_alive = False  # the earlier requests are answered first
            return
        if answerable:
            self.transport.write(response)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._stop_timer("closing")
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
        if version == "1.0":  # whose clients know no 100 Continue
            self.expect_100_continue = False
        super().on_headers_complete()
        self._reads_body = True
        if self._is_last_request:
            self._close_after_response()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        self.expect_100_continue = False  # the client no longer waits
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
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
