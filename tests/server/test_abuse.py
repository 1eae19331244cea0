"""Whatever comes in, the answer has the protocol's form, the weights stay, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import requests
import torch
from hypothesis import example, given, settings

from tests.support.described import MODES, try_operation
from tests.support.served import Reply, as_json, ask, serving
from tests.support.tiny import TinyArtifact
from weightswap_runtime import load
from weightswap_server import Server

X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    tiny = TinyArtifact(folder / "tiny.artifact")
    model = load(tiny.path, tiny.write(folder / "v1.safetensors", tiny.values(1)))
    with serving({"tiny": model}, max_body=100_000, body_timeout=0.5) as running:
        yield running
        assert model.generation == 0
        answers_right(running)


def answers_right(server: Server) -> None:
    wanted = TinyArtifact.eager(1, torch.from_numpy(X)).reshape(-1).tolist()
    assert ask(server, INFER, as_json(x=X)).json["outputs"][0]["data"] == wanted


@pytest.fixture(scope="module")
def described(server: Server) -> Any:
    import schemathesis

    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.http_port}/openapi.json")


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(1)
def test_whatever_the_description_allows_and_what_it_does_not(described: Any, mode: str, examples: int) -> None:
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) == 14  # all but the description itself
    for operation in operations:
        try_operation(operation, mode, examples)


sizes = st.integers(-1, 4) | st.sampled_from([1 << 31, 1 << 62, 1 << 63])
EMPTY = {"name": "x", "datatype": "FP32", "parameters": {}}
documents = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "x", "x", "y", ""]),
        "datatype": st.sampled_from(["FP32", "FP32", "FP64", "BF16", "BOOL", "INT64", "BYTES", "fp32"]),
        "shape": st.just([2, 3]) | st.lists(sizes, max_size=4),
        "parameters": st.just({"binary_data_size": 24})
        | st.dictionaries(st.just("binary_data_size"), sizes | st.none() | st.floats() | st.text(max_size=3)),
    },
    optional={"data": st.lists(st.floats(allow_nan=False, width=32) | st.integers() | st.none(), max_size=7)},
)


@given(
    inputs=st.lists(documents, min_size=1, max_size=2),
    tail=st.binary(max_size=48) | st.just(X.tobytes()),
    more=st.integers(-30, 30) | st.none(),
)
@example(inputs=[EMPTY | {"shape": [0, 1 << 62], "data": []}], tail=b"", more=0)
@example(inputs=[EMPTY | {"shape": [1] * 300, "data": [1.0]}], tail=b"", more=0)
@settings(max_examples=150, deadline=None)
def test_bytes_of_any_kind(server: Server, inputs: Any, tail: bytes, more: int | None) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    headers = {} if more is None else {"Inference-Header-Content-Length": str(len(head) + more)}
    found = ask_again(server, head + tail, headers)
    if found.status == 200:
        assert found.json["parameters"]["generation"] == 0
    else:
        assert found.status == 400
        assert found.error


_session = requests.Session()


def ask_again(server: Server, body: bytes, headers: dict[str, str]) -> Reply:
    """Send a request on a connection that stays open: thousands of new ones would fill up in TIME_WAIT."""
    found = _session.post(f"http://127.0.0.1:{server.http_port}{INFER}", body, headers=headers, timeout=20)
    return Reply(found.status_code, found.headers, found.content)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _session.close()


def abuse(server: Server) -> None:
    """Send one request of each abusive kind."""
    ask(server, INFER, b"{")
    ask(server, INFER, as_json(y=X))
    ask(server, INFER, bytes(200_000))
    ask(server, "/v2/models/none")
    good = json.dumps(as_json(x=X)).encode()
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    for sent in (b"", b"GET", b"\0" * 100, head % 500, head % len(good) + good[:9], head % len(good) + good):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.http_port), 10) as raw:
            raw.sendall(sent)  # and leaves


def open_descriptors(server: Server) -> int:
    """Count file descriptors, once the server has noticed that its clients have disconnected."""
    limit = time.monotonic() + 20
    while server._http.server_state.connections:
        assert time.monotonic() < limit
        time.sleep(0.01)
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_left_behind(server: Server) -> None:
    for _ in range(10):
        abuse(server)
    _session.close()
    descriptors, memory = open_descriptors(server), resident_bytes()
    for _ in range(60):
        abuse(server)
    answers_right(server)
    assert open_descriptors(server) <= descriptors
    assert resident_bytes() < memory + (8 << 20)
