"""The interface of ways to a remote object, and how each says what went wrong."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterable, Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol, runtime_checkable

from weightswap_runtime.errors import AccessDenied, WeightFileError
from weightswap_runtime.sources.location import Url, redact

HEAD_BYTES = 128 << 10  # of an object that the first request asks for: most headers are shorter
STALL = 20.0  # seconds without a byte after which a request is given up
Write = Callable[[bytes], None]
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class ObjectPin(NamedTuple):
    """Which content of an object is read. `size` in bytes; `tag`, such as an ETag, and `modified` may be empty."""

    size: int
    tag: str = ""
    modified: str = ""

    @property
    def exact_tag(self) -> str:
        """The tag, if equal ones stand for equal bytes; those of weak ETags need not. RFC 9110, 8.8.1."""
        return "" if self.tag.startswith("W/") else self.tag

    def differs(self, other: ObjectPin) -> bool:
        """Whether the two are known to be of different contents."""
        pairs = ((self.tag, other.tag), (self.modified, other.modified))
        return self.size != other.size or any(one and two and one != two for one, two in pairs)


class Opened(NamedTuple):
    """The answer to the first request. `head` are the first bytes; `settles_in` seconds every later write shows."""

    pin: ObjectPin
    head: bytes
    settles_in: float = 0.0


class Transport(Protocol):
    """One object, asked for on the event loop of its file system.

    Each may raise Transient, for what may go well another time, and WeightFileError.
    """

    async def open(self) -> Opened | None:
        """Pin what is there now; None if nothing is."""
        ...

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        """Call `write` with bytes `start` to `stop` of the pinned content, in order, in pieces of any size."""
        ...

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        """What is there now; None if nothing is."""
        ...


@runtime_checkable
class Replaceable(Protocol):
    """An object of a store that replaces one only if it is still the one that was read."""

    async def replace(self, content: bytes, tag: str | None) -> bool:
        """Replace the content with a tag, or put bytes where nothing is. False where something else is there.

        Raises as a Transport does; after Transient it may have been done all the same.
        """
        ...


class Transient(Exception):
    """A request that failed, but may succeed if it is sent again; in `after` seconds, if the server says so."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


def lost(url: Url, error: BaseException) -> Transient:
    """A connection that was lost, or an answer that did not come. The text has no secrets."""
    text = redact(str(error), url.raw)
    return Transient(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def failed(url: Url, error: BaseException) -> WeightFileError:
    """A failure that another attempt would not help. The text has no secrets."""
    return WeightFileError(f"{url}: cannot be read ({type(error).__name__}: {redact(str(error), url.raw)})")


def changed(where: str) -> WeightFileError:
    return WeightFileError(
        f"{where}: the object was changed while it was read. Stage again; better, give every set its own name."
    )


def refused(where: str, status: int, reason: str, retry_after: str | None = None) -> Transient | WeightFileError:
    """What an HTTP status means that is neither success nor 404."""
    if status in _TRANSIENT:
        return Transient(f"{status} {reason}".strip(), _seconds(retry_after))
    if status == 412:
        return changed(where)
    text = f"{where}: the server refuses ({f'{status} {redact(reason)}'.strip()})."
    if status in (401, 403):
        return AccessDenied(f"{text} Check the credentials, and whether a signed URL has expired.")
    return WeightFileError(f"{text} Check the URL.")


def _seconds(retry_after: str | None) -> float:
    """A Retry-After header: seconds, or a date. RFC 9110, 10.2.3."""
    if not retry_after:
        return 0.0
    try:
        if retry_after.strip().isdigit():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


async def gather(pieces: AsyncIterable[bytes], size: int, where: str) -> bytes:
    """The bytes of an answer. No more are read than one piece beyond `size`.

    Raises WeightFileError if there are more, and Transient if there are fewer.
    """
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > size:
            raise too_many(where)
    if len(content) < size:
        raise Transient(f"the answer has {len(content)} bytes, expected {size}")
    return bytes(content)


def too_many(where: str) -> WeightFileError:
    return WeightFileError(f"{where}: the server sends more bytes than it was asked for")


class ContentRange(NamedTuple):
    """`bytes start-end/total` with `stop` behind the end; None for what a server does not say."""

    start: int | None
    stop: int | None
    total: int | None


def parse_content_range(text: str | None, where: str) -> ContentRange:
    """Read a Content-Range header. RFC 9110, 14.4."""
    found = _CONTENT_RANGE.fullmatch((text or "").strip())
    if found is None:
        raise WeightFileError(f"{where}: the server answers with the Content-Range {text!r}, which cannot be read")
    start, end, total = (int(number) if number and number != "*" else None for number in found.groups())
    return ContentRange(start, None if end is None else end + 1, total)


def total_of(found: ContentRange, where: str) -> int:
    """How large the object is. Raises WeightFileError if the server does not say."""
    if found.total is None:
        raise WeightFileError(f"{where}: the server does not say how large it is")
    return found.total


def check_range(answered: ContentRange, start: int, stop: int, where: str) -> None:
    """Raise WeightFileError unless an answer has the bytes that were asked for."""
    if (answered.start, answered.stop) != (start, stop):
        raise WeightFileError(
            f"{where}: the server was asked for the bytes {start} to {stop} and answers with {answered.start} to "
            f"{answered.stop}. Another server, or a proxy between, may do better."
        )
