"""Bodies with limits, and refusals."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from weightswap_runtime.errors import encode_json
from weightswap_server.errors import BadRequest, BodyTooLarge, BodyTooSlow, Failure, Overloaded
from weightswap_server.protocol import MOST_DOCUMENT, MOST_JSON, ErrorDocument
from weightswap_server.settings import Settings

T = TypeVar("T")
JSON = "application/json"
NO_STORE = {"cache-control": "no-store"}
RECEIVED = "weightswap.received"  # in a scope: the whole body has arrived
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PLAIN = "identity"
_SMALL = 1 << 18  # bytes of a body that is parsed in the event loop; a larger one would block others
_HELD = "weightswap.held"  # in a scope: the bytes that count for the request
_RETRY_AFTER = "1"  # seconds


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response with a document."""
    return Response(encode_json(document), status, headers, JSON)


uncached = partial(json_response, headers=NO_STORE)
"""The same, for neither browsers nor proxies to keep."""


def refusal(failure: Failure, headers: Mapping[str, str] | None = None, document: Any = None) -> Response:
    """Return the error response of a failure. document: by default its text."""
    retry = {"retry-after": _RETRY_AFTER} if failure.retry else {}
    return json_response(document or ErrorDocument(failure.text), failure.status, {**(headers or {}), **retry})


def no_such_endpoint(scope: Scope, status: int, detail: str) -> Failure:
    """Return the failure of a request with an unknown path or method."""
    return Failure(status, "", f"{scope['method']} {scope['path']}: {detail}; see /openapi.json for what there is")


class Headers(dict[bytes, bytes]):
    """The headers of a request, by lower-case name."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(pairs)
        if len(self) < len(pairs):  # repeated headers mean the same as one with commas
            self.clear()
            for name, value in pairs:
                self[name] = self[name] + b", " + value if name in self else value

    def text(self, name: str) -> str:
        """Return the value of a header, or '' without it."""
        return self.get(name.encode(), b"").decode("latin-1").strip(" \t")


class Bodies:
    """The bodies of all requests in flight. Large ones are parsed in a thread, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bytes = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weightswap-reading")

    async def body(self, scope: Scope, receive: Receive, headers: Headers, most_json: int | None = None) -> bytes:
        """Receive a body, and decompress it. most_json: the most bytes, if it is a JSON document.

        Raises BodyTooLarge, BodyTooSlow, Overloaded, BadRequest and ClientDisconnect.
        """
        most = min(self._settings.max_body, most_json or self._settings.max_body)
        body = await self._receive_in_time(scope, receive, headers, most)
        encoding = headers.text("content-encoding").lower() or _PLAIN
        if encoding == _PLAIN:
            return body
        decompressed = await self._in_thread(lambda: _decompressed(body, encoding, most))
        self._hold(scope, len(decompressed))
        return decompressed

    async def body_of(self, request: Request) -> bytes:
        """Receive the body of a Starlette request, a small JSON document. Raises as `body`."""
        return await self.body(request.scope, request.receive, Headers(request.scope["headers"]), MOST_DOCUMENT)

    async def parse(self, body: bytes, parser: Callable[[bytes], T]) -> T:
        """Call a parser, in a thread if the body is large."""
        return await self.compute(len(body), lambda: parser(body))

    async def compute(self, nbytes: int, work: Callable[[], T]) -> T:
        """Do work for so many bytes, in a thread if they are many."""
        return work() if nbytes <= _SMALL else await self._in_thread(work)

    def release(self, scope: Scope) -> None:
        """Stop counting the bytes of an answered request."""
        self._bytes -= scope.pop(_HELD, 0)

    def _hold(self, scope: Scope, nbytes: int) -> None:
        self._bytes += nbytes
        scope[_HELD] = scope.get(_HELD, 0) + nbytes
        if self._bytes > self._settings.max_bodies:
            raise Overloaded(f"the bodies of all requests take more than {self._settings.max_bodies} bytes; try again")

    async def _receive_in_time(self, scope: Scope, receive: Receive, headers: Headers, most: int) -> bytes:
        timeout = self._settings.body_timeout
        if int(headers.text("content-length") or 0) > most:
            raise _too_large(most)
        if RECEIVED in scope:  # no timer is needed
            return await self._receive(scope, receive, most)
        try:
            async with asyncio.timeout(timeout):
                return await self._receive(scope, receive, most)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {timeout:g} s") from error

    async def _receive(self, scope: Scope, receive: Receive, most: int) -> bytes:
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > most:
                raise _too_large(most)
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
        raise BadRequest(f"the body is not valid {encoding}: {error}") from error
    if reader.unconsumed_tail:
        raise _too_large(most)
    if not reader.eof or reader.unused_data:
        raise BadRequest(f"the body is not valid {encoding}: it is truncated, or has trailing data")
    return decompressed


def _too_large(most: int) -> BodyTooLarge:
    advice = "; tensors may have more if they are sent as bytes" if most == MOST_JSON else ""
    return BodyTooLarge(f"the body has more than {most} bytes, the most that this server accepts{advice}")
