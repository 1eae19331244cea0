"""Server in this process, and requests to it that no client would send."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.tiny import TinyArtifact
from weightswap_runtime import Model, load
from weightswap_server import ServedMethod, Server, Settings

X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = "/v2/models/tiny/infer"


def expected(seed: int, x: np.ndarray[Any, Any] = X) -> np.ndarray[Any, Any]:
    """Return what the tiny model answers with the weights of a seed."""
    return TinyArtifact.eager(seed, torch.from_numpy(x)).numpy()


@contextmanager
def serving(models: Mapping[str, Model], warm: bool = True, **settings: Any) -> Iterator[Server]:
    """Serve models on free ports during the block; `warm` waits until they are ready."""
    server = Server(models, Settings(http_port=0, **settings))
    with server.running():
        if warm:
            await_ready(server)
        yield server


@contextmanager
def serving_tiny(folder: Path, **settings: Any) -> Iterator[Server]:
    """Serve the tiny model with the weights of seed 1, which nothing in the block may change."""
    tiny = TinyArtifact(folder / "tiny.artifact")
    model = load(tiny.path, tiny.write(folder / "v1.safetensors", tiny.values(1)))
    with serving({"tiny": model}, **settings) as server:
        yield server
        assert model.generation == 0
        assert answer_of(server) == expected(1).reshape(-1).tolist()


def await_ready(server: Server) -> None:
    limit = time.monotonic() + 120
    while not server.service.ready:
        assert time.monotonic() < limit
        time.sleep(0.005)


def await_queued(server: Server, count: int) -> None:
    """Wait until so many calls of the first model are waiting."""
    limit = time.monotonic() + 120
    while server.service.served[0].thread.queued != count:
        assert time.monotonic() < limit
        time.sleep(0.001)


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Keep the first model's thread busy during the block."""
    begun, ended = Event(), Event()
    server.service.served[0].thread.do(lambda: (begun.set(), ended.wait(120)))
    begun.wait(120)
    try:
        yield
    finally:
        ended.set()


def before_calls(monkeypatch: pytest.MonkeyPatch, do: Callable[[ServedMethod, Any, Any], object]) -> None:
    """Call `do(method, session, flat)` before each later call of a served method, which an error of it replaces."""
    called = ServedMethod.call

    def call(self: ServedMethod, session: Any, flat: Any, *variants: Any) -> Any:
        do(self, session, flat)
        return called(self, session, flat, *variants)

    monkeypatch.setattr(ServedMethod, "call", call)


class Reply(NamedTuple):
    """HTTP response; `json` is its document."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Error message in the protocol's form."""
        assert list(self.json) == ["error"]
        return str(self.json["error"])


def ask(
    server: Server, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
) -> Reply:
    """Send a request on a new connection; a body other than bytes becomes JSON."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, raw, dict(headers or {}))
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def answer_of(server: Server, x: np.ndarray[Any, Any] = X) -> Any:
    """Return the flat output of the tiny model."""
    return ask(server, INFER, as_json(x=x)).json["outputs"][0]["data"]


def connect(server: Server) -> socket.socket:
    """Connect to the HTTP port, for requests that no client would send."""
    return socket.create_connection(("127.0.0.1", server.http_port), 10)


def rest_of(connection: socket.socket) -> bytes:
    """Return what comes until the connection ends."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def connections(server: Server) -> int:
    """Return the number of HTTP connections that the server knows of."""
    return len(server._http.server_state.connections)


def as_json(**inputs: np.ndarray[Any, Any]) -> dict[str, Any]:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": list(value.shape), "data": value.reshape(-1).tolist()}
        for name, value in inputs.items()
    ]
    return {"inputs": tensors}
