"""The Open Inference Protocol over HTTP: its own client, its errors, and what no client would send."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.served import (
    INFER,
    X,
    answer_of,
    as_json,
    ask,
    await_queued,
    await_ready,
    before_calls,
    connect,
    connections,
    expected,
    occupied,
    rest_of,
    serving,
    serving_tiny,
)
from tests.support.tiny import TinyArtifact, WriteWeights
from tests.support.watched import eventually
from weightswap_runtime import Model, load
from weightswap_server import Server
from weightswap_server import protocol as tensors_on_the_wire
from weightswap_server.http import app as infer
from weightswap_server.http import bodies

BODY = json.dumps(as_json(x=X)).encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
CALL = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n"
NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n"
OFFER = b"Upgrade: foo\r\nConnection: Upgrade\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
HEAD = b"Inference-Header-Content-Length: "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits: Any = {"max_body": 10_000, "body_timeout": 0.3, "timeout": 5, "max_queue": 2, "max_connections": 20}
    with serving_tiny(tmp_path_factory.mktemp("served"), **limits) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.http_port}") as found:
        yield found


def given(binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("x", [2, 3], "FP32")
    return tensor.set_data_from_numpy(X, binary_data=binary)


@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_the_protocols_own_client_infers(client: Any, binary_in: bool, binary_out: bool | None, packed: Any) -> None:
    outputs = None if binary_out is None else [triton.InferRequestedOutput("output", binary_data=binary_out)]
    found = client.infer(
        "tiny",
        [given(binary_in)],
        outputs=outputs,
        request_id="7",
        model_version="0",
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
    )
    np.testing.assert_array_equal(found.as_numpy("output"), expected(1))
    assert found.get_response()["id"] == "7"


def test_each_answer_carries_its_weights(model: Model, weight_file: WriteWeights) -> None:
    with serving({"tiny": model}) as running, triton.InferenceServerClient(f"127.0.0.1:{running.http_port}") as client:
        for seed in (1, 2):
            if seed == 2:
                model.swap(weight_file(2))
            found = client.infer("tiny", [given()])
            np.testing.assert_array_equal(found.as_numpy("output"), expected(seed))
            said = found.get_response()
            assert said["parameters"] == {"generation": seed - 1, "weights_id": model.weights_id}
            assert said["model_version"] == str(seed - 1)


def test_metadata_and_health(client: Any, server: Server) -> None:
    model = server.service.served[0].model
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "0")
    assert client.get_server_metadata()["name"] == "weightswap"
    found = client.get_model_metadata("tiny")
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert found["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 5]}]
    assert found["versions"] == ["0"]
    assert found["parameters"]["weights_id"] == model.weights_id
    index = client.get_model_repository_index()
    assert index == [{"name": "tiny", "version": "0", "state": "READY", "reason": ""}]


def test_ready_after_the_first_weights(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with serving({"tiny": load(tiny.path)}, warm=False) as running:
        assert ask(running, "/v2/health/live").status == 200
        assert ask(running, "/v2/health/ready").status == 503
        assert ask(running, "/v2/models/tiny").json["versions"] == []
        refused = ask(running, INFER, as_json(x=X))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "no weights yet" in refused.error
        running.service.served[0].model.swap(weight_file(1))
        await_ready(running)
        assert ask(running, "/v2/health/ready").status == 200
        assert ask(running, INFER, as_json(x=X)).status == 200


def tensor(**changes: Any) -> dict[str, Any]:
    found = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": X.tolist(), **changes}
    return {"inputs": [{name: value for name, value in found.items() if value is not None}]}


BROKEN: list[tuple[Any, str]] = [
    (b"", "truncated"),
    (b"{", "truncated"),
    (b"\xff", "malformed"),
    (b"[" * 5000, "array"),
    ({}, "missing required field `inputs`"),
    ({"inputs": {}}, "Expected `array`"),
    ({"inputs": []}, "x: missing"),
    ({"inputs": tensor()["inputs"] * 2}, "x: given more than once"),
    (tensor(name="y"), "x: missing; y: no such input"),
    (tensor(datatype="FP64"), "expected dtype F32, got F64"),
    (tensor(datatype="BYTES"), "no model here accepts strings"),
    (tensor(datatype="FP8"), "unknown"),
    (tensor(shape=[3, 3]), "shape [3, 3] has 9 elements, but the data 6"),
    (tensor(shape=[1], data=[]), "shape [1] has 1 elements, but the data 0"),
    (tensor(shape=[1, 1], data=[[]]), "shape [1, 1] has 1 elements, but the data 0"),
    (tensor(shape=[3, 2]), "dimension 1 expected 3, got 2"),
    (tensor(shape=[6]), "expected 2 dimensions"),
    (tensor(shape=[-1, 3]), "Expected `int` >= 0"),
    (tensor(shape=[2.5, 3]), "Expected `int`"),
    (tensor(shape=[1 << 40, 1 << 40]), "batch in 0..8, got 1099511627776"),
    (tensor(shape=[9, 3], data=[0] * 27), "batch in 0..8, got 9"),
    (tensor(data=None), "neither data nor binary_data_size"),
    (tensor(data="012345"), "but the data 1"),
    (tensor(data=[[1, 2], [3, 4], [5, 6]]), "nested otherwise"),
    (tensor(data=[[1], [2, 3, 4, 5, 6]]), "nested otherwise"),
    (tensor(data=[1, 2, 3, 4, 5, "6"]), "Expected `float`"),
    (tensor(data=[1, 2, 3, 4, 5, 1e300]), "FP32 cannot hold"),
    (tensor(data=[[1, 2, 3], [4, 5]]), "has 6 elements, but the data 5"),
    (tensor(data=[[1, 2, 3], 4, 5, 6]), "nested otherwise"),
    (tensor(data=[[1, 2, 3], [4, 5, "6,7"]]), "has 6 elements, but the data 7"),
    (tensor(data=[[1, 2, 3], [4, 5, {}]]), "Expected `float`"),
    (tensor(data=[[1, 2, 3], [4, 5, None]]), "Expected `float`"),
    (tensor(data=[]), "but the data 0"),
    (tensor(data=[{"b64": "AAAA"}]), "x: data: expected numbers, got objects"),
    (tensor(data=[[], []]), "but the data 2"),
    (tensor(parameters={"binary_data_size": 24}), "but 0 bytes are left"),
    (tensor(parameters={"binary_data_size": 0}), "both data and binary_data_size"),
    (tensor(shape=[1 << 62] * 65), "has 65 dimensions"),
    (tensor(shape=[1 << 62] * 64), "expected 2 dimensions"),
    ({**tensor(), "outputs": [{"name": "output"}] * 2}, "an output is requested more than once"),
    (
        {**tensor(), "outputs": [{"name": "output", "parameters": {"classification": 2}}]},
        "output: classification (class_count) is not supported",
    ),
    (
        tensor(data=[], parameters={"shared_memory_region": "r"}),
        "x: shared memory (shared_memory_region) is not supported",
    ),
    (
        {**tensor(), "outputs": [{"name": "output", "parameters": {"shared_memory_region": "r"}}]},
        "output: shared memory",
    ),
    ({**tensor(), "outputs": [{"name": "z"}]}, "no output is named z; there are: output"),
    (tensor(data=[0] * 2_000), "has 6 elements, but the data 2000"),
    # names, dtypes and shapes are compared before numbers are read
    (tensor(data=["no number"] * 6, name="y"), "no such input"),
    (tensor(data=["no number"] * 6, datatype="FP64"), "expected dtype F32"),
    (tensor(data=["no number"] * 6, shape=[3, 2]), "dimension 1 expected 3"),
    (tensor(data=["no number"] * 6, shape=[9, 3]), "batch in 0..8"),
    (tensor(data=["no number"] * 6), "Expected `float`"),
]


def test_null_is_as_absent(server: Server) -> None:
    """Some clients write all optional members."""
    nothing = {"id": None, "parameters": None}
    inputs = [{**tensor()["inputs"][0], "parameters": None}]
    for outputs in (None, [{"name": "output", "parameters": None}]):
        found = ask(server, INFER, {**nothing, "inputs": inputs, "outputs": outputs}, method="POST")
        assert (found.status, "id" in found.json) == (200, False)


def test_null_is_as_absent_beside_bytes(server: Server) -> None:
    named = tensor(data=None)["inputs"][0]
    with_bytes = {"inputs": [{**named, "data": None, "parameters": {"binary_data_size": 24}}]}
    head = json.dumps(with_bytes).encode()
    found = ask(server, INFER, head + X.tobytes(), {"Inference-Header-Content-Length": str(len(head))})
    assert found.status == 200, found.body
    with_numbers = {**tensor()["inputs"][0], "parameters": {"binary_data_size": None}}
    outputs = [{"name": "output", "parameters": {"binary_data": None}}]
    wanted = {"outputs": outputs, "parameters": {"binary_data_output": True}}
    found = ask(server, INFER, {"inputs": [with_numbers], **wanted})
    assert found.status == 200, found.body
    assert "inference-header-content-length" in found.headers
    found = ask(server, INFER, {"inputs": [{**named, "data": None}]})
    assert "has neither data nor binary_data_size" in found.error


def binary(
    size: Any = 24, tail: bytes = X.tobytes(), length: Any = None, **changes: Any
) -> tuple[bytes, dict[str, str]]:
    document = tensor(data=None, parameters={"binary_data_size": size}, **changes)
    head = json.dumps(document).encode()
    return head + tail, {"Inference-Header-Content-Length": str(len(head) if length is None else length)}


BROKEN_BINARY: list[tuple[Any, str]] = [
    (binary(size=23), "FP32[2, 3] is 24 bytes, got 23"),
    (binary(size=25), "but 24 bytes are left"),
    (binary(size=-1), "binary_data_size=-1"),
    (binary(size="24"), "binary_data_size='24'"),
    (binary(size=True), "binary_data_size=True"),
    (binary(tail=X.tobytes() + b"!"), "1 bytes at the end of the body"),
    (binary(length=0), "truncated"),
    (binary(length="0" * 5000), "truncated"),
    (binary(length=-5), "Inference-Header-Content-Length"),
    (binary(length="9" * 5000), "Inference-Header-Content-Length"),
    (binary(length=100_000), "Inference-Header-Content-Length"),
    (binary(length="x"), "Inference-Header-Content-Length"),
    (binary(datatype="BF16", size=12, tail=X.tobytes()[:12]), "expected dtype F32, got BF16"),
    (binary(datatype="BOOL", size=6, tail=b"\0\1\2\0\1\1"), "a byte of 0 or 1"),
    (binary(shape=[1 << 62] * 300), "has 300 dimensions"),
    (binary(shape=[0, 1 << 62]), "is 0 bytes, got 24"),
]


@pytest.mark.parametrize(
    ("sent", "says"), [*BROKEN, *BROKEN_BINARY], ids=lambda value: value if type(value) is str else ""
)
def test_a_broken_request_is_refused(server: Server, sent: Any, says: str) -> None:
    body, headers = sent if isinstance(sent, tuple) else (sent, None)
    found = ask(server, INFER, body, headers, "POST")
    assert found.status == 400
    assert says in found.error
    assert answer_of(server) == expected(1).reshape(-1).tolist()


def test_the_root_says_what_this_is_and_where_to_go_on(server: Server) -> None:
    found = ask(server, "/").json
    assert (found["name"], found["models"]) == ("weightswap", ["tiny"])
    for path in found["paths"].values():
        status = ask(server, path.replace("NAME", "tiny")).status
        assert status == (405 if path.endswith("infer") else 200)


UNKNOWN = ("/v2/models/none", "/v2/models/none/ready", "/v2/models/tiny/versions/9")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        *((path, "GET", 404) for path in UNKNOWN),
        ("/v2/models/none/infer", "POST", 404),
        ("/v2/models/tiny/versions/9/infer", "POST", 404),
        ("/v2/", "GET", 404),
        ("/v2/models/tiny/config", "GET", 404),
        ("/v2/models/a%2F..%2Fb", "GET", 404),
        (INFER, "GET", 405),
        ("/v2", "DELETE", 405),
        ("/v2/repository/models/tiny/load", "POST", 404),
    ],
)
def test_every_error_has_the_protocols_form(server: Server, path: str, method: str, status: int) -> None:
    found = ask(server, path, method=method)
    assert found.status == status
    assert found.error
    assert path not in UNKNOWN or "tiny" in found.error  # which there is


def test_an_answer_that_json_cannot_say(server: Server) -> None:
    x = np.full((2, 3), np.finfo(np.float32).max, np.float32)
    found = ask(server, INFER, as_json(x=x))
    assert found.status == 400
    assert "ask for binary" in found.error
    found = ask(server, INFER, {**as_json(x=x), "parameters": {"binary_data_output": True}})
    head = int(found.headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(found.body[head:], np.float32).reshape(2, 5), expected(1, x))


def test_a_batch_of_nothing(server: Server) -> None:
    found = ask(server, INFER, as_json(x=np.zeros((0, 3), np.float32)))
    assert (found.status, found.json["outputs"][0]["shape"]) == (200, [0, 5])


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_bodies(server: Server, encoding: str, pack: Any) -> None:
    body, headers = binary()
    headers["Content-Encoding"] = encoding
    assert ask(server, INFER, pack(body), headers).status == 200
    assert ask(server, INFER, pack(body)[:-3], headers).status == 400
    assert ask(server, INFER, pack(body) + b"!", headers).status == 400
    assert ask(server, INFER, b"!" + pack(body), headers).status == 400
    assert ask(server, INFER, pack(bytes(1 << 20)), headers).status == 413
    assert ask(server, INFER, pack(body), {"Content-Encoding": "br"}).status == 400


@pytest.mark.parametrize("encoding", ["GZIP", "Gzip", "x-gzip", "X-GZIP"])
def test_names_of_codings_have_no_case(server: Server, encoding: str) -> None:
    """RFC 9110, 8.4.1, which also wants x-gzip to be taken for gzip."""
    body, headers = binary()
    assert ask(server, INFER, gzip.compress(body), {**headers, "Content-Encoding": encoding}).status == 200
    assert ask(server, INFER, body, {**headers, "Content-Encoding": "Identity"}).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CALL + CHUNKED + b"\r\n" + 11 * (b"400\r\n" + bytes(1024) + b"\r\n"), b"413"),
        (CALL + b"Content-Length: 500\r\n\r\n{", b"408"),
    ],
    ids=["too large", "never ends"],
)
def test_a_body_that_does_not_come_to_its_end(server: Server, sent: bytes, status: bytes) -> None:
    assert ask(server, INFER, bytes(10_001)).status == 413
    with connect(server) as raw:
        raw.sendall(sent)
        assert raw.recv(12) == b"HTTP/1.1 " + status


@pytest.mark.parametrize("call", [CALL, NOWHERE])
def test_a_body_that_comes_for_ever_after_its_answer(call: bytes, server: Server) -> None:
    with connect(server) as raw:
        raw.sendall(call + b"Content-Length: 5000\r\n\r\n{")
        assert raw.recv(10) == b"HTTP/1.1 4"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(raw)


def drip(raw: socket.socket) -> None:
    for _ in range(200):
        raw.sendall(b" ")
        time.sleep(0.05)


def test_headers_that_never_end(server: Server) -> None:
    with connect(server) as raw:
        raw.sendall(b"GET /v2 HTTP/1.1\r\nHo")
        assert rest_of(raw) == b""
    with connect(server) as raw:
        for pause in (0.0, 0.0, 0.5):  # between requests another, longer limit holds
            time.sleep(pause)
            raw.sendall(LIVE)
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begins", [b"GET /", b"GET /v2 HTTP/1.1\r\nname: ", CALL + CHUNKED + b"\r\n0\r\nname: "])
def test_headers_of_any_length(begins: bytes, server: Server) -> None:
    """The headers of one request used to take all memory."""
    with connect(server) as raw:
        raw.sendall(begins)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            raw.sendall(b"a" * 20_000_000)


def test_headers_that_are_too_long(server: Server) -> None:
    for count, status in ((60_000, b"200"), (600_000, b"431")):
        with connect(server) as raw:
            raw.sendall(b"GET /v2 HTTP/1.1\r\nname: " + b"a" * count)
            if status == b"200":
                raw.sendall(b"\r\n\r\n")
            assert raw.recv(12) == b"HTTP/1.1 " + status


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def answers(server: Server, pieces: Iterable[bytes]) -> list[int]:
    """Send pieces of requests and a last request, and return the status of each answer until the connection ends."""
    last = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connect(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):
            for piece in (*pieces, last):
                raw.sendall(piece)
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", rest_of(raw))]


FRAMED: dict[str, tuple[bytes, list[int]]] = {
    "a body that is a request": (CALL + sized(LIVE), [400]),
    "foo": (CALL + OFFER + sized(BODY), [200]),
    "foo, and a body that is a request": (CALL + OFFER + sized(LIVE), [400]),
    "websocket": (CALL + b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\n" + sized(BODY), [200]),
    "h2c": (
        CALL + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n" + sized(BODY),
        [200],
    ),
    "in chunks": (CALL + OFFER + CHUNKED + b"\r\n" + CHUNKS, [200]),
    "two lines of Connection": (CALL + b"Connection: a\r\n" + OFFER + b"Upgrade: bar\r\n" + sized(BODY), [200]),
    "waiting for 100": (CALL + OFFER + b"Expect: 100-continue\r\n" + sized(BODY), [100, 200]),
    "no body": (LIVE[:-2] + OFFER + b"\r\n", [200]),
    "several": ((CALL + OFFER + sized(BODY)) * 3, [200] * 3),
    "a trailer": (CALL + CHUNKED + b"\r\n" + CHUNKS[:-2] + OFFER + b"\r\n", [200]),
    "a header as a trailer": (CALL + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"Content-Encoding: gzip\r\n\r\n", [200]),
    "an extension of a chunk": (CALL + CHUNKED + b"\r\n" + CHUNKS.replace(b"5\r\n", b"5;a=b\r\n", 1), [200]),
    "an answer before the body": (NOWHERE + sized(LIVE), [404]),
    "an absolute target": (LIVE.replace(b" /", b" http://x/", 1), [200]),
    "many at once": (LIVE * 60, [200] * 60),
    "two lengths of the JSON": (CALL + HEAD + b"3\r\n" + HEAD + b"%d\r\n" % len(BODY) + sized(BODY), [400]),
    "one with a space": (CALL + HEAD + b"%d \r\n" % len(BODY) + sized(BODY), [200]),
    "two encodings": (CALL + b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\n" + sized(BODY), [400]),
}
ENDED: dict[str, tuple[bytes, list[int]]] = {
    "foo, then close": (CALL + b"Upgrade: foo\r\nConnection: close, Upgrade\r\n" + sized(BODY) + LIVE, [200]),
    "foo of 1.0": ((CALL + OFFER + sized(BODY)).replace(b"/1.1", b"/1.0") + LIVE, [200]),
    "100 of 1.0": ((CALL + b"Expect: 100-continue\r\n" + sized(BODY)).replace(b"/1.1", b"/1.0") + LIVE, [200]),
    "a tunnel": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + LIVE, [400]),
    "a tunnel to a path": (b"CONNECT /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n\r\n" + LIVE, [400]),
    "a tunnel with a body": (b"CONNECT /v2 HTTP/1.1\r\nHost: x\r\n" + sized(LIVE), [400]),
    "HTTP/2 without an offer": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + LIVE, [400]),
    "2.0": (LIVE.replace(b"/1.1", b"/2.0"), [400]),
    "0.9": (LIVE.replace(b"/1.1\r\n", b"/0.9\r\nConnection: keep-alive\r\n"), [400]),
    "a target without a path": (LIVE.replace(b"/v2/health/live", b"http://x", 1), [400]),
    "two lengths": (CALL + b"Content-Length: 5\r\n" + sized(BODY), [400]),
    "a length and chunks": (CALL + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n" + CHUNKS, [400]),
    "chunks and a length": (CALL + CHUNKED + sized(CHUNKS), [400]),
    "unknown coding": (CALL + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, [400]),
    "coded after the chunks": (CALL + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS, [400]),
    "a folded header": (CALL + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS, [400]),
    "bare line feeds": ((CALL + sized(BODY)).replace(b"\r\n", b"\n"), [400]),
    "a space before the colon": (CALL + b"Content-Length : 5\r\n\r\nhello", [400]),
    "an endless chunk": (CALL + CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n{", [400]),
    "a chunk that is longer than it says": (CALL + CHUNKED + b"\r\n2\r\nabcdef\r\n", [400]),
}


@pytest.mark.parametrize("split", ["whole", "head and body", "pieces"])
@pytest.mark.parametrize("name", [*FRAMED, *ENDED])
def test_each_request_has_the_answer_that_a_proxy_expects(name: str, split: str, server: Server) -> None:
    sent, expected = FRAMED[name] if name in FRAMED else ENDED[name]
    head = sent.index(b"\n\r\n" if b"\n\r\n" in sent else b"\n\n") + 3
    size = {"whole": len(sent), "head and body": head, "pieces": 7}[split]
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert answers(server, pieces) == [*expected, *([200] if name in FRAMED else [])]


def test_garbage_does_not_replace_the_answer_to_the_request_before_it(server: Server) -> None:
    assert answers(server, [CALL + sized(BODY) + b"\0\r\n\r\n"])[0] == 200


def test_only_so_many_requests_wait_for_their_turn(server: Server) -> None:
    found = answers(server, [LIVE * 1000])
    assert len(found) < 1000  # and the last may be lost, as the rest was never read
    assert set(found) == {200}


def test_a_request_that_is_answered_before_its_body_may_come(server: Server) -> None:
    """The client may then send its body, or the next request instead."""
    with connect(server) as raw:
        raw.sendall(NOWHERE + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n")
        assert rest_of(raw).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    ("head", "sent", "further"),
    [(CHUNKED + b"\r\n", [b"zz\r\n"], []), (b"Content-Length: 4\r\n\r\n", [b"body", b"garbage\r\n\r\n"], [b"400"])],
    ids=["in the body", "after the body"],
)
def test_what_is_no_request_has_an_answer_only_after_the_body_of_an_answered_one(
    server: Server, head: bytes, sent: list[bytes], further: list[bytes]
) -> None:
    """Before it, a proxy would take it for the answer to the next request."""
    with connect(server) as raw:
        raw.sendall(NOWHERE + head)
        assert raw.recv(4096).startswith(b"HTTP/1.1 404")
        for piece in sent:
            raw.sendall(piece)
            time.sleep(0.1)
        assert re.findall(rb"HTTP/1\.1 (\d{3}) ", rest_of(raw)) == further


def test_a_client_that_does_not_read(server: Server) -> None:
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.http_port))
        raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        assert raw.recv(8) == b"HTTP/1.1"
        assert eventually(lambda: not connections(server))


def test_a_client_that_asks_again_and_does_not_read(model: Model) -> None:
    large = json.dumps({"id": "x" * 4_000_000, **tensor()}).encode()
    with serving({"tiny": model}, max_body=30_000_000, body_timeout=0.3) as running, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", running.http_port))
        raw.sendall(CALL + sized(large))
        assert raw.recv(8) == b"HTTP/1.1"
        raw.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert eventually(lambda: not connections(running))


def test_the_head_and_the_body_of_an_answer_are_one_segment(server: Server) -> None:
    """Each system call of the server makes at least one."""
    with socket.create_connection(("127.0.0.1", server.http_port), 20) as connection:
        for number in range(1, 6):
            connection.sendall(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert data_segments(connection) == number


def data_segments(connection: socket.socket) -> int:
    """Return how many segments with data have arrived: tcpi_data_segs_in of Linux's `struct tcp_info`."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 156)
    return int.from_bytes(info[152:156], sys.byteorder)


@pytest.mark.slow
def test_a_connection_stays_open_between_requests(server: Server) -> None:
    """For longer than uvicorn's default of five seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
    for pause in (6.0, 0.0):
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        raw = connection.sock
        time.sleep(pause)
        assert connection.sock is raw
    connection.close()


def test_too_many_connections(server: Server) -> None:
    with ExitStack() as stack:
        address = ("127.0.0.1", server.http_port)
        opened = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(21)]
        assert opened[-1].recv(12) == b"HTTP/1.1 503"


def test_a_queue_that_is_full(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        with occupied(server):
            waiting = [pool.submit(ask, server, INFER, as_json(x=X)) for _ in range(2)]
            await_queued(server, 2)
            refused = ask(server, INFER, as_json(x=X))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert ask(server, "/v2/health/live").status == 200
        assert [each.result().status for each in waiting] == [200, 200]


def test_an_answer_that_takes_too_long(model: Model) -> None:
    with serving({"tiny": model}, timeout=0.1) as running:
        with occupied(running):
            found = ask(running, INFER, as_json(x=X))
            assert (found.status, "0.1 s" in found.error) == (504, True)
        assert ask(running, INFER, as_json(x=X)).status == 200


def test_all_bodies_together_take_no_more_than_they_may(model: Model) -> None:
    large = json.dumps({"id": "x" * 60_000, **tensor()}).encode()
    limits: Any = {"max_body": 100_000, "max_bodies": 100_000}
    with serving({"tiny": model}, **limits) as running:
        with connect(running) as slow:
            slow.sendall((CALL + sized(large))[:-1])
            assert eventually(lambda: ask(running, INFER, large).status != 200)
            refused = ask(running, INFER, large)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert "more than 100000 bytes" in refused.error
            assert ask(running, INFER, tensor()).status == 200
            slow.sendall(large[-1:])
            assert slow.recv(12) == b"HTTP/1.1 200"
        assert ask(running, INFER, large).status == 200
        packed = gzip.compress(large)
        assert ask(running, INFER, packed, {"Content-Encoding": "gzip"}).status == 200
        packed = gzip.compress(json.dumps({"id": "x" * 99_800, **tensor()}).encode())
        assert ask(running, INFER, packed, {"Content-Encoding": "gzip"}).status == 503  # both are held
        assert ask(running, INFER, large).status == 200


def test_while_a_large_body_is_read_others_are_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, read = Event(), Event(), infer.read_request

    def slow_read(body: bytes, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(120)
        return read(body, **options)

    monkeypatch.setattr(infer, "read_request", slow_read)
    monkeypatch.setattr(bodies, "_SMALL", 10)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, INFER, tensor())
        assert begun.wait(120)
        assert ask(server, "/v2/health/live").status == 200
        goes_on.set()
        assert asked.result(120).status == 200


def test_json_has_a_limit_of_its_own(model: Model) -> None:
    head, headers = binary()
    with serving({"tiny": model}) as running:
        for body, more in ((head, headers), (b"\0" * (5 << 20), {})):
            padded = body.replace(b"{", b"{" + b" " * (4 << 20), 1)
            length = {name: str(int(value) + (4 << 20)) for name, value in more.items()}
            found = ask(running, INFER, padded, length)
            assert (found.status, "sent as bytes" in found.error or "send tensors as bytes" in found.error) == (
                413,
                True,
            )
        packed = gzip.compress(b" " * (5 << 20))
        assert ask(running, INFER, packed, {"Content-Encoding": "gzip"}).status == 413
        assert ask(running, "/v2/repository/index", bytes(3 << 20)).status == 413


@pytest.mark.parametrize("items", ['"inputs": [%s]', '"inputs": [], "outputs": [%s]', '"inputs": [], "x": [%s]'])
def test_a_call_has_not_so_many_parts(model: Model, items: str) -> None:
    """Each took the memory of a hundred times its bytes."""
    item = json.dumps({"name": "a", "datatype": "FP32", "shape": [0], "data": []})
    with serving({"tiny": model}) as running:
        for part, says in ((item, "objects"), ('"a", ""', "quotes")):
            found = ask(running, INFER, ("{" + items % ", ".join([part] * 30_000) + "}").encode())
            assert (found.status, says in found.error) == (400, True)


def test_numbers_in_several_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_on_the_wire, "_PIECE", 2)
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    with serving({"tiny": model}) as running:
        for data in (x.tolist(), x.reshape(-1).tolist()):
            document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [8, 3], "data": data}]}
            for text in (json.dumps(document), json.dumps(document, indent=1)):
                answer = ask(running, INFER, text.encode()).json["outputs"][0]
                np.testing.assert_array_equal(np.float32(answer["data"]).reshape(8, 5), expected(1, x))


def test_who_goes_while_it_waits_is_not_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep a place in the queue, which has two."""
    called: list[Any] = []
    before_calls(monkeypatch, lambda *_: called.append(1))
    with ThreadPoolExecutor(1) as pool:
        with occupied(server):
            for queued in (1, 2, 1):
                with connect(server) as goes:
                    goes.sendall(CALL + sized(BODY))
                    await_queued(server, queued)
                    time.sleep(0.05)  # it is waited for
                assert eventually(lambda: not connections(server))
            stays = pool.submit(ask, server, INFER, tensor())
            await_queued(server, 2)
        assert stays.result(120).status == 200
    assert called == [1]
