"""Server with an admin plane in this process, and calls by its operators."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from tests.support.served import Reply, await_ready
from weightswap_runtime import Model
from weightswap_server import AdminSettings, Server, Settings

TOKEN = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def administered(models: Mapping[str, Model], *, warm: bool = True, **admin: Any) -> Iterator[Server]:
    """Serve models with an admin plane on a free port; TOKEN is in the environment.

    serving: more settings of the server.
    """
    more = admin.pop("serving", {})
    admin = {"body_timeout": 0.4} | ({"port": 0} if "socket" not in admin else {}) | admin
    server = Server(models, Settings(http_port=0, **more), AdminSettings(**admin))
    with server.running():
        if warm:
            await_ready(server)
        yield server


def call(
    server: Server,
    path: str,
    body: Any = None,
    headers: Mapping[str, str | bytes] = BEARER,
    method: str | None = None,
) -> Reply:
    """Send a request to the admin plane. A body other than bytes becomes JSON; without a body it is a GET."""
    assert server.admin is not None
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", server.admin.port, timeout=20)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, raw, dict(headers))
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def change(server: Server, what: str, model: str = "tiny", **fields: Any) -> Reply:
    return call(server, f"/admin/models/{model}/{what}", fields)


def status(server: Server, model: str = "tiny") -> Any:
    return call(server, f"/admin/models/{model}").json
