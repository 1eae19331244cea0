"""Weight files behind URLs: what is read, how it is pinned, what is tried again, what is refused, how it is cancelled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import pytest
import safetensors.numpy

from tests.runtime.test_public import imported_by
from tests.servers import Asked, Bucket, Content, Fault, Handler, MemoryBucket, S3Bucket, S3Server, WebServer
from tests.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import (
    DigestMismatch,
    Event,
    Model,
    StageCancelled,
    Unsupported,
    WeightFile,
    WeightFileError,
    load,
    write_delta,
)
from weightswap_runtime.arena import ArenaLayout, HostArena
from weightswap_runtime.job import Job
from weightswap_runtime.manifest import NamedTensor
from weightswap_runtime.places import Url, printable, redact
from weightswap_runtime.reading import read_tensors
from weightswap_runtime.remote import generic, objects, retries, s3, web
from weightswap_runtime.sources import open_source, read_small
from weightswap_runtime.weightset import open_weights
from weightswap_runtime.workers import Workers

WORKERS = Workers(3)
DATA_START = 4096  # of a weight file in canonical layout


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as started:
        yield started


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code paths of large objects, for small ones: the first request takes the header, the next ones 16 bytes."""
    for module in (web, s3, generic):
        monkeypatch.setattr(module, "HEAD_BYTES", DATA_START + 4)
    monkeypatch.setattr(objects, "RANGE_BYTES", 16)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights) -> Model:
    """It serves the weights of seed 1."""
    return load(tiny.path, weight_file(1))


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_server.options)
    return s3_server.new_bucket()


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Where objects can be put under a URL of some protocol."""
    if request.param == "memory":
        return MemoryBucket()
    found: S3Bucket = request.getfixturevalue("s3_bucket")
    return found


pytestmark = pytest.mark.usefixtures("small")


def is_data(asked: Asked) -> bool:
    return asked.start >= DATA_START


def read_all(url: str, values: dict[str, np.ndarray], job: Job | None = None) -> None:
    """Read a whole safetensors file, and compare."""
    arena = HostArena(ArenaLayout([NamedTensor(name=name, dtype="U8", shape=v.shape) for name, v in values.items()]))
    with open_weights(url) as opened:
        read_tensors(opened, {name: (name,) for name in values}, arena, WORKERS, job or Job())
    for name, value in values.items():
        assert bytes(arena.view(name)) == value.tobytes()


def random_values(*sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {f"t{index}": random.integers(0, 256, size, dtype=np.uint8) for index, size in enumerate(sizes)}


# --- a web server that behaves


def test_weights_are_loaded_and_swapped_from_a_web_server(
    tiny: TinyArtifact, weight_file: WriteWeights, server: WebServer
) -> None:
    url = server.put("v1.safetensors", weight_file(1).read_bytes())
    model = load(tiny.path, url)
    assert serves(model, 1)
    receipt = model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert serves(model, 2)
    assert receipt.source == f"{server.url}/v2.safetensors"
    server.contents.clear()
    assert serves(model, 2)
    model.rollback()
    assert serves(model, 1)


def test_the_data_comes_in_ranges_that_are_pinned(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    data = weight_file(2).read_bytes()
    model.swap(server.put("v2.safetensors", data))
    opening, *ranges, last = server.asked
    assert (opening.start, opening.stop) == (0, DATA_START + 4)
    assert sorted(asked.start for asked in ranges) == list(range(DATA_START, len(data), 16))
    etag = server.contents["/v2.safetensors"].etag
    assert {asked.headers.get("If-Match") for asked in ranges} == {etag}
    assert (last.start, last.stop) == (0, 1)  # whether it is still the same


def test_a_part_reads_its_bytes_alone(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    url = server.put("v2.safetensors", weight_file(2).read_bytes())
    with WeightFile(weight_file(2)) as file:
        begin, end = file.tensors["bias"][2:]
    model.swap(url, only="bias")
    *ranges, _ = server.asked[1:]
    assert sum(asked.stop - asked.start for asked in ranges) == end - begin == 20
    assert server.sent == DATA_START + 4 + 20 + 1


def test_a_delta_is_taken_by_url(model: Model, weight_file: WriteWeights, tmp_path: Path, server: WebServer) -> None:
    delta = write_delta(weight_file(1), weight_file(2), tmp_path / "delta.safetensors")
    receipt = model.swap(server.put("delta.safetensors", delta.path.read_bytes()))
    assert receipt.kind == "delta"
    assert serves(model, 2)


def test_a_staging_in_the_background_has_a_rate(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    url = server.put("v2.safetensors", weight_file(2).read_bytes())
    with model.stage(url, background=True, rate_limit=1e6) as staged:
        assert staged.wait(30).progress.phase == "staged"
        staged.commit()
    assert serves(model, 2)


def test_large_objects_arrive_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: WebServer) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 1 << 20)
    values = random_values(5_000_000, 0, 17, 3_333_333, 1 << 20, 1, 9_000_001)
    safetensors.numpy.save_file(values, tmp_path / "large")
    url = server.put("large.safetensors", (tmp_path / "large").read_bytes())
    read_all(url, values)
    assert 1 < server.busiest <= objects.MOST_REQUESTS
    assert max(asked.stop - asked.start for asked in server.asked) <= 1 << 20


def test_what_arrives_is_not_gathered_beside_the_memory_it_is_for(
    monkeypatch: pytest.MonkeyPatch, server: WebServer
) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 8 << 20)
    data = bytes(48 << 20)
    monkeypatch.setattr(Handler, "serve", without_copies)
    source = open_source(server.put("zeros", data))
    target = bytearray(b"x") * len(data)
    tracemalloc.start()
    try:
        source.read_into([memoryview(target)], 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert target == data
    assert peak < 8 << 20


def without_copies(self: Handler, asked: Asked) -> None:
    content = self.web.contents[asked.path]
    view = memoryview(content.data)[asked.start : asked.stop]
    self.reply(206, view, self.headers_of(content, asked))  # type: ignore[arg-type]


def test_a_limited_rate_makes_small_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: WebServer) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 8 << 20)
    values = random_values(1 << 20, 1 << 20, 1 << 20)
    safetensors.numpy.save_file(values, tmp_path / "v")
    read_all(server.put("v.safetensors", (tmp_path / "v").read_bytes()), values, Job(rate_limit=20e6))
    assert max(asked.stop - asked.start for asked in server.asked) <= 1 << 20


def test_fifty_swaps_leave_no_threads_and_no_connections(
    model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    urls = [server.put(f"v{seed}.safetensors", weight_file(seed).read_bytes()) for seed in (1, 2)]
    for url in urls:
        model.swap(url)
    threads, files = threads_of_ours(), open_files()
    for round_ in range(50):
        model.swap(urls[round_ % 2])
    assert threads_of_ours() <= threads
    assert open_files() <= files + 2 * objects.MOST_REQUESTS  # both ends of the connections that are kept


def threads_of_ours() -> int:
    return sum("process_request" not in thread.name for thread in threading.enumerate())  # not the server's


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- a web server that does not


def for_the_first(count: int, answer: Callable[[Handler, Asked], None]) -> Fault:
    """Answer the first requests for data like this; each range is asked for again."""
    lock = threading.Lock()
    left = [count]

    def fault(handler: Handler, asked: Asked) -> bool:
        with lock:
            left[0] -= is_data(asked)
        if not is_data(asked) or left[0] < 0:
            return False
        answer(handler, asked)
        return True

    return fault


def always(answer: Callable[[Handler, Asked], None]) -> Fault:
    return for_the_first(1 << 30, answer)


def status(code: int, **headers: str) -> Callable[[Handler, Asked], None]:
    return lambda handler, asked: handler.reply(
        code, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def truncated(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.reply(206, data, handler.headers_of(content, asked), cut=len(data) // 2)


def shorter_than_asked(handler: Handler, asked: Asked) -> None:
    """All of what is announced, but not all of the range."""
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop][:-1]
    handler.reply(206, data, handler.headers_of(content, asked))


def dropped(handler: Handler, asked: Asked) -> None:
    handler.reset()


def other_range(handler: Handler, asked: Asked) -> None:
    handler.serve(asked._replace(start=asked.start + 1, stop=asked.stop + 1))


def everything(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    handler.reply(200, content.data, content.validators)


def too_much(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    handler.reply(206, content.data[asked.start : asked.stop] + b"x", handler.headers_of(content, asked))


def compressed(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.reply(206, data, handler.headers_of(content, asked) | {"Content-Encoding": "gzip"})


def without_a_range(handler: Handler, asked: Asked) -> None:
    handler.reply(206, handler.web.contents[asked.path].data[asked.start : asked.stop])


PASSING = {
    "drops": dropped,
    "truncates": truncated,
    "sends less": shorter_than_asked,
    "500": status(500),
    "503 for a while": status(503, Retry_After="0"),
    "503 until a date": status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "429": status(429, Retry_After="soon"),
}


@pytest.mark.parametrize("answer", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again(
    answer: Callable[[Handler, Asked], None], model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    data = weight_file(2).read_bytes()
    server.fault = for_the_first(3, answer)
    model.swap(server.put("v2.safetensors", data))
    assert serves(model, 2)
    ranges = [asked for asked in server.asked if is_data(asked)]
    assert len(ranges) == 3 + len(range(DATA_START, len(data), 16))


def test_what_has_arrived_is_not_asked_for_again(server: WebServer) -> None:
    server.fault = for_the_first(1, truncated)
    data = bytes(range(256)) * 20
    source = open_source(server.put("v", data))
    target = bytearray(16)
    source.read_into([memoryview(target)], 4800)
    assert target == data[4800:4816]
    assert [(asked.start, asked.stop) for asked in server.asked[1:]] == [(4800, 4816), (4808, 4816)]


LASTING: dict[str, tuple[Callable[[Handler, Asked], None], str]] = {
    "drops": (dropped, r"cannot be read at byte 4\d\d\d, after 6 attempt\(s\) \(Server"),
    "truncates to nothing": (status(206, Content_Range="bytes 0-0/1"), "the object was changed while it was read"),
    "503": (status(503), r"after 6 attempt\(s\) \(503 Service Unavailable\)"),
    "503 for an hour": (status(503, Retry_After="3600"), r"after 1 attempt\(s\) \(503 Service Unavailable\)"),
    "401": (status(401), "refuses .401 Unauthorized.. Check the credentials"),
    "403": (status(403), "refuses .403 Forbidden.. Check the credentials, and whether a signed URL has expired"),
    "404": (status(404), "the object was changed while it was read"),
    "412": (status(412), "the object was changed while it was read"),
    "416": (status(416), "the object was changed while it was read"),
    "405": (status(405), "refuses .405 Method Not Allowed.. Check the URL"),
    "another range": (other_range, r"asked for the bytes \d+ to \d+ and answers with \d+ to \d+"),
    "everything": (everything, "does not serve ranges of bytes. Use one that does, or copy the file"),
    "more": (too_much, "sends more bytes than it was asked for|changed|answers with"),
    "compressed": (compressed, "the server compresses it"),
    "no range": (without_a_range, "the Content-Range None, which cannot be read"),
    "a strange range": (status(206, Content_Range="lines 1-2/3"), "the Content-Range 'lines 1-2/3', which cannot"),
}


@pytest.mark.parametrize(("answer", "says"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_refused_and_the_model_serves_on(
    answer: Callable[[Handler, Asked], None], says: str, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    server.fault = always(answer)
    with pytest.raises(WeightFileError, match=says) as refused:
        model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert str(refused.value).startswith(f"{server.url}/v2.safetensors: ")
    assert serves(model, 1)
    server.fault = None
    model.swap(f"{server.url}/v2.safetensors")
    assert serves(model, 2)


OPENING: dict[str, tuple[Callable[[Handler, Asked], None], str]] = {
    "404": (status(404), "cannot be opened .there is no such object"),
    "403": (status(403), "the server refuses .403 Forbidden"),
    "503": (status(503), r"cannot be opened, after 6 attempt\(s\) .503 Service Unavailable"),
    "no ranges": (everything, "does not serve ranges of bytes"),
    "empty": (status(416, Content_Range="bytes */0"), "0 bytes"),
    "no size": (status(206, Content_Range="bytes 0-99/*"), "does not say how large it is"),
    "truncated": (truncated, "cannot be opened, after 6 attempt"),
}


@pytest.mark.parametrize(("answer", "says"), OPENING.values(), ids=OPENING)
def test_what_cannot_be_opened_is_refused(
    answer: Callable[[Handler, Asked], None], says: str, model: Model, server: WebServer
) -> None:
    def fault(handler: Handler, asked: Asked) -> bool:
        answer(handler, asked)
        return True

    server.fault = fault
    with pytest.raises(WeightFileError, match=says):
        model.swap(server.put("v2.safetensors", bytes(9000)))
    assert serves(model, 1)


def test_a_server_that_is_not_there_is_named(model: Model) -> None:
    with WebServer() as gone:
        url = f"{gone.url}/v.safetensors"
    with pytest.raises(WeightFileError, match=r"cannot be opened, after 6 attempt\(s\) \(ClientConnectorError"):
        model.swap(url)


def test_a_small_object_may_come_from_a_server_without_ranges(server: WebServer) -> None:
    server.fault = lambda handler, asked: everything(handler, asked) is None
    assert read_small(server.put("index.json", b"{}"), 100) == b"{}"


# --- objects that change


def changing(before: Content, after: Content, at: int) -> Fault:
    """Put other content in place when the `at`th request for data comes."""
    lock = threading.Lock()
    seen = [0]

    def fault(handler: Handler, asked: Asked) -> bool:
        with lock:
            seen[0] += is_data(asked)
            handler.web.contents[asked.path] = after if seen[0] >= at else before
        return False

    return fault


VALIDATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ETag": ({}, {}),
    "ETag alone": ({"modified": None}, {"modified": None}),
    "a weak ETag": ({"etag": 'W/"1"', "modified": None}, {"etag": 'W/"2"', "modified": None}),
    "Last-Modified": ({"etag": None}, {"etag": None, "modified": 1.7e9 + 1}),
}


@pytest.mark.parametrize("preconditions", [True, False], ids=["If-Match", "ignored"])
@pytest.mark.parametrize("at", [1, 3, 0], ids=["first", "midway", "after the last"])
@pytest.mark.parametrize(("first", "second"), VALIDATORS.values(), ids=VALIDATORS)
def test_an_object_that_changes_is_refused(
    first: dict[str, Any],
    second: dict[str, Any],
    at: int,
    preconditions: bool,
    model: Model,
    weight_file: WriteWeights,
    server: WebServer,
) -> None:
    server.preconditions = preconditions and not str(first.get("etag")).startswith("W/")
    before, after = (Content(unstamped(weight_file(seed)), **how) for seed, how in ((2, first), (3, second)))
    server.fault = changing(before, after, at) if at else after_the_data(before, after)
    with pytest.raises(WeightFileError, match="was changed while it was read"):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


def unstamped(path: Path) -> bytes:
    """The bytes of a weight file, in which nothing is found that weightswap has written."""
    return path.read_bytes().replace(b'"weightswap"', b'"somethingX"', 1)


def after_the_data(before: Content, after: Content) -> Fault:
    """Put other content in place when it is asked whether it is still the same."""

    def fault(handler: Handler, asked: Asked) -> bool:
        handler.web.contents[asked.path] = after if (asked.start, asked.stop) == (0, 1) else before
        return False

    return fault


def test_an_object_that_nothing_pins_needs_digests(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    data = weight_file(2).read_bytes()
    model.swap(server.put("stamped.safetensors", data, etag=None, modified=None))
    assert serves(model, 2)
    with pytest.raises(WeightFileError, match="neither digests nor anything that shows when it changes"):
        model.swap(server.put("plain.safetensors", unstamped(weight_file(1)), etag=None, modified=None))
    assert serves(model, 2)


def test_an_object_that_nothing_pins_is_proven_by_its_digests(
    model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    contents = [Content(weight_file(seed).read_bytes(), etag=None, modified=None) for seed in (2, 3)]
    server.fault = changing(*contents, 2)
    with pytest.raises(DigestMismatch):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


def test_what_was_just_written_without_an_etag_is_given_time(
    monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    monkeypatch.setattr(web, "CLOCK_TICK", 0.05)
    url = server.put("v.safetensors", unstamped(weight_file(2)), etag=None, modified=time.time())
    model.swap(url)
    assert serves(model, 2)
    probes = [asked for asked in server.asked if (asked.start, asked.stop) == (0, 1)]
    assert len(probes) == 2  # after the wait, and after the data


# --- stalls


def stalled(handler: Handler, asked: Asked) -> None:
    """Send the head of the answer and a byte, then nothing until the test lets it go on."""
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.send_response(206)
    for name, value in (handler.headers_of(content, asked) | {"Content-Length": str(len(data))}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data[:1])
    handler.web.released.wait(30)
    handler.wfile.write(data[1:])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stalled_staging_is_cancelled_at_once(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    server.fault = always(stalled)
    staged = model.stage(server.put("v2.safetensors", weight_file(2).read_bytes()), background=True)
    until(lambda: any(map(is_data, server.asked)))
    start = time.monotonic()
    staged.cancel()
    assert time.monotonic() - start < 1
    with pytest.raises(StageCancelled):
        staged.wait()
    server.released.set()
    server.fault = None
    model.swap(f"{server.url}/v2.safetensors")
    assert serves(model, 2)


def test_a_staging_that_waits_for_its_first_answer_is_cancelled_at_once(model: Model, server: WebServer) -> None:
    server.fault = lambda handler, asked: server.released.wait(30)
    staged = model.stage(f"{server.url}/v.safetensors", background=True)
    until(lambda: bool(server.asked))
    start = time.monotonic()
    staged.cancel()
    assert time.monotonic() - start < 1
    assert serves(model, 1)


def test_an_answer_that_comes_too_late_is_written_nowhere(server: WebServer) -> None:
    class Enough(Exception):
        """Somebody has given up."""

    def check() -> None:
        if target[0]:  # the first byte has come
            raise Enough

    server.fault = lambda handler, asked: is_data(asked) and stalled(handler, asked) is None
    source = open_source(server.put("v", b"x" * 9000), check)
    target = bytearray(4000)
    with pytest.raises(Enough):
        source.read_into([memoryview(target)], 5000)
    before = bytes(target)
    server.released.set()
    until(lambda: not server.busy)
    assert target == before
    assert before.count(b"x") < 4000


def test_memory_that_is_closed_is_not_written_to() -> None:
    memory = bytearray(4)
    landing = objects.Landing([memoryview(memory)])
    landing.write(1, b"ab")
    landing.close()
    with pytest.raises(StageCancelled):
        landing.write(0, b"c")
    assert memory == b"\0ab\0"


@pytest.mark.parametrize("sizes", [[7], [0, 3, 0, 0, 4, 0], [1] * 7, [2, 5]], ids=str)
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_bytes_land_across_buffers(sizes: list[int], step: int) -> None:
    buffers = [bytearray(size) for size in sizes]
    landing = objects.Landing([memoryview(buffer) for buffer in buffers])
    for start in range(0, 7, step):
        landing.write(start, b"abcdefg"[start : start + step])
    assert b"".join(buffers) == b"abcdefg"
    assert landing.size == 7


def test_a_request_without_progress_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    monkeypatch.setattr(web, "STALL", 0.1)
    server.fault = for_the_first(2, stalled)
    model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert serves(model, 2)


# --- directories and shards


def sharded(
    tiny: TinyArtifact, put: Callable[[str, bytes], object], index: str = "model.safetensors.index.json"
) -> None:
    """Write the weights of seed 2 as an index with two shards, in a folder `hub`."""
    values = {name: value.numpy() for name, value in tiny.values(2).items()}
    shards = {"a.safetensors": ["weight", "tied"], "deep/b c.safetensors": ["bias", "steps"]}
    for name, keys in shards.items():
        put(f"hub/{name}", safetensors.numpy.save({key: values[key] for key in keys}))
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    put(f"hub/{index}", json.dumps({"weight_map": weight_map}).encode())


@pytest.mark.parametrize("name", ["hub/", "hub/model.safetensors.index.json", "hub/model.safetensors.index.json?sig=1"])
def test_shards_come_from_a_web_server(name: str, model: Model, tiny: TinyArtifact, server: WebServer) -> None:
    sharded(tiny, lambda name, data: server.put(name.replace(" ", "%20"), data))
    model.swap(f"{server.url}/{name}")
    assert serves(model, 2)


@pytest.mark.parametrize("folder", ["hub", "hub/"])
def test_directories_of_other_file_systems_are_listed(
    folder: str, model: Model, tiny: TinyArtifact, weight_file: WriteWeights, bucket: Bucket
) -> None:
    sharded(tiny, bucket.put, index="other.safetensors.index.json")
    model.swap(bucket.url(folder))
    assert serves(model, 2)
    bucket.put("hub/model.safetensors", weight_file(3).read_bytes())
    model.swap(bucket.url(folder))
    assert serves(model, 3)


def test_a_single_file_is_loaded_and_swapped(tiny: TinyArtifact, weight_file: WriteWeights, bucket: Bucket) -> None:
    for seed in (1, 2):
        bucket.put(f"v{seed}.safetensors", weight_file(seed).read_bytes())
    model = load(tiny.path, bucket.url("v1.safetensors"))
    assert serves(model, 1)
    receipt = model.swap(bucket.url("v2.safetensors"))
    assert serves(model, 2)
    assert receipt.source == bucket.url("v2.safetensors")


def test_large_objects_of_other_file_systems_arrive_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bucket: Bucket
) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 1 << 20)
    values = random_values(5_000_000, 17, 3_333_333)
    safetensors.numpy.save_file(values, tmp_path / "large")
    bucket.put("large.safetensors", (tmp_path / "large").read_bytes())
    read_all(bucket.url("large.safetensors"), values)


@pytest.mark.parametrize("when", ["data", "probe"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_an_object_that_changes_elsewhere_is_refused(
    when: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    weight_file: WriteWeights,
    bucket: Bucket,
) -> None:
    after = unstamped(weight_file(3))
    bucket.put("v.safetensors", unstamped(weight_file(2)))
    method = {"data": "read_into", "probe": "check_unchanged"}[when]
    original = getattr(objects.RemoteObject, method)

    def interfered(self: objects.RemoteObject, *arguments: Any) -> None:
        if when == "probe" or arguments[1] >= DATA_START:
            bucket.put("v.safetensors", after) if how == "replaced" else bucket.remove("v.safetensors")
        original(self, *arguments)

    monkeypatch.setattr(objects.RemoteObject, method, interfered)
    with pytest.raises(WeightFileError, match="was changed while it was read"):
        model.swap(bucket.url("v.safetensors"))
    assert serves(model, 1)


def test_what_is_not_there_is_refused(model: Model, bucket: Bucket) -> None:
    for name in ("v.safetensors", "folder", "folder/"):
        with pytest.raises(WeightFileError, match="there is no such object"):
            model.swap(bucket.url(name))
    assert read_small(bucket.url("goldens.safetensors"), 100) is None


def test_an_empty_object_is_refused(model: Model, bucket: Bucket) -> None:
    bucket.put("v.safetensors", b"")
    with pytest.raises(WeightFileError, match="0 bytes"):
        model.swap(bucket.url("v.safetensors"))


def test_a_missing_shard_is_named(model: Model, tiny: TinyArtifact, bucket: Bucket) -> None:
    sharded(tiny, bucket.put)
    bucket.remove("hub/a.safetensors")
    with pytest.raises(WeightFileError, match=r"hub/a\.safetensors: cannot be opened .there is no such object"):
        model.swap(bucket.url("hub"))


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/a.safetensors", "a?b.safetensors", "a#1.safetensors", "s3://a/b.safetensors"]
)
def test_an_index_that_leads_elsewhere_is_refused(name: str, model: Model, bucket: Bucket) -> None:
    bucket.put("hub/model.safetensors.index.json", json.dumps({"weight_map": {"w": name}}).encode())
    with pytest.raises(WeightFileError, match="expected the name of a .safetensors file in the index's folder"):
        model.swap(bucket.url("hub"))


def test_a_small_object_is_read(bucket: Bucket) -> None:
    bucket.put("small", b"abc")
    assert read_small(bucket.url("small"), 3) == b"abc"
    with pytest.raises(WeightFileError, match="has 3 bytes, expected at most 2"):
        read_small(bucket.url("small"), 2)


# --- S3


def test_a_version_of_an_object_can_be_named(model: Model, weight_file: WriteWeights, s3_bucket: S3Bucket) -> None:
    s3_bucket.client.put_bucket_versioning(Bucket="weights", VersioningConfiguration={"Status": "Enabled"})
    version = s3_bucket.put("v.safetensors", weight_file(2).read_bytes())["VersionId"]
    s3_bucket.put("v.safetensors", weight_file(3).read_bytes())
    receipt = model.swap(f"{s3_bucket.url('v.safetensors')}?versionId={version}")
    assert serves(model, 2)
    assert receipt.source.endswith(version)
    model.swap(s3_bucket.url("v.safetensors"))
    assert serves(model, 3)


def test_a_bucket_that_does_not_exist_is_named(model: Model, s3_bucket: S3Bucket) -> None:
    with pytest.raises(WeightFileError, match="s3://nowhere/v.safetensors: cannot be opened .there is no such object"):
        model.swap("s3://nowhere/v.safetensors")


# --- places


def test_a_file_url_is_a_local_path(tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a b.safetensors", tiny.values(1))
    assert serves(load(tiny.path, f"file://{str(path).replace(' ', '%20')}"), 1)
    assert serves(load(tiny.path, f"file://localhost{path}"), 1)


UNSUPPORTED = {
    "file://elsewhere/v.safetensors": "expected file:/// and an absolute path",
    "simplecache::s3://a/b.safetensors": "chained URLs are not read",
    "nothing://a/b.safetensors": "nothing:// is not known to fsspec. Known are .*s3",
    "abfs://a/b.safetensors": "needs another package .*adlfs",
}


@pytest.mark.parametrize(("url", "says"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_an_unsupported_url_is_refused(url: str, says: str, model: Model) -> None:
    with pytest.raises(Unsupported, match=says):
        model.swap(url)


SECRETS = {
    "https://me:secret@host/a.safetensors": "https://***@host/a.safetensors",
    "https://secret@host:80/a@b": "https://***@host:80/a@b",
    "https://host/a?X-Amz-Signature=secret&versionId=7": "https://host/a?X-Amz-Signature=***&versionId=7",
    "https://host/a?secret": "https://host/a?***",
    "HTTPS://host/a#secret": "HTTPS://host/a",
    "s3://key:secret@bucket/a?versionId=7": "s3://***@bucket/a?versionId=7",
    "gs://bucket/a b#123": "gs://bucket/a b#123",
    "memory://a/b": "memory://a/b",
}


@pytest.mark.parametrize(("url", "shown"), SECRETS.items(), ids=SECRETS)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert str(Url(url)) == printable(url) == shown
    assert repr(Url(url)) == f"Url({shown!r})"
    if " " not in url:
        assert redact(f"before '{url}', after") == f"before '{shown}', after"


def test_no_secret_leaves_with_a_refusal_or_a_receipt(
    model: Model, weight_file: WriteWeights, server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="weightswap")
    events: list[Event] = []
    model.listen(events.append)
    server.put("v2.safetensors", weight_file(2).read_bytes())
    url = f"http://me:hunter2@{server.address}/v2.safetensors?X-Amz-Signature=hunter2"
    receipt = model.swap(url)
    errors = []
    for answer in (dropped, status(403), other_range, compressed, too_much, everything):
        server.fault = lambda handler, asked, answer=answer: answer(handler, asked) is None
        with pytest.raises(WeightFileError) as refused:
            model.swap(url)
        errors.append("".join(traceback.format_exception(refused.value)))
    assert server.asked[0].headers["Authorization"] == "Basic bWU6aHVudGVyMg=="
    texts = [receipt, *events, *map(str, events), *errors, caplog.text]
    shown = re.sub(r"hunter2@\{server", "", "\n".join(map(str, texts)))
    assert f"http://***@{server.address}/v2.safetensors?X-Amz-Signature=***" in shown
    assert "hunter2" not in shown


JOINS = [
    ("s3://b/x/i.json", "s.safetensors", "s3://b/x/s.safetensors"),
    ("s3://b/i.json?versionId=7", "s", "s3://b/s"),
    ("gs://b/i.json#12", "s", "gs://b/s"),
    ("memory://i.json", "s", "memory://s"),
    ("memory:///i.json", "s", "memory:///s"),
    ("https://h/x/i.json?sig=a/b", "s t%2e.safetensors", "https://h/x/s%20t%252e.safetensors?sig=a/b"),
    ("https://h/i.json#part", "deep/s", "https://h/deep/s"),
]


@pytest.mark.parametrize(("url", "name", "joined"), JOINS, ids=[url for url, _, _ in JOINS])
def test_neighbours_are_named(url: str, name: str, joined: str) -> None:
    assert Url(url).name == "i.json"
    assert (Url(url).parent / name).raw == joined.replace("memory:///", "memory:///")


# --- processes


def test_local_paths_need_no_fsspec(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    code = f"from weightswap_runtime import load\nload({str(tiny.path)!r}, {str(weight_file(1))!r})"
    assert not {"weightswap_runtime.remote", "s3fs", "aiobotocore", "gcsfs"} & imported_by(code)
    code = f"from weightswap_runtime.weightset import open_weights\nopen_weights({str(weight_file(1))!r})"
    assert not {"fsspec", "aiohttp"} & imported_by(code)


@pytest.mark.parametrize(
    ("module", "url"),
    [("fsspec", "memory://v"), ("aiohttp", "https://h/v"), ("s3fs", "s3://b/v"), ("gcsfs", "gs://b/v")],
)
def test_without_the_extra_it_is_named(module: str, url: str) -> None:
    code = f"import sys\nsys.modules[{module!r}] = None\nfrom weightswap_runtime import WeightFile, MissingExtra\n"
    code += f"try:\n    WeightFile({url!r})\nexcept MissingExtra as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    protocol = url.partition(":")[0]
    assert done.stdout == f"reading {protocol}:// needs the extra `remote`: pip install 'weightswap[remote]'\n"


def test_a_forked_child_opens_again(weight_file: WriteWeights, server: WebServer) -> None:
    url = server.put("v1.safetensors", weight_file(1).read_bytes())
    code = f"""
import os
from weightswap_runtime import WeightFile, WeightFileError
parent = WeightFile({url!r})
pid = os.fork()
if not pid:
    try:
        parent.check_unchanged()
    except WeightFileError as error:
        print(error)
    with WeightFile({url!r}) as child:
        print(child.stamp == parent.stamp)
    child.check_unchanged()
    os._exit(0)
print(os.waitpid(pid, 0)[1])
parent.check_unchanged()
"""
    code = code.replace("print(error)", "print(error, flush=True)").replace(
        "parent.stamp)", "parent.stamp, flush=True)"
    )
    head = f"import weightswap_runtime.remote.web as web\nweb.HEAD_BYTES = {DATA_START}\n"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        f"{url}: was opened before this process was forked; open it again",
        "True",
        "0",
    ]
    assert done.stderr == ""
