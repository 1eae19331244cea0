"""Objects of a web server. Ranges, preconditions and validators: RFC 9110, 8.8, 13 and 14."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from weightswap_runtime.errors import Unsupported, WeightFileError

from .location import GuardedUrl, Url
from .remote import (
    HEAD_BYTES,
    STALL,
    ContentRange,
    ObjectPin,
    Opened,
    Write,
    changed,
    connection_lost,
    read_failed,
    status_error,
)

_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|html)", re.IGNORECASE)
CLOCK_TICK = 2.0  # seconds: Last-Modified has a resolution of one, and may be set before the last byte is written
_PERMANENT = (
    aiohttp.ClientResponseError,  # not HTTP; statuses do not raise it
    aiohttp.InvalidURL,
    aiohttp.TooManyRedirects,
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ServerFingerprintMismatch,
)


class WebObject:
    """Transport over the session of fsspec's HTTP file system. aiohttp does TLS, redirects and proxies."""

    def __init__(self, fs: Any, url: Url) -> None:
        self._fs = fs
        self._url = url
        self._where = str(url)

    async def open(self) -> Opened | None:
        async with self._get(0, HEAD_BYTES) as response:
            if response.status in (404, 410):
                return None
            if response.status == 416:  # an empty object has no range
                return Opened(self._pin(response, self._range(response).size), b"")
            self._check_status(response)
            if response.status == 200:
                self._check_whole(response)
            content_range = self._range(response)
            head = await content_range.read_head(response.content.iter_any(), HEAD_BYTES)
            if _PAGE.match(head):
                raise self._web_page()
            return Opened(self._pin(response, content_range.size), head, _settles_in(response))

    def _check_whole(self, response: aiohttp.ClientResponse) -> None:
        """Raise WeightFileError or Unsupported unless a response without a range is the whole of a small object."""
        size = response.content_length
        if response.content_type == "text/html" and (size is None or size > HEAD_BYTES):
            raise self._web_page()
        if size is not None and size > HEAD_BYTES:
            raise self._without_ranges()

    def _web_page(self) -> WeightFileError:
        return WeightFileError(
            f"{self._where}: the server sent a web page, not a file. Check the URL; a folder's ends with a slash.",
            reason="damaged",
        )

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        async with self._get(start, stop, pin) as response:
            if response.status in (404, 410, 416):
                raise changed(self._where)
            self._check_status(response)
            if response.status == 200:
                raise self._without_ranges()
            content_range = self._range(response)
            if pin.differs(self._pin(response, content_range.total or pin.size)):
                raise changed(self._where)
            content_range.check(start, stop)
            async for data in response.content.iter_any():
                write(data)

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        async with self._get(0, 1) as response:  # a signed URL may allow GET only
            if response.status in (404, 410):
                return None
            self._check_status(response)
            return self._pin(response, self._range(response).size)

    @asynccontextmanager
    async def _get(self, start: int, stop: int, pin: ObjectPin | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(None, sock_connect=STALL, sock_read=STALL)}
        options |= self._fs.kwargs
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", **_conditions(pin)}
        options["headers"] = {**options.get("headers", {}), **headers}
        if isinstance(self._url, GuardedUrl):
            options["middlewares"] = (_guard(self._url),)
        try:
            session = await self._fs.set_session()
            async with session.get(self._fs.encode_url(self._url.raw), **options) as response:
                yield response
        except _PERMANENT as error:  # `from None`: the texts of the causes show credentials
            raise read_failed(self._url, error) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise connection_lost(self._url, error) from None
        except ValueError as error:
            raise read_failed(self._url, error) from None

    def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status not in (200, 206):
            retry_after = response.headers.get("Retry-After")
            raise status_error(self._where, response.status, response.reason or "", retry_after)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise Unsupported(f"{self._where}: the server compresses it, so ranges of it cannot be read")

    def _range(self, response: aiohttp.ClientResponse) -> ContentRange:
        if response.status == 200:  # the whole object
            return ContentRange(self._where, 0, response.content_length, response.content_length)
        return ContentRange.parse(response.headers.get("Content-Range"), self._where)

    def _without_ranges(self) -> Unsupported:
        return Unsupported(
            f"{self._where}: the server does not support range requests. Use one that does, or copy the file and swap "
            "the copy."
        )

    @staticmethod
    def _pin(response: aiohttp.ClientResponse, size: int) -> ObjectPin:
        return ObjectPin(size, response.headers.get("ETag", ""), response.headers.get("Last-Modified", ""))


def _guard(url: GuardedUrl) -> aiohttp.ClientMiddlewareType:
    """Return a middleware, which aiohttp calls before each request, those of redirects included."""

    async def check(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if not url.admits(str(request.url)):
            raise WeightFileError(f"{url}: redirects to {Url(str(request.url))}, from which nothing may be read")
        return await handler(request)

    return check


def _settles_in(response: aiohttp.ClientResponse) -> float:
    """Return for how many seconds the object may still be overwritten without a change of Last-Modified.

    An ETag does not shorten this time: many servers derive it from Last-Modified and the size.
    """
    date, modified = response.headers.get("Date"), response.headers.get("Last-Modified")
    if not modified:
        return 0.0
    if not date:
        return CLOCK_TICK
    try:
        age = (parsedate_to_datetime(date) - parsedate_to_datetime(modified)).total_seconds()
    except (ValueError, TypeError):
        return CLOCK_TICK
    return min(CLOCK_TICK, max(0.0, CLOCK_TICK - age))


def _conditions(pin: ObjectPin | None) -> dict[str, str]:
    if pin is None:
        return {}
    if pin.exact_tag:  # weak ones never match: RFC 9110, 13.1.1
        return {"If-Match": pin.exact_tag}
    return {"If-Unmodified-Since": pin.modified} if pin.modified else {}
