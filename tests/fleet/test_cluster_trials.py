"""Weights on trial on a real cluster: shares, headers, rules, steps, and whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections import Counter
from typing import Any

import pytest

from tests.support.packages import needs
from tests.support.rows import prefer_rows
from weightswap_fleet import FleetRefused
from weightswap_runtime import BaseMismatch, StageClosed, StagingBusy, write_delta

from .clusters import INPUT, Deployed, calling, soon, until

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]
NEVER = "errors > 2"


def ended(deployed: Deployed) -> Any:
    """How the trial has ended."""
    return until(lambda: found if (found := deployed.fleet.trial) is not None and found.outcome else None)


def asked(deployed: Deployed, times: int, canary: bool | None = None) -> Counter[float]:
    """Which weights answer."""
    files = deployed.files
    with deployed.fleet.client() as client:
        answers = [client.infer({"x": INPUT}, canary=canary) for _ in range(times)]
    assert all(files.is_whole(each.outputs["output"], each.weights_id) for each in answers)
    return Counter(files.number(each.weights_id) for each in answers)


def serving(deployed: Deployed, number: int) -> None:
    """The fleet serves the weights of a number, and nothing is on trial."""
    soon(lambda: deployed.fleet.swap(deployed.files.weights[number]))
    assert deployed.fleet.wait(120)


def test_a_share_answers_and_is_promoted(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    revision = fleet.desired.revision
    with calling(deployed) as clients:
        begun = fleet.canary(files.weights[2], share=0.25, by="ana", why="better", abort_if=NEVER)
        assert (files.number(begun.weights_id), set(begun.shares.values())) == (2, {0.25})
        assert fleet.desired.revision == revision
        until(lambda: fleet.trial.values["requests"] >= 50)
        found = asked(deployed, 200)
        assert 20 <= found[2] <= 90
        assert asked(deployed, 10, canary=True) == {2: 10}
        assert asked(deployed, 10, canary=False) == {1: 10}
        with pytest.raises(StagingBusy):
            fleet.canary(files.weights[3], share=0.1)
        with pytest.raises(FleetRefused):
            fleet.swap(files.weights[3])
        receipt = fleet.promote(by="bo")
        committed = time.time()
        time.sleep(0.5)
    assert (receipt.revision, receipt.late, files.number(receipt.weights_id)) == (revision + 1, {}, 2)
    assert all(each.resident for each in receipt.nodes.values())
    assert (fleet.desired.weights.by, fleet.desired.weights.why) == ("bo", "better")
    assert (fleet.trial.outcome, fleet.trial.reason) == ("promoted", "by bo")
    for client in clients:
        assert {number for when, number, _ in client.answers if when > committed} == {2}
        assert client.failures == []
    with pytest.raises(StageClosed):
        fleet.promote()


def test_a_delta_is_tried_and_promoted_and_stays(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_rows(monkeypatch)
    fleet, files, _ = deployed
    serving(deployed, 1)
    one, other = (
        write_delta(files.weights[number], files.weights[number + 1], files.folder / f"d{number}.safetensors").path
        for number in (1, 2)
    )
    with pytest.raises(BaseMismatch):
        fleet.canary(other, share=0.5)
    with calling(deployed):
        fleet.canary(one, share=0.5, abort_if=NEVER)
        assert asked(deployed, 10, canary=True) == {2: 10}
        receipt = fleet.promote()
        assert (receipt.late, files.number(receipt.weights_id)) == ({}, 2)
        assert files.number(fleet.swap(other).weights_id) == 3
        agent = next(iter(fleet.nodes.values())).agent
        os.kill(agent, signal.SIGKILL)
        until(lambda: agent not in {each.agent for each in fleet.nodes.values()} and fleet.wait(1))
    assert [files.number(base.weights_id) for base in fleet.desired.weights.bases] == [1, 2]
    serving(deployed, 1)


def test_over_http(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    fleet.canary(files.weights[2], share=0.0, abort_if=NEVER)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": INPUT.tolist()}]}
    found = []
    for routing in ("1", "0"):
        headers = {"content-type": "application/json", "X-Weightswap-Canary": routing}
        url = "http://127.0.0.1:8000/v2/models/numbered/infer"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
        ) as answer:
            found.append(files.number(json.load(answer)["parameters"]["weights_id"]))
    assert found == [2, 1]
    report = fleet.abort(by="ana", why="enough")
    assert (report.outcome, report.reason) == ("aborted", "by ana: enough")
    until(lambda: {each.trying for each in fleet.nodes.values()} == {""})
    assert asked(deployed, 20, canary=True) == {1: 20}


def test_a_rule_promotes_what_all_nodes_have_measured(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    with calling(deployed):
        rule = "requests >= 100 and errors < 0.01 for 1 s"
        fleet.canary(files.write(31), share=0.5, promote_if=rule, by="run 7", why="better")  # never desired before
        report = ended(deployed)
    assert (report.outcome, report.reason) == ("promoted", rule)
    assert report.values["requests"] >= 100
    weights = fleet.desired.weights
    assert (files.number(weights.weights_id), weights.by, weights.why) == (31, "run 7", f"better (trial: {rule})")


def test_answers_that_are_not_finite_end_it(deployed: Deployed) -> None:
    """By the rule that there is where none is given; no weight is NaN."""
    fleet, files, _ = deployed
    serving(deployed, 1)
    before = fleet.desired
    with calling(deployed):
        fleet.canary(files.write(1e30), share=0.2)
        report = ended(deployed)
    assert report.outcome == "aborted"
    assert "nonfinite" in report.reason
    assert fleet.desired == before
    assert asked(deployed, 20) == {1: 20}


def test_a_shadow_answers_nobody_and_is_compared(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    fleet.canary(files.weights[2], shadow=True, abort_if="compared >= 20 and differing > 0.5")
    with calling(deployed) as clients:
        report = ended(deployed)
    assert report.outcome == "aborted"
    assert report.values["max_abs"] == 8 * 64 * 3.0
    assert {number for client in clients for _, number, _ in client.answers} == {1}


def test_steps_end_in_a_promotion(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    with calling(deployed):
        fleet.canary(files.weights[4], steps=(0.0, 0.5, 1.0), step_seconds=2.0, abort_if=NEVER)
        seen = set()
        while not (report := fleet.trial).outcome:
            seen |= set(report.shares.values())
            time.sleep(0.1)
    assert seen == {0.0, 0.5, 1.0}
    assert (report.outcome, report.reason) == ("promoted", "3 steps of 2 s")
    assert files.number(fleet.desired.weights.weights_id) == 4


def test_whole_nodes_answer_with_it(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    serving(deployed, 1)
    report = fleet.canary(files.weights[2], share=0.3, of="nodes", abort_if=NEVER)
    assert sorted(report.shares.values()) == sorted([1.0] + [0.0] * (len(fleet.nodes) - 1))
    found = until(lambda: found if len(found := asked(deployed, 40)) == 2 else None)
    assert set(found) == {1, 2}
    fleet.abort()


@pytest.mark.parametrize("victim", ["coordinator", "agent", "replica"])
def test_whoever_is_killed(deployed: Deployed, victim: str) -> None:
    """The next coordinator leads on; a node whose agent dies serves what is desired; no answer is wrong."""
    import ray

    fleet, files, _ = deployed
    serving(deployed, 1)
    with calling(deployed) as clients:
        fleet.canary(files.weights[2], share=0.5, abort_if=NEVER)
        until(lambda: fleet.trial.values["requests"] >= 20)
        node = max(fleet.nodes.values(), key=lambda each: len(each.replicas))
        if victim == "coordinator":
            ray.kill(ray.get_actor("coordinator:numbered", "weightswap"), no_restart=False)
        else:
            os.kill(node.agent if victim == "agent" else node.replicas[0], signal.SIGKILL)
        report = until(lambda: found if (found := fleet.trial) is not None and not found.outcome else None)
        assert files.number(report.weights_id) == 2
        until(lambda: len(fleet.nodes) == len(fleet.trial.shares) + (victim == "agent"))
        before = fleet.trial.values["requests"]
        until(lambda: fleet.trial.values["requests"] > before)
        receipt = soon(fleet.promote)
        assert fleet.wait(120)
    assert files.number(receipt.weights_id) == 2
    assert sum(len(client.answers) for client in clients) > 20
    assert asked(deployed, 20) == {2: 20}
    until(lambda: {each.trying for each in fleet.nodes.values()} == {""})
