"""Objects behind URLs, read in ranges.

An object may be overwritten between two requests, and any request may fail or stall. So the first response pins a
version (an ETag, a generation, a time), all others must be of that version, and a failed request continues where it
ended. `web` and `s3` have transports of their own; all other file systems of fsspec share `GenericObject`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import wait
from email.utils import parsedate_to_datetime
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from weightswap_runtime.errors import StageCancelled, WeightFileError
from weightswap_runtime.jobs import POLL_SECONDS
from weightswap_runtime.tensors import digest_of

from .byte_source import ByteSource, Check
from .location import Url, redact

HEAD_BYTES = 128 << 10  # size of the first request: most headers are shorter
RANGE_BYTES = 8 << 20  # size of every other request
MOST_REQUESTS = 10  # at the same time in this process: the size of aiobotocore's connection pool
STALL = 20.0  # timeout of a request in seconds without a byte
CALL_TIMEOUT = 3 * STALL  # seconds for one call of a file system, whose progress cannot be observed
ATTEMPTS = 6  # of a request
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds
MOST_SECONDS = 120.0  # from the start of the first attempt, in which others may begin
CONTENT_KEYS = (
    "generation",
    "VersionId",
    "version_id",
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "xet_hash",
)
TIME_KEYS = ("LastModified", "last_modified", "modified", "mtime", "updated", "created", "last_commit")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_jitter = random.Random()  # separate from the global generator, which a training may have seeded
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

T = TypeVar("T")
Loop = Callable[[], asyncio.AbstractEventLoop]
Write = Callable[[bytes], None]


class ObjectPin(NamedTuple):
    """Version of an object's content."""

    size: int  # bytes
    tag: str = ""  # such as an ETag; empty if the store has none
    modified: str = ""  # as the store writes it; empty if unknown

    @property
    def exact_tag(self) -> str:
        """Tag if equal tags mean equal bytes; empty for a weak ETag. RFC 9110, 8.8.1."""
        return "" if self.tag.startswith("W/") else self.tag

    def differs(self, other: ObjectPin) -> bool:
        """Return True if the two are known to stand for different contents."""
        pairs = ((self.tag, other.tag), (self.modified, other.modified))
        return self.size != other.size or any(one and two and one != two for one, two in pairs)


class Opened(NamedTuple):
    """Response to the first request."""

    pin: ObjectPin
    head: bytes  # the first bytes
    settles_in: float = 0.0  # seconds in which writes may be undetectable; every later one is detected


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


class RemoteObject(ByteSource):
    """ByteSource over a Transport. Up to MOST_REQUESTS ranges of RANGE_BYTES are requested at the same time.

    Received pieces, of at most some hundred kilobytes, are copied to their target immediately. The file system keeps
    its connections.
    """

    unit = 32 << 20  # several ranges, so that their requests overlap

    def __init__(self, where: str, transport: Transport, opened: Opened, loop: Loop, check: Check) -> None:
        self.where = where
        self.pin, self._head, self._settles_in = opened
        self.size, self.tag, _ = self.pin
        self._transport = transport
        self._settled_at = time.monotonic() + self._settles_in
        # offset, size and digest of reads made while a write could still go undetected
        self._early_reads: list[tuple[int, int, str]] = []
        self._loop = loop
        self._check = check

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        landing, early = Landing(buffers), time.monotonic() < self._settled_at
        try:
            if offset + landing.size <= len(self._head):
                landing.write(0, self._head[offset : offset + landing.size])
            else:
                wait_for(self._loop(), self._read(landing, offset), self._check)
                if early:
                    self._early_reads.append((offset, landing.size, digest_of(buffers)))
        finally:
            landing.close()

    async def _read(self, landing: Landing, offset: int) -> None:
        end = offset + landing.size
        requests = [
            asyncio.ensure_future(self._read_range(landing, offset, start, min(start + RANGE_BYTES, end)))
            for start in range(offset, end, RANGE_BYTES)
        ]
        try:
            await asyncio.gather(*requests)
        finally:
            # when one has failed, the others must have ended too before the caller may reuse the memory
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            requests.clear()  # breaks cycles: the requests' errors refer to this frame

    async def _read_range(self, landing: Landing, offset: int, start: int, stop: int) -> None:
        at = start  # bytes before it have arrived: a retry asks only for the rest

        def write(data: bytes) -> None:
            nonlocal at
            if at + len(data) > stop:
                raise _too_many_bytes(self.where)
            landing.write(at - offset, data)
            at += len(data)

        async def attempt() -> None:
            async with _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_REQUESTS)):
                await self._transport.fetch(self.pin, at, stop, write)
            if at < stop:
                raise Transient(f"the response ends {stop - at} bytes early")

        await retry(attempt, lambda: f"{self.where}: cannot be read at byte {at}")

    def await_stable_mtime(self) -> None:
        """Wait until the server's clock has left the second in which the object was written.

        Raises WeightFileError if bytes that were read before are then no longer the same.
        """
        if self._is_whole:
            return
        if not (self.pin.exact_tag or self.pin.modified):
            raise WeightFileError(
                f"{self.where}: has neither digests nor anything that shows when it changes (a strong ETag, "
                "Last-Modified). Pack it with weightswap, or serve it with a strong ETag."
            )
        while (seconds := self._settled_at - time.monotonic()) > 0:
            self._check()
            time.sleep(min(seconds, POLL_SECONDS))
        if self._settles_in:
            self._compare_early_reads()

    def _compare_early_reads(self) -> None:
        """Raise WeightFileError unless early reads give the same bytes again."""
        opened = self._ask(self._transport.open)
        if opened is None or self.pin.differs(opened.pin) or opened.head != self._head:
            raise changed(self.where)
        for start, size, digest in self._early_reads:
            again = memoryview(bytearray(size))
            self.read_into([again], start)
            if digest_of([again]) != digest:
                raise changed(self.where)
        self._early_reads.clear()

    def check_unchanged(self, *, proven: bool = False) -> None:
        if self._is_whole:
            return
        pin = self._ask(lambda: self._transport.probe(self.pin))
        if pin is None or self.pin.differs(pin):
            raise changed(self.where)

    def _ask(self, request: Callable[[], Awaitable[T]]) -> T:
        return wait_for(self._loop(), retry(request, lambda: f"{self.where}: cannot be read"), self._check)

    @property
    def _is_whole(self) -> bool:
        """True if the first response held the whole object: one response is of one version."""
        return len(self._head) == self.size


class Landing:
    """Target memory of responses, which are written to it as they arrive, until it is closed.

    A response may arrive when its reader has given up, and the memory may hold something else by then.
    """

    def __init__(self, buffers: list[memoryview]) -> None:
        self._buffers = buffers
        *self._starts, self.size = accumulate(map(len, buffers), initial=0)
        self._lock = Lock()
        self._closed = False

    def write(self, position: int, data: bytes) -> None:
        """Copy bytes to `position`, counted over all buffers. Raises StageCancelled if the landing is closed."""
        rest = memoryview(data)
        with self._lock:
            if self._closed:
                raise StageCancelled("nobody is waiting for these bytes any more")
            index = bisect_right(self._starts, position) - 1
            while rest:
                begin = position - self._starts[index]
                target = self._buffers[index][begin : begin + len(rest)]
                target[:] = rest[: len(target)]
                position, rest, index = position + len(target), rest[len(target) :], index + 1

    def close(self) -> None:
        """Release the memory. After the return nothing is written to it."""
        self._closed = True  # before the lock: an interrupt may end the wait for it
        with self._lock:
            self._buffers = []


def wait_for(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], check: Check) -> T:
    """Run a coroutine on another thread's event loop. It is cancelled if `check` raises, or on an interrupt."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        while not wait((future,), POLL_SECONDS).done:
            check()
        return future.result()
    finally:
        future.cancel()
        del future  # breaks a cycle: the future's error refers to this frame


class Transient(Exception):
    """Failed request that may succeed if it is sent again, after `after` seconds if the server says so."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


async def retry(attempt: Callable[[], Awaitable[T]], where: Callable[[], str]) -> T:
    """Await `attempt()`, again and again while it raises Transient. Raises WeightFileError when it goes on too long.

    where: gives the beginning of the message, which may say how far the attempts have come.
    """
    start = time.monotonic()
    for number in range(1, ATTEMPTS + 1):
        try:
            return await attempt()
        except Transient as error:
            # exponential, with jitter, so that clients that failed together do not come back together
            backoff = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1)) * _jitter.uniform(0.5, 1.0)
            pause, reason = max(backoff, error.after), str(error)
        if number == ATTEMPTS or time.monotonic() + pause > start + MOST_SECONDS:
            break
        await asyncio.sleep(pause)
    raise WeightFileError(
        f"{where()}, after {number} attempt(s) ({reason}). Check the server and the network, then stage again."
    )


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
        return WeightFileError(f"{text} Check the credentials, and whether a signed URL has expired.", reason="denied")
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


def _too_many_bytes(where: str) -> WeightFileError:
    return WeightFileError(f"{where}: the server sent more bytes than requested")


class ContentRange(NamedTuple):
    """Bytes in a response, as its server says, which need not be those that were requested."""

    where: str
    start: int | None  # None, as the other numbers, if the server leaves it out
    stop: int | None
    total: int | None  # size of the object

    @classmethod
    def parse(cls, text: str | None, where: str) -> ContentRange:
        """Parse a Content-Range header. RFC 9110, 14.4. Raises WeightFileError."""
        match = _CONTENT_RANGE.fullmatch((text or "").strip())
        if match is None:
            raise WeightFileError(f"{where}: the server sent the Content-Range {text!r}, which cannot be parsed")
        start, end, total = (int(number) if number and number != "*" else None for number in match.groups())
        return cls(where, start, None if end is None else end + 1, total)

    @property
    def size(self) -> int:
        """Size of the object. Raises WeightFileError if the server does not say it."""
        if self.total is None:
            raise WeightFileError(f"{self.where}: the server does not report its size")
        return self.total

    def check(self, start: int, stop: int) -> None:
        """Raise WeightFileError unless the response has the requested bytes."""
        if (self.start, self.stop) != (start, stop):
            raise WeightFileError(
                f"{self.where}: the server was asked for bytes {start} to {stop}, but sent {self.start} to "
                f"{self.stop}. Another server or proxy may do better."
            )

    async def read_head(self, pieces: AsyncIterable[bytes], most: int) -> bytes:
        """Read the body of the response to a request for the first `most` bytes, at most one piece beyond them.

        Raises WeightFileError for other bytes or more, and Transient for fewer.
        """
        length = min(self.size, most)
        self.check(0, length)
        content = bytearray()
        async for piece in pieces:
            content += piece
            if len(content) > length:
                raise _too_many_bytes(self.where)
        if len(content) < length:
            raise Transient(f"the response has {len(content)} bytes, expected {length}")
        return bytes(content)


class GenericObject:
    """Transport that compares an object's pin before and after a read; Google's objects are read by generation.

    File systems without an event loop get one call at a time, each in a thread: few of them are thread-safe.
    """

    def __init__(self, fs: Any, path: str, url: Url) -> None:
        self._fs = fs
        self._path = path
        self._url = url
        self._where = str(url)
        self._call_lock = asyncio.Lock()

    async def open(self) -> Opened | None:
        pin = await self.probe(ObjectPin(0))
        if pin is None:
            return None
        head = bytearray()
        if pin.size:
            await self.fetch(pin, 0, min(pin.size, HEAD_BYTES), head.extend)
        return Opened(pin, bytes(head))

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        kind, _, version = pin.tag.partition("=")
        options = {"generation": version} if kind == "generation" else {}
        if self._url.protocol == "hf":
            options["cache_type"] = "none"  # the default cache reads 5 MB ahead of each range
        try:
            data = await self._call("cat_file", self._path, start=start, end=stop, **options)
        except FileNotFoundError:
            raise changed(self._where) from None
        write(data)

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        self._fs.invalidate_cache()  # else a listing from before a write would vouch for the bytes
        try:
            info = await self._call("info", self._path)
        except FileNotFoundError:
            return None
        if info.get("type") == "directory":
            return None
        size = info.get("size")
        if not isinstance(size, int):
            raise WeightFileError(f"{self._where}: its file system does not report its size")
        exact = (key for key in CONTENT_KEYS if info.get(key) and not str(info[key]).startswith("W/"))
        times = (key for key in TIME_KEYS if info.get(key))
        tag, modified = (next((f"{key}={info[key]}" for key in keys), "") for keys in (exact, times))
        return ObjectPin(size, tag, modified)

    async def entries(self) -> list[Mapping[str, Any]]:
        """Return the store's information on each entry of a folder. Raises FileNotFoundError."""
        self._fs.invalidate_cache()
        return list(await self._call("ls", self._path, detail=True))

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system. Raises FileNotFoundError, WeightFileError and Transient."""
        try:
            if not self._fs.async_impl:
                async with self._call_lock:  # no timeout: a thread cannot be stopped
                    return await asyncio.to_thread(getattr(self._fs, name), *arguments, **options)
            async with asyncio.timeout(CALL_TIMEOUT):
                # fsspec's coroutines have the names of its methods with an underscore
                return await getattr(self._fs, f"_{name}")(*arguments, **options)
        except (FileNotFoundError, MemoryError):
            raise
        except PermissionError as error:  # `from None`: the texts of the causes may show credentials
            raise WeightFileError(str(read_failed(self._url, error)), reason="denied") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise read_failed(self._url, error) from None
        except OSError as error:
            raise self._translate(error) from None
        except Exception as error:
            raise read_failed(self._url, error) from None

    def _translate(self, error: OSError) -> Exception:
        """Translate an error; some carry an HTTP response, like the errors of requests and httpx."""
        response: Any = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status is None:
            return connection_lost(self._url, error)
        if status in (404, 410):
            return FileNotFoundError(self._where)
        return status_error(self._where, status, type(error).__name__, response.headers.get("Retry-After"))
