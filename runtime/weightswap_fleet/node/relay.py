"""Relay of weights between nodes: one node reads a URL in chunks, and the others get the chunks from it.

So a fleet reads a bucket once. All nodes verify the weights themselves, and read directly what the reader does not
give. A `Transfer` moves the chunks: with Ray, through its object store, in which each node with a chunk passes it on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from weightswap_runtime.errors import WeightFileError, text_of
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location, is_url
from weightswap_runtime.sources.opening import GivenUrl, find_source
from weightswap_runtime.sources.remote import RemoteObject, changed

CHUNK = 32 << 20  # bytes: large enough that a message for each costs nothing beside it
GIVEN, FETCHED = 8, 4  # chunks that a reader keeps for other nodes, and that a taker keeps for itself
OBJECTS, IDLE = 4, 120.0  # the most files that a reader has open, and seconds after which an unused one is closed
_POLL = 0.02  # seconds between two checks during a wait for a reader
_FILES = (".safetensors", ".json")
_log = logging.getLogger("weightswap.fleet")
T = TypeVar("T")


class RelayMethods(Protocol):
    """What a node's relay does for other nodes. A chunk is a reference of `Transfer.put`.

    A file that it has open is described by its size in bytes and by the tag of its content's version, which is empty
    if the store has no versions.
    """

    def describe(self, url: str) -> tuple[int, str] | None: ...
    def chunk(self, url: str, tag: str, number: int) -> Any: ...
    def settle(self, url: str, tag: str) -> None: ...


class Transfer(Protocol):
    """The connection between nodes, and the store of chunks."""

    def relay_of(self, node: str) -> RelayMethods:
        """Return another node's relay. This and its methods raise any error that tells that it does not answer."""
        ...

    def put(self, content: bytearray) -> Any:
        """Store a chunk for all nodes, and return a reference that keeps it alive."""
        ...

    def get(self, put: Any) -> memoryview:
        """Get the chunk of a reference, on any node. Raises any error that tells that it is not available."""
        ...


class Relay:
    """The relay of one node: it reads for other nodes, and takes from them. Every method is thread-safe."""

    def __init__(self, node: str, transfer: Transfer, unit: int = CHUNK) -> None:
        """node: the name of this one. unit: bytes of a chunk, the same on all nodes."""
        self.node, self.unit = node, unit
        self._transfer = transfer
        self._readings: OrderedDict[str, _Reading] = OrderedDict()
        self._opening = Lock()

    def route(self, source: str, reader: str) -> str | Url:
        """Return the relayed form of a URL that one node reads for all, and other sources unchanged."""
        if not reader or not is_url(source) or "?" in source or "#" in source:
            return source
        location = as_location(source)
        if not isinstance(location, Url) or not location.name.endswith(_FILES):
            return source
        return RelayedUrl(location.raw, self, reader)

    def describe(self, url: str) -> tuple[int, str] | None:
        """Open a URL for all nodes; None if nothing is there. Chunks of an earlier content are dropped."""
        reading = self._readings.get(url)
        if reading is None or not _is_unchanged(reading.source):
            reading = self._open_instead_of(reading, url)
        else:
            reading.used = time.monotonic()
        return (reading.source.size, reading.tag) if reading is not None else None

    def _open_instead_of(self, known: _Reading | None, url: str) -> _Reading | None:
        """Open the present content, unless another thread has done so."""
        with self._opening:
            reading = self._readings.get(url)
            if reading is not known:
                return reading
            source = find_source(url)
            reading = _Reading(source, self.unit, self._transfer.put) if source is not None else None
            self._readings.pop(url, None)
            if reading is not None:
                self._readings[url] = reading
            if len(self._readings) > OBJECTS:
                self._readings.popitem(last=False)
            return reading

    def chunk(self, url: str, tag: str, number: int) -> Any:
        """Return a chunk, as a reference of `Transfer.put`. Raises WeightFileError if the content has changed."""
        return self._reading(url, tag).chunks.get(number)

    def settle(self, url: str, tag: str) -> None:
        """Call the source's `await_stable_mtime`."""
        self._reading(url, tag).source.await_stable_mtime()

    def _reading(self, url: str, tag: str) -> _Reading:
        reading = self._readings.get(url)
        if reading is None or reading.tag != tag:
            raise changed(str(Url(url)))
        reading.used = time.monotonic()
        return reading

    def sweep(self, now: float) -> None:
        """Drop the files that were not used for IDLE seconds. now: by `time.monotonic`."""
        with self._opening:
            for url, reading in list(self._readings.items()):
                if now > reading.used + IDLE:
                    del self._readings[url]

    def of(self, reader: str) -> RelayMethods:
        """Return the relay of the reader, which may be this node."""
        return self if reader == self.node else self._transfer.relay_of(reader)

    def fetch(self, reader: str, url: str, tag: str, number: int) -> memoryview:
        """Return a chunk that the reader reads."""
        return self._transfer.get(self.of(reader).chunk(url, tag, number))

    def open(self, reader: str, url: str, check: Check | None) -> ByteSource | None:
        """Open a URL through its reader, or directly if the reader does not answer. None if nothing is there."""
        try:
            described = _interruptible(lambda: self.of(reader).describe(url), check)
        except Exception as error:
            if check is not None:
                check()
            _log.warning("%s: %s did not read it (%s); read here", Url(url), reader, text_of(error))
            return find_source(url, check)
        if described is None:
            return None
        if not described[1]:  # a change of the content would go unnoticed
            return find_source(url, check)
        return RelayedObject(self, reader, url, described, check)


@dataclass(frozen=True, repr=False)
class RelayedUrl(GivenUrl):
    """A URL that one node reads for all."""

    relay: Relay
    reader: str

    def find(self, check: Check | None) -> ByteSource | None:
        return self.relay.open(self.reader, self.raw, check)


class RelayedObject:
    """A ByteSource of chunks that the reader reads. After the first failure, it is read directly."""

    def __init__(self, relay: Relay, reader: str, url: str, described: tuple[int, str], check: Check | None) -> None:
        self.where, self.unit = str(Url(url)), relay.unit
        self.size, self._tag = described
        self._relay, self._reader, self._url, self._check = relay, reader, url, check
        self._chunks: _Chunks[memoryview] = _Chunks(lambda n: relay.fetch(reader, url, self._tag, n), FETCHED)
        self._direct: ByteSource | None = None
        self._lock = Lock()

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        if direct := self._direct_unless(partial(self._fetch, buffers, offset)):
            direct.read_into(buffers, offset)

    def await_stable_mtime(self) -> None:
        if direct := self._direct_unless(lambda: self._ask(lambda reader: reader.settle(self._url, self._tag))):
            direct.await_stable_mtime()

    def check_unchanged(self, *, proven: bool = False) -> None:
        if self._direct is None:
            try:
                description = self._ask(lambda reader: reader.describe(self._url))
            except Exception as error:
                self._read_directly(error)
            else:
                if description != (self.size, self._tag):
                    raise changed(self.where)
        if self._direct is not None:
            self._direct.check_unchanged(proven=proven)

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()

    def _fetch(self, buffers: list[memoryview], offset: int) -> None:
        for buffer in buffers:
            flat, done = buffer.cast("B"), 0
            while done < len(flat):
                number, start = divmod(offset + done, self.unit)
                chunk = _interruptible(partial(self._chunks.get, number), self._check)
                piece = chunk[start : start + len(flat) - done]
                if not len(piece):
                    raise WeightFileError(f"{self.where}: a chunk is shorter than announced")
                flat[done : done + len(piece)] = piece
                done += len(piece)
            offset += len(flat)

    def _ask(self, method: Callable[[RelayMethods], T]) -> T:
        return _interruptible(lambda: method(self._relay.of(self._reader)), self._check)

    def _direct_unless(self, work: Callable[[], object]) -> ByteSource | None:
        """Do the work by the reader, and return None; if the reader fails or has failed, return the direct source."""
        if self._direct is None:
            try:
                work()
            except Exception as error:
                self._read_directly(error)
        return self._direct

    def _read_directly(self, error: Exception) -> None:
        """Open the direct source after an error of the reader. Raises WeightFileError if the content has changed."""
        if self._check is not None:
            self._check()
        with self._lock:
            if self._direct is not None:
                return
            _log.warning("%s: %s no longer reads it (%s); read here", self.where, self._reader, text_of(error))
            source = find_source(self._url, self._check)
            if source is None or (source.size, _tag_of(source)) != (self.size, self._tag):
                raise changed(self.where)
            self._direct = source


def _interruptible(work: Callable[[], T], check: Check | None) -> T:
    """Return the result of `work`, calling `check` every few milliseconds. Its error ends the wait, not the work."""
    if check is None:
        return work()
    done = begun(work)
    check()
    while not wait([done], _POLL).done:
        check()
    return done.result()


def begun(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread of its own, which may hang without keeping the process alive."""
    done: Future[T] = Future()
    threading.Thread(target=_fill, args=(done, work), name="weightswap-relay", daemon=True).start()
    return done


def _fill(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Reading:
    """A file that a reader has open, with its latest chunks."""

    def __init__(self, source: ByteSource, chunk: int, put: Callable[[bytearray], Any]) -> None:
        self.source, self.tag, self.used = source, _tag_of(source), time.monotonic()

        def read(number: int) -> Any:
            content = bytearray(max(0, min(chunk, source.size - number * chunk)))
            source.read_into([memoryview(content)], number * chunk)
            return put(content)

        self.chunks: _Chunks[Any] = _Chunks(read, GIVEN)


class _Chunks(Generic[T]):
    """A cache of the latest chunks. Concurrent requests for a chunk load it once."""

    def __init__(self, load: Callable[[int], T], most: int) -> None:
        self._load, self._most = load, most
        self._known: OrderedDict[int, Future[T]] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int) -> T:
        """Return a chunk. Raises what loading raises; the next call then loads it again."""
        with self._lock:
            future = self._known.get(number)
            is_first = future is None
            if future is None:
                future = self._known[number] = Future()
            self._known.move_to_end(number)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        if is_first:
            _fill(future, lambda: self._load(number))
            if future.exception() is not None:
                with self._lock:
                    self._known.pop(number, None)
        return future.result()


def _is_unchanged(source: ByteSource) -> bool:
    try:
        source.check_unchanged()
    except WeightFileError:
        return False
    return True


def _tag_of(source: ByteSource) -> str:
    """Return the version of a content, or "" if it does not identify its bytes."""
    return source.tag if isinstance(source, RemoteObject) and not source.tag.startswith("W/") else ""
