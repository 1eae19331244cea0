"""Server in this process, and requests to it that no client would send."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from weightswap_runtime import Model
from weightswap_server import Server, Settings


@contextmanager
def serving(models: Mapping[str, Model], warm: bool = True, **settings: Any) -> Iterator[Server]:
    """Serve models on free ports during the block; `warm` waits until they are ready."""
    server = Server(models, Settings(http_port=0, **settings))
    with server.running():
        if warm:
            await_ready(server)
        yield server


def await_ready(server: Server) -> None:
    limit = time.monotonic() + 20
    while not server.service.ready:
        assert time.monotonic() < limit
        time.sleep(0.005)


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Keep the first model's thread busy during the block."""
    begun, ended = Event(), Event()
    server.service.served[0].thread.do(lambda: (begun.set(), ended.wait(20)))
    begun.wait(20)
    try:
        yield
    finally:
        ended.set()


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
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, raw, dict(headers or {}))
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def as_json(**inputs: np.ndarray[Any, Any]) -> dict[str, Any]:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": list(value.shape), "data": value.reshape(-1).tolist()}
        for name, value in inputs.items()
    ]
    return {"inputs": tensors}
