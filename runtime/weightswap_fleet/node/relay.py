"""Weights from node to node: one node reads what is behind a URL, chunk by chunk, and the others take it from there.

So a bucket is read once for a fleet. All nodes verify as if they had read it themselves, and what another node does not
give, they read themselves. The chunks go wherever `Transfer` puts them: with Ray, into its object store, from which
every node that has one gives it on.
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
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from weightswap_runtime.errors import WeightFileError, text_of
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location, is_url
from weightswap_runtime.sources.opening import GivenUrl, find_source
from weightswap_runtime.sources.remote.objects import RemoteObject
from weightswap_runtime.sources.remote.transport import changed

CHUNK = 32 << 20  # bytes
GIVEN, TAKEN = 8, 4  # chunks that a reader keeps for others, and those that a taker keeps for itself
OBJECTS, IDLE = 4, 120.0  # files that a reader has open at most, and seconds for which nobody asks
_POLL = 0.02  # seconds
_FILES = (".safetensors", ".json")
_log = logging.getLogger("weightswap.fleet")
T = TypeVar("T")


class Transfer(Protocol):
    """How nodes talk, and where chunks go."""

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        """What a method of another node's keeper returns. Raises whatever tells that it does not, within a while."""
        ...

    def put(self, content: bytearray) -> Any:
        """A chunk is there for all nodes, as long as what this returns is kept."""
        ...

    def get(self, put: Any) -> memoryview:
        """It, on any node. Raises whatever tells that it cannot be had."""
        ...


class ObjectDescription(NamedTuple):
    """What a reader has open. tag: what its content is pinned to; empty where the store has nothing like that."""

    size: int
    tag: str


class Relay:
    """A node's part: it reads for others, and takes from them. Every method may be called from any thread."""

    def __init__(self, node: str, transfer: Transfer, chunk: int = CHUNK) -> None:
        """node: its own name. chunk: bytes, the same on all nodes."""
        self.node, self.chunk = node, chunk
        self._transfer = transfer
        self._readings: OrderedDict[str, _Reading] = OrderedDict()
        self._opening = Lock()

    def route(self, source: str, reader: str) -> str | Url:
        """What is to be staged instead of a URL that a node reads for all; other sources as they are."""
        if not reader or not is_url(source) or "?" in source or "#" in source:
            return source
        location = as_location(source)
        if not isinstance(location, Url) or not location.name.endswith(_FILES):
            return source
        return RelayedUrl(location.raw, self, reader)

    def describe(self, url: str) -> ObjectDescription | None:
        """Open what is behind a URL, for others; None if nothing is. What was read of an earlier content is gone."""
        reading = self._readings.get(url)
        if reading is None or not _is_unchanged(reading.source):
            reading = self._open_instead_of(reading, url)
        else:
            reading.used = time.monotonic()
        return ObjectDescription(reading.source.size, reading.tag) if reading is not None else None

    def _open_instead_of(self, known: _Reading | None, url: str) -> _Reading | None:
        """Open what is there now, unless another thread has done so."""
        with self._opening:
            reading = self._readings.get(url)
            if reading is not known:
                return reading
            source = find_source(url)
            reading = _Reading(source, self.chunk, self._transfer.put) if source is not None else None
            self._readings.pop(url, None)
            if reading is not None:
                self._readings[url] = reading
            if len(self._readings) > OBJECTS:
                self._readings.popitem(last=False)
            return reading

    def give(self, url: str, tag: str, number: int) -> Any:
        """A chunk, as `Transfer.put` has it. Raises WeightFileError where another content is there by now."""
        return self._reading(url, tag).chunks.get(number)

    def settle(self, url: str, tag: str) -> None:
        """As `ByteSource.await_stable_mtime`."""
        self._reading(url, tag).source.await_stable_mtime()

    def _reading(self, url: str, tag: str) -> _Reading:
        reading = self._readings.get(url)
        if reading is None or reading.tag != tag:
            raise changed(str(Url(url)))
        reading.used = time.monotonic()
        return reading

    def sweep(self, now: float) -> None:
        """Let go of what nobody asks for any more. now: as `time.monotonic` says it."""
        with self._opening:
            for url, reading in list(self._readings.items()):
                if now > reading.used + IDLE:
                    del self._readings[url]

    def ask(self, reader: str, method: str, *arguments: Any) -> Any:
        """What a reader says, which may be this node."""
        if reader == self.node:
            return getattr(self, method)(*arguments)
        return self._transfer.ask(reader, method, *arguments)

    def take(self, reader: str, url: str, tag: str, number: int) -> memoryview:
        """A chunk that a node reads."""
        return self._transfer.get(self.ask(reader, "give", url, tag, number))

    def open(self, reader: str, url: str, check: Check | None) -> ByteSource | None:
        """What is behind a URL, as a node reads it; without that node, as it is read here."""
        try:
            described = attended(lambda: self.ask(reader, "describe", url), check)
        except Exception as error:
            if check is not None:
                check()
            _log.warning("%s: %s does not read it (%s)", Url(url), reader, text_of(error))
            return find_source(url, check)
        if described is None:
            return None
        if not described.tag:  # nothing would tell two contents from each other
            return find_source(url, check)
        return RelayedObject(self, reader, url, described, check)


@dataclass(frozen=True, repr=False)
class RelayedUrl(GivenUrl):
    """A URL that a node reads for this one."""

    relay: Relay
    reader: str

    def find(self, check: Check | None) -> ByteSource | None:
        return self.relay.open(self.reader, self.raw, check)


class RelayedObject:
    """A ByteSource of chunks that another node reads. From the first that it does not give on, it is read here."""

    def __init__(self, relay: Relay, reader: str, url: str, described: ObjectDescription, check: Check | None) -> None:
        self.where, self.unit, self.size = str(Url(url)), relay.chunk, described.size
        self._relay, self._reader, self._url, self._tag, self._check = relay, reader, url, described.tag, check
        self._chunks: _Chunks[memoryview] = _Chunks(lambda n: relay.take(reader, url, self._tag, n), TAKEN)
        self._alone: ByteSource | None = None
        self._lock = Lock()

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        if alone := self._alone_unless(partial(self._take, buffers, offset)):
            alone.read_into(buffers, offset)

    def _take(self, buffers: list[memoryview], offset: int) -> None:
        for buffer in buffers:
            flat, done = buffer.cast("B"), 0
            while done < len(flat):
                number, start = divmod(offset + done, self.unit)
                chunk = attended(partial(self._chunks.get, number), self._check)
                piece = chunk[start : start + len(flat) - done]
                if not len(piece):
                    raise WeightFileError(f"{self.where}: a chunk is shorter than it was said to be")
                flat[done : done + len(piece)] = piece
                done += len(piece)
            offset += len(flat)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return attended(lambda: self._relay.ask(self._reader, method, *arguments), self._check)

    def _alone_unless(self, work: Callable[[], object]) -> ByteSource | None:
        """What is read here, if the reader does not do its part of the work, or did not before."""
        if self._alone is None:
            try:
                work()
            except Exception as error:
                self._read_alone(error)
        return self._alone

    def _read_alone(self, error: Exception) -> None:
        """Raises WeightFileError where another content is there than the one that was begun."""
        if self._check is not None:
            self._check()
        with self._lock:
            if self._alone is not None:
                return
            _log.warning("%s: %s reads it no more (%s); read here", self.where, self._reader, text_of(error))
            found = find_source(self._url, self._check)
            if found is None or (found.size, _tag_of(found)) != (self.size, self._tag):
                raise changed(self.where)
            self._alone = found

    def await_stable_mtime(self) -> None:
        if alone := self._alone_unless(partial(self._ask, "settle", self._url, self._tag)):
            alone.await_stable_mtime()

    def check_unchanged(self, *, proven: bool = False) -> None:
        if self._alone is None:
            try:
                found = self._ask("describe", self._url)
            except Exception as error:
                self._read_alone(error)
            else:
                if found != (self.size, self._tag):
                    raise changed(self.where)
        if self._alone is not None:
            self._alone.check_unchanged(proven=proven)

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()


def attended(work: Callable[[], T], check: Check | None) -> T:
    """What work returns. `check` is called every few milliseconds; what it raises ends the wait, and not the work."""
    if check is None:
        return work()
    done: Future[T] = Future()
    threading.Thread(target=_fill, args=(done, work), name="weightswap-relay", daemon=True).start()
    check()
    while not wait([done], _POLL).done:
        check()
    return done.result()


def _fill(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Reading:
    """What a reader has open, and the last chunks of it."""

    def __init__(self, source: ByteSource, chunk: int, put: Callable[[bytearray], Any]) -> None:
        self.source, self.tag, self.used = source, _tag_of(source), time.monotonic()

        def read(number: int) -> Any:
            content = bytearray(max(0, min(chunk, source.size - number * chunk)))
            source.read_into([memoryview(content)], number * chunk)
            return put(content)

        self.chunks: _Chunks[Any] = _Chunks(read, GIVEN)


class _Chunks(Generic[T]):
    """The last chunks, each of which is had once however many ask for it at a time."""

    def __init__(self, load: Callable[[int], T], most: int) -> None:
        self._load, self._most = load, most
        self._known: OrderedDict[int, Future[T]] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int) -> T:
        """Raises what loading raises; another try is made then."""
        with self._lock:
            future = self._known.get(number)
            mine = future is None
            if future is None:
                future = self._known[number] = Future()
            self._known.move_to_end(number)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        if mine:
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
    """What a content is pinned to, if that stands for its bytes."""
    return source.tag if isinstance(source, RemoteObject) and not source.tag.startswith("W/") else ""
