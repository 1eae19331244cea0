"""Sockets, and uvicorn on them with limits: of connections, of requests that do not come, of answers nobody reads."""

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

from .bodies import WHOLE

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n%s"
_BUSY = b'{"error":"too many connections"}'
_TOO_MANY = _REFUSAL % (b"503 Service Unavailable", b"retry-after: 1\r\n", len(_BUSY), _BUSY)
_LONG = b'{"error":"the headers have more than 65536 bytes"}'
_TOO_LONG = _REFUSAL % (b"431 Request Header Fields Too Large", b"", len(_LONG), _LONG)
_LARGE = _MOST_HEADERS = 1 << 16
_OFFER = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
GONE = "weightswap.gone"  # in a scope: what is called when the client goes before its answer
_What = Literal["request", "reading", "leaving"]
_DRAINS, _DRAIN = 20, 0.05  # how often a queue is looked at, and after how many seconds: some are about to connect
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, for which Python has no name
_NO_SYN = b"".join(  # a program of the kernel's packet filters, over the header of TCP
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags
        (0x45, 0, 1, 2),  # is it a SYN?
        (0x06, 0, 0, 0),  # drop it
        (0x06, 0, 0, 0xFFFFFFFF),  # or take all of it
    )
)
_IDLE = 75  # seconds, more than load balancers keep a connection for: it is they who close it, between two requests
_LEAVING = 1.0  # seconds in which a client that is idle at a stop may ask once more


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. A connection that does not meet one in time is broken off."""

    def __init__(self, settings: Settings, **given: Any) -> None:
        super().__init__(**given)
        self.settings = settings
        self._timers: dict[_What, asyncio.TimerHandle] = {}
        self._leaves = self._begins = False
        self._headers = 0  # bytes of which the parser has made nothing yet, or headers
        self._is_between = True  # two requests

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("Any", _Joining(transport, self.loop)))
        if len(self.connections) > self.settings.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._expect("request")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in tuple(self._timers):
            self._met(what)
        if self.cycle is not None and not self.cycle.response_complete:
            cast("dict[str, Any]", self.cycle.scope).get(GONE, bool)()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._headers += len(data)
        super().data_received(_without_offer(data) if self._is_between else data)
        if self._headers > _MOST_HEADERS:
            self.transport.write(_TOO_LONG)
            self.transport.close()
        elif self._begins and "request" not in self._timers:  # most requests come at once, and need no timer
            self._expect("request")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers, self._is_between = 0, False
        self._met("leaving")
        self._met("request")
        self._begins = True

    def on_headers_complete(self) -> None:
        self._begins, self._headers = False, 0
        self._met("request")
        super().on_headers_complete()
        if self._leaves:
            self._leave()

    def on_body(self, body: bytes) -> None:
        self._headers = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._headers, self._is_between = 0, True
        self._met("request")
        cast("dict[str, Any]", self.cycle.scope)[WHOLE] = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.more_body:  # nobody waits for the rest of a request that was answered
            self._expect("request")
        super().on_response_complete()

    def shutdown(self) -> None:
        """The next answer says that it is the last; an idle client's next request may lie in the socket already."""
        self._leaves = True
        if self.cycle is None or self.cycle.response_complete:
            seconds = min(_LEAVING, self.settings.grace / 2)
            self._timers["leaving"] = self.loop.call_later(seconds, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self._met("leaving")
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._met("reading")

    def _expect(self, what: _What) -> None:
        """The client is to send bytes of a request, or to read those of an answer."""
        self._met(what)
        self._timers[what] = self.loop.call_later(self.settings.body_timeout, self.transport.abort)

    def _met(self, what: _What) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()


def _without_offer(data: bytes) -> bytes:
    """A request that offers to go on by HTTP/2, as clients in Java do, without the offer: the parser takes what follows
    the headers of one for that protocol, and a server need not take it (RFC 9113 3.1)."""
    if data.find(b"h2c", 0, _LARGE) < 0:
        return data
    end = data.find(b"\r\n\r\n")
    found = _OFFER.search(data, 0, end + 2 if end >= 0 else len(data))
    return data[: found.start()] + b"\r\nx-upgrade:" + data[found.end() :] if found else data


class _Joining:
    """A transport that sends what is written in one go, such as a head and a body, by one call of the system."""

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
    """uvicorn, with the limits of the settings. shared: on its sockets other processes accept, too, and may go on."""

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
        """As uvicorn's, once all are accepted who have connected: a socket that is closed resets those in its queue."""
        for each in sockets or () if not self._shared else ():
            await accept_no_more(each)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the server's, which exits with 0 where it was asked to stop."""
        yield


def new_loop() -> asyncio.AbstractEventLoop:
    """One of uvloop, where that is installed, else of asyncio."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = new_event_loop()
    return loop


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A block with a socket that listens. Raises OSError where the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it sets TCP_NODELAY, without which answers wait for 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(listener, host, port)
        listener.listen(2048)
        yield listener


def bind(listener: socket.socket, host: str, port: int) -> None:
    """Give a socket its address. Raises OSError that says where, and what to do."""
    try:
        listener.bind((host, port))
    except OSError as error:
        told = f"cannot listen: {error.strerror}; choose another port, or stop what has it"
        raise OSError(error.errno, told, f"{host}:{port}") from error


async def accept_no_more(listener: socket.socket) -> None:
    """Let nobody connect any more, and wait until those who have are accepted, by whichever process.

    Who tries meanwhile tries again by itself after a second, and is refused where the socket is closed by then.
    """
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    with suppress(OSError):  # where there are no filters, some may still be reset
        listener.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(program))
        )
    queue = select.poll()
    queue.register(listener, select.POLLIN)
    for _ in range(_DRAINS):
        await asyncio.sleep(_DRAIN)
        if not queue.poll(0):
            return
