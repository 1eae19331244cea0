"""Server with an admin plane in this process, and calls by its operators."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support.served import Reply, await_ready
from tests.support.tiny import TinyArtifact, serves
from weightswap_runtime import DesiredStore, Model
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
    with closing(http.client.HTTPConnection("127.0.0.1", server.admin.port, timeout=120)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, raw, dict(headers))
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def change(server: Server, what: str, model: str = "tiny", **fields: Any) -> Reply:
    return call(server, f"/admin/models/{model}/{what}", fields)


def status(server: Server, model: str = "tiny") -> Any:
    return call(server, f"/admin/models/{model}").json


class Operator:
    """An operator of the model `tiny`, and a folder whose files the server's operators may name."""

    def __init__(self, server: Server, tiny: TinyArtifact, folder: Path) -> None:
        self.server, self.tiny, self.folder = server, tiny, folder
        model = server.service.served[0].model
        assert isinstance(model, Model)
        self.model = model

    @property
    def where(self) -> str:
        assert self.server.admin is not None
        return self.server.admin.where

    def file(self, seed: int) -> Path:
        """Write the weights of a seed, also if they are there already."""
        return self.tiny.write(self.folder / f"v{seed}.safetensors", self.tiny.values(seed))

    def change(self, what: str, source: int | Path | None = None, **fields: Any) -> Reply:
        """Ask for a change. source: a file, or the seed of weights to write first."""
        if source is not None:
            fields["source"] = os.fspath(self.file(source) if isinstance(source, int) else source)
        return change(self.server, what, **fields)

    def follow(self, desired_store: DesiredStore, interval: float = 30.0) -> DesiredStore:
        """Let the model follow a desired store."""
        assert self.change("follow", desired_store=desired_store.where, interval=interval).status == 200
        return desired_store

    def serves(self, seed: int) -> bool:
        return serves(self.model, seed)

    @property
    def status(self) -> Any:
        return status(self.server)

    @property
    def history(self) -> Any:
        return call(self.server, "/admin/models/tiny/history").json

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]


@contextmanager
def operated(model: Model, tiny: TinyArtifact, folder: Path, **admin: Any) -> Iterator[Operator]:
    """Serve a model to operators who may name the files of a folder, in which the audit log is."""
    options: dict[str, Any] = {"allow": (str(folder),), "audit_log": str(folder / "audit.jsonl")}
    with administered({"tiny": model}, **options | admin) as server:
        yield Operator(server, tiny, folder)
