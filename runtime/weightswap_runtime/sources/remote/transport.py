"""Interface of transports, which access a remote object, and the errors that they share."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterable, Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol, runtime_checkable

from weightswap_runtime.errors import AccessDenied, WeightFileError
from weightswap_runtime.sources.location import Url, redact

HEAD_BYTES = 128 << 10  # size of the first request: most headers are shorter
STALL = 20.0  # timeout of a request in seconds without a byte
Write = Callable[[bytes], None]
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class ObjectPin(NamedTuple):
    """Version of an object's content. `size` in bytes; `tag`, such as an ETag, and `modified` may be empty."""

    size: int
    tag: str = ""
    modified: str = ""

    @property
    def exact_tag(self) -> str:
        """Tag if equal tags mean equal bytes; empty for a weak ETag. RFC 9110, 8.8.1."""
        return "" if self.tag.startswith("W/") else self.tag

    def differs(self, other: ObjectPin) -> bool:
        """Return True if the two are known to stand for different contents."""
        pairs = ((self.tag, other.tag), (self.modified, other.modified))
        return self.size != other.size or any(one and two and one != two for one, two in pairs)


class Opened(NamedTuple):
    """Response to the first request. `head` are the first bytes.

    Writes in the next `settles_in` seconds may be undetectable; every later one is detected.
    """

    pin: ObjectPin
    head: bytes
    settles_in: float = 0.0


class Transport(Protocol):
    """Access to one object, on the event loop of its file system.

    Each method may raise Transient, for failures that a retry may overcome, and WeightFileError.
    """

    async def open(self) -> Opened | None:
        """Pin the current content; None if there is no object."""
        ...

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        """Call `write` with bytes `start` to `stop` of the pinned content, in order, in pieces of any size."""
        ...

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        """Return the pin of the current content; None if there is no object."""
        ...


@runtime_checkable
class Replaceable(Protocol):
    """Object of a store with compare-and-swap: it is replaced only if it still has the tag that was read."""

    async def replace(self, content: bytes, tag: str | None) -> bool:
        """Replace the content with the given tag, or create the object if `tag` is None. False on a conflict.

        Raises what a Transport raises; after Transient the write may have succeeded nevertheless.
        """
        ...


class Transient(Exception):
    """Failed request that may succeed if it is sent again, after `after` seconds if the server says so."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


def connection_lost(url: Url, error: BaseException) -> Transient:
    """Return the error for a lost connection or a missing response. Its text has no secrets."""
    text = redact(str(error), url.raw)
    return Transient(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def read_failed(url: Url, error: BaseException) -> WeightFileError:
    """Return the error for a failure that a retry would not overcome. Its text has no secrets."""
    return WeightFileError(f"{url}: cannot be read ({type(error).__name__}: {redact(str(error), url.raw)})")


def changed(where: str) -> WeightFileError:
    return WeightFileError(
        f"{where}: the object was changed while it was read. Stage again; better, give every set its own name."
    )


def status_error(where: str, status: int, reason: str, retry_after: str | None = None) -> Transient | WeightFileError:
    """Return the error for an HTTP status that is neither success nor 404."""
    if status in _TRANSIENT:
        return Transient(f"{status} {reason}".strip(), _seconds(retry_after))
    if status == 412:
        return changed(where)
    text = f"{where}: the server refused ({f'{status} {redact(reason)}'.strip()})."
    if status in (401, 403):
        return AccessDenied(f"{text} Check the credentials, and whether a signed URL has expired.")
    return WeightFileError(f"{text} Check the URL.")


def _seconds(retry_after: str | None) -> float:
    """Return the seconds in a Retry-After header, which has seconds or a date. RFC 9110, 10.2.3."""
    if not retry_after:
        return 0.0
    try:
        if retry_after.strip().isdigit():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


async def read_exactly(pieces: AsyncIterable[bytes], size: int, where: str) -> bytes:
    """Read the `size` bytes of a response. Reads at most one piece beyond `size`.

    Raises WeightFileError if there are more bytes, and Transient if there are fewer.
    """
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > size:
            raise too_many_bytes(where)
    if len(content) < size:
        raise Transient(f"the response has {len(content)} bytes, expected {size}")
    return bytes(content)


def too_many_bytes(where: str) -> WeightFileError:
    return WeightFileError(f"{where}: the server sent more bytes than requested")


class ContentRange(NamedTuple):
    """Content of `bytes start-end/total`; `stop` is end + 1. Parts that the server leaves out are None."""

    start: int | None
    stop: int | None
    total: int | None


def parse_content_range(text: str | None, where: str) -> ContentRange:
    """Parse a Content-Range header. RFC 9110, 14.4. Raises WeightFileError."""
    match = _CONTENT_RANGE.fullmatch((text or "").strip())
    if match is None:
        raise WeightFileError(f"{where}: the server sent the Content-Range {text!r}, which cannot be parsed")
    start, end, total = (int(number) if number and number != "*" else None for number in match.groups())
    return ContentRange(start, None if end is None else end + 1, total)


def total_of(content_range: ContentRange, where: str) -> int:
    """Return the size of the object. Raises WeightFileError if the server does not say it."""
    if content_range.total is None:
        raise WeightFileError(f"{where}: the server does not report its size")
    return content_range.total


def check_range(content_range: ContentRange, start: int, stop: int, where: str) -> None:
    """Raise WeightFileError unless a response has the requested bytes."""
    if (content_range.start, content_range.stop) != (start, stop):
        raise WeightFileError(
            f"{where}: the server was asked for bytes {start} to {stop}, but sent {content_range.start} to "
            f"{content_range.stop}. Another server or proxy may do better."
        )
