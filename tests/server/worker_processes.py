"""`weightswap serve --workers` in processes of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import ROOT
from tests.server.load import INPUT
from tests.support.administered import TOKEN
from tests.support.served import as_json
from tests.support.served import expected as expected_of
from tests.support.tiny import TinyArtifact
from weightswap_runtime import DesiredStore
from weightswap_runtime.transfer.admin_client import AdminClient, AdminRefused, AdminUnreachable

SEEDS = (1, 2, 3)


@dataclass
class Running:
    """A running server; each request is sent on a new connection, to any worker."""

    folder: Path
    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    where: str  # of the admin plane, if there is one

    @property
    def children(self) -> list[int]:
        """Process ids of the children; the owner is the first."""
        return children_of(self.process.pid)

    def replace(self, pid: int) -> None:
        """Kill a child, and wait until another has replaced it."""
        count = len(self.children)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(self.children) == count and pid not in self.children)

    @property
    def operator(self) -> AdminClient:
        return AdminClient(self.where, TOKEN)

    @property
    def status(self) -> Any:
        return self.operator.get("/admin/models/tiny")

    @property
    def processes(self) -> list[Any]:
        """The processes as they have reported last."""
        return list(self.operator.get("/admin/status")["processes"])

    def change(self, what: str, model: str = "tiny", **fields: Any) -> Any:
        return self.operator.post(f"/admin/models/{model}/{what}", fields)

    def refused_change(self, what: str, **fields: Any) -> str:
        """Ask for a change, and return why it is refused."""
        with pytest.raises(AdminRefused) as refused:
            self.change(what, **fields)
        return str(refused.value)

    def get(self, path: str, body: Any = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=120)) as connection:
            raw = json.dumps(body).encode() if body else None
            connection.request("POST" if body else "GET", path, raw, dict(headers or {}))
            reply = connection.getresponse()
            raw = reply.read()
        assert reply.status == status, raw
        return raw

    def await_ready(self) -> None:
        eventually(lambda: self.get("/v2/health/ready") == b"")

    def answer(
        self, name: str = "tiny", x: np.ndarray[Any, Any] = INPUT, **headers: str
    ) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """Return the parameters of an answer and its values. headers: their names have `_` for `-`."""
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        answer = json.loads(self.get(f"/v2/models/{name}/infer", as_json(x=x), headers=sent))
        assert answer["model_name"] == name
        return answer["parameters"], np.array(answer["outputs"][0]["data"], np.float32).reshape(len(x), -1)

    def counted(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.get("/metrics").decode())
        found = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


@dataclass
class Fleet(Running):
    """A running server, and the desired store that it follows."""

    desired_store: DesiredStore
    files: dict[int, Path]
    expected: dict[str, np.ndarray[Any, Any]]

    def infer(self, routing: str | None = None) -> tuple[str, int]:
        """Return the weights and the generation that have answered, after checking the answer.

        wish: of the canary, "1", or of what is served, "0".
        """
        said, values = self.answer(**({} if routing is None else {"X_Weightswap_Canary": routing}))
        np.testing.assert_allclose(values, self.expected[said["weights_id"]], rtol=1e-5, atol=1e-5)
        return said["weights_id"], said["generation"]

    def refused(self) -> str:
        """Return the reason why the model does not answer."""
        return str(json.loads(self.get("/v2/models/tiny/infer", as_json(x=INPUT), 503))["error"])

    def desire(self, seed: int) -> str:
        """Set the desired weights, wait until a worker serves them, and return their id."""
        state = self.desired_store.set(self.files[seed], revision=self.desired_store.read().revision, by="test")
        assert state.weights is not None
        wanted = state.weights.weights_id
        eventually(lambda: self.infer()[0] == wanted)
        return wanted

    def answered(self) -> float:
        """Return the number of requests that all workers have answered."""
        return self.counted("weightswap_server_requests_total", status="200")


def eventually(done: Callable[[], bool], seconds: float = 40) -> None:
    """Wait until a condition holds; errors of connections to killed processes are ignored."""
    limit = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except (http.client.HTTPException, OSError, AdminUnreachable):
            pass
        assert time.monotonic() < limit
        time.sleep(0.02)


@contextmanager
def serving(folder: Path, workers: int, *more: str) -> Iterator[Fleet]:
    """Run a server that follows a desired store, with the weights of the first seed."""
    tiny = TinyArtifact(folder / "tiny.artifact")
    files = {seed: tiny.write(folder / f"{seed}.safetensors", tiny.values(seed)) for seed in SEEDS}
    (folder / "desired_store").mkdir()
    desired_store, expected = DesiredStore(folder / "desired_store"), {}
    for seed in (3, 2, 1):
        state = desired_store.set(files[seed], revision=desired_store.read().revision if seed < 3 else 0, by="test")
        assert state.weights is not None
        expected[state.weights.weights_id] = expected_of(seed)
    source = more or ("--follow", str(folder / "desired_store"))
    with started(folder, workers, *source) as running:
        fleet = Fleet(**vars(running), desired_store=desired_store, files=files, expected=expected)
        fleet.await_ready()
        yield fleet


def operated(folder: Path) -> list[str]:
    """Return the options of a server whose operators may name the files of a folder."""
    return ["--admin-socket", str(folder / "s"), "--admin-allow", str(folder)]


@contextmanager
def started(folder: Path, workers: int, *more: str) -> Iterator[Running]:
    """Run a server of `tiny.artifact` in a folder.

    At the end it is stopped, unless it has ended, and must leave no process behind.
    """
    program = "from weightswap_tools.program import main; main()"
    options = ["--port", "0", "--grpc-port", "0", "--workers", str(workers), "--interval", "0.05"]
    command = [sys.executable, "-c", program, "serve", str(folder / "tiny.artifact"), *more, *options]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline() + process.stdout.readline()
        ports = [int(found) for found in re.findall(r"127\.0\.0\.1:(\d+)", said)]
        assert len(ports) == 2, (folder / "log").read_text()
        admin_port = dict(pairwise(more)).get("--admin-port")
        where = f"http://127.0.0.1:{admin_port}" if admin_port else f"unix://{folder / 's'}"
        yield Running(folder, process, *ports, where)
        if process.poll() is None:
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            assert not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def children_of(pid: int) -> list[int]:
    """Return the children of a process, in the order of their start, which pids may not have."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
