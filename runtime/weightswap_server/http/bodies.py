"""Bodies of requests, and headers: bytes that come or do not, and what all of them together may take."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from weightswap_server.errors import BadRequest, BodyTooLarge, BodyTooSlow, Overloaded
from weightswap_server.settings import Settings

T = TypeVar("T")
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PLAIN = "identity"
_SMALL = 1 << 18  # bytes that are read at once; more would keep others waiting
_HELD = "weightswap.held"
WHOLE = "weightswap.whole"  # in a scope: all of the body is there


class Headers(dict[bytes, bytes]):
    """Those of a request, by name in small letters."""

    def __init__(self, given: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(given)
        if len(self) < len(given):  # some come twice, and mean what one with commas does
            self.clear()
            for name, value in given:
                self[name] = self[name] + b", " + value if name in self else value

    def text(self, name: str) -> str:
        """One of them; '' where it is not there."""
        return self.get(name.encode(), b"").decode("latin-1").strip(" \t")


class Bodies:
    """Those of all requests that are under way. Large ones are read by one thread, one after another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bytes = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weightswap-reading")

    async def whole(self, scope: Scope, receive: Receive, headers: Headers) -> bytes:
        """A body, decompressed. Raises BodyTooLarge, BodyTooSlow, Overloaded, BadRequest and ClientDisconnect."""
        body = await self._received(scope, receive, headers)
        encoding = headers.text("content-encoding") or _PLAIN
        if encoding == _PLAIN:
            return body
        found = await self._in_thread(lambda: _decompressed(body, encoding, self._settings.max_body))
        self._hold(scope, len(found))
        return found

    async def of(self, request: Request) -> bytes:
        """As `whole`."""
        return await self.whole(request.scope, request.receive, Headers(request.scope["headers"]))

    async def read(self, body: bytes, reader: Callable[[bytes], T]) -> T:
        """What a reader makes of a body."""
        return reader(body) if len(body) <= _SMALL else await self._in_thread(lambda: reader(body))

    def let_go(self, scope: Scope) -> None:
        """A request was answered."""
        self._bytes -= scope.pop(_HELD, 0)

    def _hold(self, scope: Scope, nbytes: int) -> None:
        self._bytes += nbytes
        scope[_HELD] = scope.get(_HELD, 0) + nbytes
        if self._bytes > self._settings.max_bodies:
            raise Overloaded(f"the bodies of all requests take more than {self._settings.max_bodies} bytes; try again")

    async def _received(self, scope: Scope, receive: Receive, headers: Headers) -> bytes:
        most, patience = self._settings.max_body, self._settings.body_timeout
        if int(headers.text("content-length") or 0) > most:
            raise _too_large(most)
        if WHOLE in scope:
            return await self._joined(scope, receive)
        try:
            async with asyncio.timeout(patience):
                return await self._joined(scope, receive)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body was not there within {patience:g} s") from error

    async def _joined(self, scope: Scope, receive: Receive) -> bytes:
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > self._settings.max_body:
                raise _too_large(self._settings.max_body)
            self._hold(scope, len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)


def _decompressed(body: bytes, encoding: str, most: int) -> bytes:
    if encoding not in _WBITS:
        raise BadRequest(f"Content-Encoding: {encoding}: expected gzip or deflate")
    reader = zlib.decompressobj(_WBITS[encoding])
    try:
        decompressed = reader.decompress(body, most)
    except zlib.error as error:
        raise BadRequest(f"the body is no {encoding}: {error}") from error
    if reader.unconsumed_tail:
        raise _too_large(most)
    if not reader.eof or reader.unused_data:
        raise BadRequest(f"the body is no {encoding}: it breaks off, or something follows")
    return decompressed


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {most} bytes, which is the most that this server takes")
