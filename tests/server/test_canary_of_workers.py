"""A canary of `weightswap serve --workers`: any worker answers from it, rightly, and what all measure is one."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import tritonclient.grpc

from tests.server.load import INPUT
from tests.server.worker_processes import Fleet, eventually, serving
from tests.support.administered import TOKEN
from tests.support.served import as_json
from weightswap_runtime.tensors import array_content
from weightswap_runtime.transfer.admin_client import AdminClient
from weightswap_server.canary import Compared, Differences, Side

CHANGES = "/admin/models/tiny/"


class Crew(NamedTuple):
    """A server with two workers, and its operator."""

    fleet: Fleet
    operator: AdminClient

    @property
    def served(self) -> str:
        return str(self.status["served"]["weights_id"])

    @property
    def status(self) -> Any:
        return self.operator.get("/admin/models/tiny")

    def values(self) -> dict[str, Any]:
        return dict(self.status["canary"]["values"])

    def begin(self, seed: int, **fields: Any) -> str:
        said = self.operator.post(f"{CHANGES}canary", {"source": str(self.fleet.files[seed]), **fields})
        return str(said["status"]["canary"]["weights_id"])

    def ask(self, routing: str | None = None) -> str:
        """Return the weights that have answered on a new connection, after checking the answer."""
        headers = {} if routing is None else {"X-Weightswap-Canary": routing}
        with closing(http.client.HTTPConnection("127.0.0.1", self.fleet.http_port, timeout=20)) as connection:
            connection.request("POST", "/v2/models/tiny/infer", json.dumps(as_json(x=INPUT)), headers)
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        assert reply.status == 200, answer
        weights_id = str(answer["parameters"]["weights_id"])
        values = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 5)
        np.testing.assert_allclose(values, self.fleet.expected[weights_id], rtol=1e-5, atol=1e-5)
        return weights_id


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    options = ["--admin-socket", str(folder / "s"), "--admin-allow", str(folder), "-w", str(folder / "1.safetensors")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
        with serving(folder, 2, *options) as fleet:
            yield Crew(fleet, AdminClient(f"unix://{folder / 's'}", TOKEN))


def test_share_header_and_discard(crew: Crew) -> None:
    served = crew.served
    canary = crew.begin(2, share=0.25)
    assert {crew.ask("1") for _ in range(10)} == {canary}
    assert {crew.ask("0") for _ in range(10)} == {served}
    answers = Counter(crew.ask() for _ in range(80))
    assert 18 <= answers[canary] <= 20  # each worker owes less than one
    assert answers[canary] + answers[served] == 80
    eventually(lambda: crew.values()["requests"] == 10 + answers[canary], 5)
    eventually(lambda: crew.values()["served_requests"] == 10 + answers[served], 5)
    assert crew.values()["errors"] == 0
    assert 0 < crew.values()["p50"] <= crew.values()["p99"]
    eventually(
        lambda: crew.fleet.counted("weightswap_server_requests_total", weights_id=canary) == 10 + answers[canary], 5
    )
    crew.operator.post(f"{CHANGES}discard", {})
    assert {crew.ask("1") for _ in range(10)} == {served}


@pytest.mark.slow
def test_grpc(crew: Crew) -> None:
    """Metadata and shares, on connections that stay with their workers."""
    served, tensor = crew.served, tritonclient.grpc.InferInput("x", [2, 3], "FP32").set_data_from_numpy(INPUT)
    canary = crew.begin(2, share=0.5)
    found: Counter[str] = Counter()
    for _ in range(4):
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{crew.fleet.grpc_port}") as client:
            for routing, wanted in (("1", {canary}), ("0", {served}), (None, {canary, served})):
                for _ in range(10):
                    headers = {"x-weightswap-canary": routing} if routing else None
                    answer = client.infer("tiny", [tensor], headers=headers)
                    weights_id = answer.get_response().parameters["weights_id"].string_param
                    assert weights_id in wanted
                    np.testing.assert_allclose(
                        answer.as_numpy("output"), crew.fleet.expected[weights_id], rtol=1e-5, atol=1e-5
                    )
                    found[weights_id] += 1
    assert 40 + 18 <= found[canary] <= 40 + 20  # each worker owes less than one
    eventually(lambda: crew.values()["requests"] == found[canary], 5)
    crew.operator.post(f"{CHANGES}discard", {})


@pytest.mark.slow
def test_a_shadow_is_compared_and_a_promotion_is_everybodys(crew: Crew) -> None:
    served, seed = crew.served, 2
    canary = crew.begin(seed, shadow=True)
    assert {crew.ask() for _ in range(12)} == {served}
    eventually(lambda: crew.values()["compared"] + crew.status["canary"]["skipped"] == 12, 5)
    values = crew.values()
    largest = np.abs(crew.fleet.expected[served] - crew.fleet.expected[canary]).max()
    assert values["differing"] == 1.0
    assert values["max_abs"] == pytest.approx(largest, rel=1e-4)
    eventually(lambda: crew.fleet.counted("weightswap_server_canary_compared_total") == values["compared"], 5)
    crew.operator.post(f"{CHANGES}commit", {"expect": canary})
    assert {crew.ask() for _ in range(12)} | {crew.ask("1") for _ in range(12)} == {canary}
    crew.operator.post(f"{CHANGES}rollback", {})
    assert {crew.ask() for _ in range(12)} == {served}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "ends_on"), [("promote_if", "canary"), ("abort_if", "served")])
def test_rules_judge_what_all_workers_have_measured(crew: Crew, rule: str, ends_on: str) -> None:
    served = crew.served
    canary = crew.begin(3, share=0.5, **{rule: "requests >= 20 and served_requests >= 20 and errors < 0.001"})
    eventually(lambda: bool(crew.ask()) and crew.status["canary"] is None)
    assert {crew.ask("1") for _ in range(12)} == {canary if ends_on == "canary" else served}
    if ends_on == "canary":
        assert "served_requests >= 20" in crew.operator.get(f"{CHANGES}history")["receipts"][-1]["why"]
        crew.operator.post(f"{CHANGES}rollback", {})


def _until_answered(crew: Crew) -> str:
    found: list[str] = []
    eventually(lambda: not found.append(crew.ask("1")))  # type: ignore[func-returns-value]
    return found[0]


def _kill_worker(crew: Crew, canary: str) -> None:
    """Kill a worker; the one that replaces it answers from the canary, too."""
    worker = crew.fleet.children[1]
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: len(crew.fleet.children) == 3 and worker not in crew.fleet.children)
    eventually(lambda: {crew.ask("1") for _ in range(20)} == {canary})


def _kill_owner(crew: Crew) -> None:
    """Kill the owner; its staged weights are discarded."""
    owner = crew.fleet.children[0]
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: owner not in crew.fleet.children and crew.status["canary"] is None)
    assert crew.ask("1") == crew.served


@pytest.mark.slow
def test_under_load_whoever_is_killed(crew: Crew) -> None:
    """Canaries come and go, workers and the owner are killed: each answer is of the weights that it names."""
    ended = False

    def client() -> Counter[str]:
        found: Counter[str] = Counter()
        while not ended:
            try:
                found[crew.ask()] += 1
            except (http.client.HTTPException, OSError):  # of the one that was killed
                found[""] += 1
        return found

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client) for _ in range(2)]
        try:
            for turn, seed in enumerate((2, 3, 2, 2, 3, 3)):  # never what is served: each odd turn is committed
                canary = crew.begin(seed, share=0.5, shadow=turn % 2 == 0)
                assert _until_answered(crew) == canary
                time.sleep(0.1)
                if turn == 2:
                    _kill_worker(crew, canary)
                if turn == 4:
                    _kill_owner(crew)
                    continue
                crew.operator.post(f"{CHANGES}{'commit' if turn % 2 else 'discard'}", {})
        finally:
            ended = True
        counts = sum((each.result(20) for each in clients), Counter())
    assert counts.keys() - {""} == set(crew.fleet.expected)
    assert counts[""] <= 20
    print(counts)


def test_what_was_taken_and_added_is_what_one_has_measured() -> None:
    whole, parts, total = Side(), (Side(), Side()), Side()
    for number in range(100):
        for side in (whole, parts[number % 2]):
            side.failed() if number % 10 == 3 else side.answered(number / 1000)
            side.examined(number % 4 == 0)
        if number % 30 == 0:
            for part in parts:
                total.add(part.drain())
    for part in parts:
        total.add(part.drain())
        assert part.drain().requests == 0
    assert total.values("") == whole.values("")


def test_infinite_differences_are_told() -> None:
    one, other = Differences(0.01), Differences(0.01)
    zeros, infinite = (array_content(np.full(2, value, np.float32)) for value in (0, np.inf))
    assert one.compare([("y", zeros)], [("y", infinite)])
    told = one.values()
    other.add(msgspec.msgpack.decode(msgspec.msgpack.encode(one.drain()), type=Compared))
    assert other.values() == told
    assert told["max_rel"] == np.inf
    assert one.values()["compared"] == 0
