"""Several models of `weightswap serve --workers`, with traces: whoever answers, whoever is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest

from tests.server.load import INPUT
from tests.server.worker_processes import children_of, eager, eventually, started
from tests.support.administered import TOKEN
from tests.support.collector import Collected, collecting
from tests.support.served import as_json
from tests.support.tiny import TinyArtifact
from weightswap_runtime.transfer.admin_client import AdminClient, AdminRefused

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


pytestmark = pytest.mark.slow


class Several(NamedTuple):
    """A server with two workers and the models `tiny` and `second`, and their operator."""

    pid: int
    http_port: int
    operator: AdminClient
    files: dict[int, str]
    collected: Collected
    asked: list[str]

    @property
    def children(self) -> list[int]:
        return children_of(self.pid)

    def answers_of(self, name: str) -> int:
        """Return the seed whose weights answer on a new connection, or 0."""
        self.asked.append(name)
        with closing(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=20)) as connection:
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            connection.request("POST", f"/v2/models/{name}/infer", json.dumps(as_json(x=INPUT)), headers)
            answer = json.loads(connection.getresponse().read())
        assert answer["model_name"] == name
        values = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 5)
        return next((seed for seed in self.files if np.allclose(values, eager(seed), rtol=1e-5, atol=1e-5)), 0)

    def served(self) -> set[tuple[int, int]]:
        """Return the seeds of both models, from any workers."""
        return {(self.answers_of("tiny"), self.answers_of("second")) for _ in range(6)}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    first, second = TinyArtifact(folder / "tiny.artifact"), TinyArtifact(folder / "second.artifact")
    files = {seed: str(first.write(folder / f"{seed}.safetensors", first.values(seed))) for seed in (1, 2, 3)}
    weights = ["-w", f"tiny={files[1]}", "-w", f"second={files[2]}"]
    options = ["--traces", "--admin-socket", str(folder / "s"), "--admin-allow", str(folder)]
    with collecting() as collected, pytest.MonkeyPatch.context() as patch:
        told = collected.environment | {"OTEL_BSP_SCHEDULE_DELAY": "200", "WEIGHTSWAP_ADMIN_TOKEN": TOKEN}
        for name, value in told.items():
            patch.setenv(name, value)
        with started(folder, 2, f"second={second.path}", *weights, *options) as (process, http_port, _):
            operator = AdminClient(f"unix://{folder / 's'}", TOKEN)
            found = Several(process.pid, http_port, operator, files, collected, [])
            eventually(lambda: found.served() == {(1, 2)})
            yield found


def test_requests_and_swaps_have_spans(several: Several) -> None:
    """The span of a request is of its worker, that of a swap of the owner alone."""
    collected = several.collected

    def said(what: bytes) -> int:
        return sum(body.count(what) for _, body in list(collected.posts))

    several.operator.post("/admin/models/tiny/swap", {"source": several.files[3]})
    several.operator.post("/admin/models/tiny/swap", {"source": several.files[1]})
    eventually(lambda: said(b"weightswap.swap") >= 4, 10)
    assert several.served() == {(1, 2)}
    eventually(lambda: said(bytes.fromhex(CALLER)) == len(several.asked), 10)
    assert said(b"weightswap.swap") == 4


def test_operators_are_told_where_variants_go(several: Several) -> None:
    variant = {"group": "low", "name": "a", "source": several.files[1]}
    with pytest.raises(AdminRefused, match=r"Start the server without --workers, or start several servers"):
        several.operator.post("/admin/models/tiny/add_variant", variant)


def test_a_trainers_update_reaches_all_workers_of_its_model(several: Several) -> None:
    post = several.operator.post
    post("/start_weight_update?model=second", {})
    post("/update_weights?model=second", {"update_info": {"path": several.files[3]}})
    assert several.served() == {(1, 2)}
    post("/finish_weight_update?model=second", {"weight_version": "v3"})
    assert several.served() == {(1, 3)}
    assert several.operator.get("/weight_info?model=second")["weight_version"] == "v3"
    digests = [post(f"/weight_checker?model={name}", {"action": "checksum"}) for name in ("tiny", "second")]
    assert [len(each["checksums"]) for each in digests] == [4, 4]
    assert digests[0] != digests[1]
    post("/update_weights_from_disk?model=second", {"model_path": several.files[2]})
    assert several.served() == {(1, 2)}


def test_each_has_its_own_weights_whoever_is_killed(several: Several) -> None:
    several.operator.post("/admin/models/second/swap", {"source": several.files[3]})
    assert several.served() == {(1, 3)}
    owner, worker, _ = several.children
    for killed in (worker, owner):
        os.kill(killed, signal.SIGKILL)
        eventually(lambda gone=killed: gone not in several.children and len(several.children) == 3)  # type: ignore[misc]
        eventually(lambda: several.served() == {(1, 3)})
    eventually(lambda: bool(several.operator.get("/admin/models/tiny")["loaded"]))
    several.operator.post("/admin/models/tiny/swap", {"source": several.files[2]})
    assert several.served() == {(2, 3)}
