"""The relay of weights: a URL is read once, even if nodes give up, die or send damaged chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.servers import WebServer
from weightswap_fleet import Deadlines, FleetRefused
from weightswap_fleet.node.relay import GIVEN, IDLE, OBJECTS, Relay, RelayedUrl
from weightswap_runtime import DigestMismatch, StageCancelled, WeightFileError, write_delta
from weightswap_runtime.sources.opening import open_source

from .nodes import Fleet, RemoteRelay, kinds, known_weights, serving_zero

KEPT = 7  # of which none is given up before all have it
CHUNK = 64 << 10
CONTENT = np.random.default_rng(0).bytes(10 * CHUNK + 17)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with serving_zero(tmp_path, 3, monkeypatch) as made:
        made.deadlines = Deadlines(prepare=20.0, commit=0.2)
        yield made


class Wire:
    """Several relays, and the messages between them."""

    def __init__(self, *nodes: str) -> None:
        self.dead: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.damage = False
        self.stuck: dict[str, threading.Event] = {}  # until they are set
        self.reached = threading.Event()
        self.relays = {node: Relay(node, self, CHUNK) for node in nodes}

    def relay_of(self, node: str) -> RemoteRelay:
        return RemoteRelay(self.relays[node], partial(self._pass, node))

    def _pass(self, node: str, method: str) -> None:
        self.asked.append((node, method))
        again = method == "describe" and self.asked.count((node, method)) > 1
        if (released := self.stuck.get("describe again" if again else method)) is not None:
            self.reached.set()
            released.wait(120)
        if node in self.dead:
            raise TimeoutError(f"{node}: did not answer")

    def put(self, content: bytearray) -> bytes:
        return bytes(len(content)) if self.damage else bytes(content)

    def get(self, put: bytes) -> memoryview:
        return memoryview(put)

    def open(self, node: str, url: str, reader: str = "a") -> Any:
        return open_source(self.relays[node].route(url, reader))


def read(source: Any, begin: int = 0, end: int | None = None) -> bytes:
    content = bytearray((source.size if end is None else end) - begin)
    half = len(content) // 2
    source.read_into([memoryview(content)[:half], memoryview(content)[half:]], begin)
    return bytes(content)


def test_a_url_is_read_once_for_all(web: WebServer) -> None:
    wire, url = Wire("a", "b", "c"), web.put("v1.safetensors", CONTENT)
    with ThreadPoolExecutor(3) as pool:
        read_by = pool.map(lambda node: read(wire.open(node, url), 0, KEPT * CHUNK), "abc")
        assert set(read_by) == {CONTENT[: KEPT * CHUNK]}
    assert KEPT * CHUNK <= web.sent < 2 * KEPT * CHUNK  # and the head, when it was opened
    source = wire.open("b", url)
    assert (source.where, source.size) == (url, len(CONTENT))
    for begin, end in ((0, 1), (CHUNK - 1, CHUNK + 1), (5, 5), (3 * CHUNK, 10 * CHUNK + 17), (10 * CHUNK + 16, None)):
        assert read(source, begin, end) == CONTENT[begin:end]
    source.check_unchanged()
    source.await_stable_mtime()
    source.close()


def test_chunks_are_kept_for_a_while_alone(web: WebServer) -> None:
    """A late node makes the reader read dropped chunks again; memory is bounded."""
    wire, url = Wire("a", "b"), web.put("v1.safetensors", CONTENT)
    read(wire.open("a", url))
    assert len(wire.relays["a"]._readings[url].chunks._known) == GIVEN
    before = web.sent
    assert read(wire.open("b", url)) == CONTENT
    assert web.sent > before


def test_what_nobody_asks_for_is_let_go(web: WebServer) -> None:
    wire = Wire("a", "b")
    relay = wire.relays["a"]
    urls = [web.put(f"v{number}.safetensors", CONTENT) for number in range(OBJECTS + 2)]
    sources = [wire.open("b", url) for url in urls]
    assert list(relay._readings) == urls[-OBJECTS:]
    relay.sweep(time.monotonic() + IDLE - 1)
    assert len(relay._readings) == OBJECTS
    relay.sweep(time.monotonic() + IDLE + 1)
    assert not relay._readings
    assert {read(source) for source in sources} == {CONTENT}  # by themselves


@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_without_its_reader_a_node_reads_on_by_itself(web: WebServer, after: int) -> None:
    wire, url = Wire("a", "b"), web.put("v1.safetensors", CONTENT)
    if not after:
        wire.dead.add("a")
    source = wire.open("b", url)
    found = bytearray()
    for number in range(11):
        if number == after:
            wire.dead.add("a")
        found += read(source, number * CHUNK, min(len(CONTENT), (number + 1) * CHUNK))
    wire.dead.add("a")
    assert found == CONTENT
    source.await_stable_mtime()
    source.check_unchanged()


def test_another_content_is_not_read_on(web: WebServer) -> None:
    """Neither through the reader nor without it."""
    wire, url = Wire("a", "b", "c"), web.put("v1.safetensors", CONTENT)
    through, alone = wire.open("b", url), wire.open("c", url)
    for source in (through, alone):
        assert read(source, 0, CHUNK) == CONTENT[:CHUNK]
    web.put("v1.safetensors", CONTENT[::-1])
    with pytest.raises(WeightFileError, match="changed while it was read"):
        through.check_unchanged()
    wire.dead.add("a")
    with pytest.raises(WeightFileError, match="changed while it was read"):
        read(alone, 9 * CHUNK, 10 * CHUNK)
    wire.dead.clear()
    assert read(wire.open("b", url)) == CONTENT[::-1]


def test_nothing_is_there(web: WebServer) -> None:
    wire = Wire("a", "b")
    with pytest.raises(WeightFileError, match="no such object"):
        wire.open("b", f"{web.url}/nothing.safetensors")


def test_without_a_tag_each_reads_for_itself(web: WebServer) -> None:
    wire, url = Wire("a", "b"), web.put("v1.safetensors", CONTENT, etag=None)
    assert read(wire.open("b", url)) == CONTENT
    assert wire.asked == [("a", "describe")]
    weak = web.put("v2.safetensors", CONTENT, etag='W/"1"')
    assert read(wire.open("b", weak)) == CONTENT
    assert {method for _, method in wire.asked} == {"describe"}


@pytest.mark.parametrize(
    "source",
    ["/data/v1.safetensors", "s3://bucket/run/", "https://host/v1.safetensors?X-Amz-Signature=1", "https://host/a#1"],
)
def test_what_goes_no_other_way(source: str) -> None:
    relay = Wire("a").relays["a"]
    assert relay.route(source, "b") == source
    assert relay.route("s3://bucket/v1.safetensors", "") == "s3://bucket/v1.safetensors"
    relayed = relay.route("s3://bucket/v1.safetensors.index.json", "b")
    assert str(relayed) == "s3://bucket/v1.safetensors.index.json"
    assert isinstance(relayed, RelayedUrl)
    assert isinstance(relayed.with_name("v1-00001-of-00002.safetensors"), RelayedUrl)  # its shards come the same way


@pytest.mark.parametrize("method", ["describe", "chunk", "settle", "describe again"])
def test_a_wait_for_a_reader_ends_when_it_is_told_to(method: str, web: WebServer) -> None:
    """A rollback does not wait for a reader that has stopped."""
    wire, url = Wire("a", "b"), web.put("v1.safetensors", CONTENT)
    ended, released = threading.Event(), threading.Event()

    def check() -> None:
        if ended.is_set():
            raise StageCancelled("ended")

    def whole() -> None:
        source = open_source(wire.relays["b"].route(url, "a"), check)
        read(source)
        source.await_stable_mtime()
        source.check_unchanged()

    wire.stuck[method] = released
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(whole)
        assert wire.reached.wait(120)
        ended.set()
        with pytest.raises(StageCancelled):
            reading.result(120)
        released.set()


def test_a_fleet_reads_a_bucket_once(fleet: Fleet, web: WebServer) -> None:
    content = fleet.file(1).read_bytes()
    url = web.put("v1.safetensors", content)
    known_weights(url)
    before = web.sent
    receipt = fleet.swap(url)
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(1)}
    known = len(content)  # the coordinator reads the header
    assert web.sent - before <= 3 * known  # it, the reader, and a look whether it has changed; five without
    assert fleet.desired_store.read().weights.source == url  # type: ignore[union-attr]
    assert {agent.model.history[-1].source for agent in fleet.agents.values()} == {url}


def test_a_delta_is_read_once_and_its_base_by_who_lacks_it(fleet: Fleet, web: WebServer) -> None:
    delta = write_delta(fleet.file(0), fleet.file(1), fleet.where / "d.safetensors").path.read_bytes()
    web.put("v0.safetensors", fleet.file(0).read_bytes())
    fleet.desired_store.set(f"{web.url}/v0.safetensors", revision=1, known=known_weights(fleet.file(0)))
    fleet.reconcile()
    url, before = web.put("d.safetensors", delta), web.sent
    known_weights(url)
    known = web.sent - before
    assert set(fleet.swap(url).nodes) == {"n0", "n1", "n2"}
    assert web.sent - before <= 3 * known + 2 * len(delta)  # one reader; not three
    assert fleet.all_serve(1)
    fleet.start("n3")
    assert fleet.agents["n3"].model.weights_id == fleet.weights_id(1)


def test_damage_on_the_way_is_seen(fleet: Fleet, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node verifies the weights itself, and none changes."""
    url = web.put("v1.safetensors", fleet.file(1).read_bytes())
    taker = fleet.relays["n2"]
    take = taker.fetch

    def damaged(*arguments: Any) -> memoryview:
        content = bytearray(take(*arguments))
        content[-1] ^= 1
        return memoryview(content)

    monkeypatch.setattr(taker, "fetch", damaged)
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(url)
    assert kinds(refused) == {"n2": DigestMismatch}
    assert f"n2: DigestMismatch: {url}: refused, 1 problem; " in str(refused.value)
    assert fleet.all_serve(0)


def test_a_fleet_whose_reader_gives_nothing_reads_by_itself(fleet: Fleet, web: WebServer) -> None:
    url = web.put("v1.safetensors", fleet.file(1).read_bytes())
    fleet.lose("chunk")
    receipt = fleet.swap(url)
    assert set(fleet.served().values()) == {receipt.weights_id}
