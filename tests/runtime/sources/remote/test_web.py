"""Weight files on a web server: which requests are made, how content is pinned, what it costs."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import pytest
import safetensors.numpy

from tests.runtime.sources.remote.answers import DATA_START, is_data
from tests.runtime.sources.remote.contents import random_values, read_all, until
from tests.support.servers import Handler, Request, WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import Model, WeightFile, load, write_delta
from weightswap_runtime.jobs import Job
from weightswap_runtime.sources import remote as objects
from weightswap_runtime.sources.opening import open_source


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


def asked_for_weights(server: WebServer) -> list[Request]:
    """Return all requests except those for goldens."""
    return [request for request in server.requests if "goldens" not in request.path]


def test_the_data_comes_in_ranges_that_are_pinned(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    data = weight_file(2).read_bytes()
    model.swap(server.put("v2.safetensors", data))
    opening, *ranges, last = asked_for_weights(server)
    assert (opening.start, opening.stop) == (0, DATA_START + 4)
    assert sorted(request.start for request in ranges) == list(range(DATA_START, len(data), 16))
    etag = server.contents["/v2.safetensors"].etag
    assert {request.headers.get("If-Match") for request in ranges} == {etag}
    assert (last.start, last.stop) == (0, 1)  # the check whether it has changed


def test_a_part_reads_its_bytes_alone(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    url = server.put("v2.safetensors", weight_file(2).read_bytes())
    with WeightFile(weight_file(2)) as file:
        begin, end = file.tensors["bias"][2:]
    model.swap(url, only="bias")
    *ranges, _ = asked_for_weights(server)[1:]
    assert sum(request.stop - request.start for request in ranges) == end - begin == 20
    assert server.sent == DATA_START + 4 + 20 + 1


def test_redirects_are_followed_with_the_conditions(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    def redirected(handler: Handler, request: Request) -> bool:
        if request.path == "/latest.safetensors":
            handler.reply(302, headers={"Location": "/v2.safetensors"})
        return request.path == "/latest.safetensors"

    server.fault = redirected
    server.put("v2.safetensors", weight_file(2).read_bytes())
    receipt = model.swap(f"{server.url}/latest.safetensors")
    assert serves(model, 2)
    assert receipt.source == f"{server.url}/latest.safetensors"
    etag = server.contents["/v2.safetensors"].etag
    assert {request.headers.get("If-Match") for request in server.requests if is_data(request)} == {etag}


@pytest.mark.usefixtures("_places")
def test_a_delta_is_taken_by_url(model: Model, weight_file: WriteWeights, tmp_path: Path, server: WebServer) -> None:
    delta = write_delta(weight_file(1), weight_file(2), tmp_path / "delta.safetensors")
    receipt = model.swap(server.put("delta.safetensors", delta.path.read_bytes()))
    assert receipt.kind == "delta"
    assert serves(model, 2)


def test_large_objects_arrive_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: WebServer) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 1 << 20)
    values = random_values(5_000_000, 0, 17, 3_333_333, 1 << 20, 1, 9_000_001)
    safetensors.numpy.save_file(values, tmp_path / "large")
    url = server.put("large.safetensors", (tmp_path / "large").read_bytes())
    server.fault = side_by_side
    read_all(url, values)
    assert server.busiest <= objects.MOST_REQUESTS
    assert max(request.stop - request.start for request in server.requests) <= 1 << 20


def side_by_side(handler: Handler, request: Request) -> bool:
    """Answer requests for data only when several are open at the same time."""
    if is_data(request):
        until(lambda: handler.web.busiest >= 4)
    return False


def test_responses_are_not_buffered_beside_their_memory(monkeypatch: pytest.MonkeyPatch, server: WebServer) -> None:
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


def without_copies(self: Handler, request: Request) -> None:
    content = self.web.contents[request.path]
    view = memoryview(content.data)[request.start : request.stop]
    self.reply(206, view, self.headers_of(content, request))  # type: ignore[arg-type]


def test_a_limited_rate_makes_small_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: WebServer) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 8 << 20)
    values = random_values(1 << 20, 1 << 20, 1 << 20)
    safetensors.numpy.save_file(values, tmp_path / "v")
    read_all(server.put("v.safetensors", (tmp_path / "v").read_bytes()), values, Job(rate_limit=20e6))
    assert max(request.stop - request.start for request in server.requests) <= 1 << 20


@pytest.mark.slow
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
    assert open_files() <= files + 2 * objects.MOST_REQUESTS  # both ends of the connections that are kept alive


def threads_of_ours() -> int:
    return sum("process_request" not in thread.name for thread in threading.enumerate())  # without the server's threads


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
