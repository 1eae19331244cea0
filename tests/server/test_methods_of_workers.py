"""An artifact of several methods in `weightswap serve --workers`: each is a model, and all have the same weights."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.server.worker_processes import children_of, eventually, started
from tests.support.administered import TOKEN
from tests.support.served import as_json
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime.transfer.admin_client import AdminClient

pytestmark = pytest.mark.slow

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Coder(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inside, self.outside = nn.Linear(3, 4), nn.Linear(4, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).relu()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


SEEDS = (1, 2, 3)
METHODS = {"tiny": "forward", "tiny.encode": "encode", "tiny.decode": "decode"}


class Coders(NamedTuple):
    """A server with two workers, its operator, and the weight files by their seeds."""

    pid: int
    http_port: int
    operator: AdminClient
    files: dict[int, str]

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
        """Send a request on a new connection, to any worker."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=20)) as connection:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers or {})
            reply = connection.getresponse()
            raw = reply.read()
        assert reply.status == 200, raw
        return raw

    def states(self) -> dict[str, str]:
        """Return the state of each method in the index."""
        index = json.loads(self.ask("/v2/repository/index", {"ready": False}))
        return {entry["name"]: entry["state"] for entry in index}

    def seed_of(self, name: str, routing: str = "0") -> int:
        """Return the seed whose weights a method answers with, or 0."""
        x = X if name != "tiny.decode" else np.ones((2, 4), np.float32)
        answer = json.loads(self.ask(f"/v2/models/{name}/infer", as_json(x=x), {"X-Weightswap-Canary": routing}))
        assert answer["model_name"] == name
        found = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, -1)
        return next((seed for seed in SEEDS if np.allclose(found, eager(seed, name, x), rtol=1e-5, atol=1e-5)), 0)

    def seeds(self, routing: str = "0") -> set[int]:
        """Return the seeds of all methods, from any workers."""
        return {self.seed_of(name, routing) for _ in range(4) for name in METHODS}


def eager(seed: int, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = getattr(Coder(seed), METHODS[name])(torch.from_numpy(x)).numpy()
    return found


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coders]:
    folder = tmp_path_factory.mktemp("coders")
    shapes = {"x": {0: Dim("batch", max=8)}}
    widths = {"forward": 3, "encode": 3, "decode": 4}
    methods = {
        name: MethodSpec(name, (torch.zeros(2, width),), dynamic_shapes=shapes) for name, width in widths.items()
    }
    artifact = export(Coder(0).eval(), methods=methods, out=folder / "tiny.artifact")
    files = {seed: str(pack(Coder(seed), artifact, out=folder / f"{seed}.safetensors").path) for seed in SEEDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
        options = [
            "-w",
            files[1],
            "--max-batch",
            "4",
            "--admin-socket",
            str(folder / "s"),
            "--admin-allow",
            str(folder),
        ]
        with started(folder, 2, *options) as (process, http_port, _):
            found = Coders(process.pid, http_port, AdminClient(f"unix://{folder / 's'}", TOKEN), files)
            eventually(lambda: found.ask("/v2/health/ready") == b"")
            yield found


def test_each_method_is_a_model(coders: Coders) -> None:
    assert coders.states() == dict.fromkeys(METHODS, "READY")
    assert json.loads(coders.ask("/v2/models/tiny.decode"))["inputs"][0]["shape"] == [-1, 4]
    assert coders.operator.get("/admin/models/tiny")["methods"] == list(METHODS)
    assert coders.seeds() == {1}


def test_a_swap_is_one_of_all_methods(coders: Coders) -> None:
    coders.operator.post("/admin/models/tiny/swap", {"source": coders.files[2]})
    assert coders.seeds() == {2}
    coders.operator.post("/admin/models/tiny/rollback", {})
    assert coders.seeds() == {1}


def test_what_is_unloaded_is_so_with_all_methods(coders: Coders) -> None:
    coders.operator.post("/v2/repository/models/tiny/unload", {})
    assert coders.states() == dict.fromkeys(METHODS, "UNAVAILABLE")
    coders.operator.post("/v2/repository/models/tiny/load", {})
    assert coders.seeds() == {1}


def test_a_canary_answers_for_all_methods_and_is_measured(coders: Coders) -> None:
    plan = {"source": coders.files[3], "share": 0.0, "shadow": True}
    coders.operator.post("/admin/models/tiny/canary", plan)
    assert coders.seeds("1") == {3}
    assert coders.seeds("0") == {1}
    eventually(lambda: coders.operator.get("/admin/models/tiny")["canary"]["values"].get("requests", 0) >= 12)
    eventually(lambda: coders.operator.get("/admin/models/tiny")["canary"]["values"].get("compared", 0) >= 12)
    coders.operator.post("/admin/models/tiny/commit", {})
    assert coders.seeds() == {3}
    coders.operator.post("/admin/models/tiny/rollback", {})


def test_methods_are_counted_each_and_who_dies_is_replaced(coders: Coders) -> None:
    text = coders.ask("/metrics").decode()
    assert all(f'weightswap_server_requests_total{{model="{name}"' in text for name in METHODS)
    owner, worker, _ = children_of(coders.pid)
    for killed in (worker, owner):
        os.kill(killed, signal.SIGKILL)
        eventually(lambda gone=killed: gone not in children_of(coders.pid) and len(children_of(coders.pid)) == 3)  # type: ignore[misc]
        eventually(lambda: coders.seeds() == {1})
    eventually(lambda: bool(coders.operator.get("/admin/models/tiny")["loaded"]))
    coders.operator.post("/admin/models/tiny/swap", {"source": coders.files[2]})
    assert coders.seeds() == {2}
