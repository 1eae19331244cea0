"""Operators and trainers of `weightswap serve --workers`.

Any worker answers from a canary, rightly, and what all measure is one; uploads go with the history, and what a trainer
sends is served by all.
"""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.server.worker_processes import Fleet, eventually, serving
from tests.support.administered import TOKEN
from tests.support.ports import free_port
from tests.support.storm import storm
from tests.support.tiny import TinyArtifact
from weightswap_runtime import NonFiniteWeights, Sender, SwapReceipt, TransferFailed
from weightswap_runtime.tensors import array_content
from weightswap_server.canary import LAST, CanaryAnalysis, CanaryPlan, Measured, Side, compare, failures


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("crew")
    (folder / "uploads").mkdir()
    operated = ["--admin-port", str(free_port()), "--admin-allow", str(folder)]
    uploads = ["--upload-dir", str(folder / "uploads"), "--upload-keep", "1"]
    sources = ["-w", str(folder / "1.safetensors"), "--receive", trainer_of(folder)]
    with serving(folder, 2, *sources, *operated, *uploads) as found:
        yield found


def trainer_of(folder: Path) -> str:
    return f"unix:{folder / 'x.sock'}"


def served(fleet: Fleet) -> str:
    return str(fleet.status["served"]["weights_id"])


def values(fleet: Fleet) -> dict[str, Any]:
    return dict(fleet.status["canary"]["values"])


def begin(fleet: Fleet, seed: int, **fields: Any) -> str:
    said = fleet.change("canary", source=str(fleet.files[seed]), **fields)
    return str(said["status"]["canary"]["weights_id"])


def answers(fleet: Fleet, count: int, routing: str | None = None) -> Counter[str]:
    """Count the weights that have answered so many requests, each of which is checked."""
    return Counter(fleet.infer(routing)[0] for _ in range(count))


def test_share_header_and_discard(fleet: Fleet) -> None:
    first, canary = served(fleet), begin(fleet, 2, share=0.25)
    assert answers(fleet, 10, "1") == {canary: 10}
    assert answers(fleet, 10, "0") == {first: 10}
    found = answers(fleet, 80)
    assert 18 <= found[canary] <= 20  # each worker owes less than one
    assert found[canary] + found[first] == 80
    eventually(lambda: values(fleet)["requests"] == 10 + found[canary], 5)
    eventually(lambda: values(fleet)["served_requests"] == 10 + found[first], 5)
    assert values(fleet)["errors"] == 0
    assert 0 < values(fleet)["p50"] <= values(fleet)["p99"]
    requests = "weightswap_server_requests_total"
    eventually(lambda: fleet.counted(requests, weights_id=canary) == 10 + found[canary], 5)
    fleet.change("discard")
    assert answers(fleet, 10, "1") == {first: 10}


@pytest.mark.slow
def test_a_shadow_is_compared_and_a_promotion_is_everybodys(fleet: Fleet) -> None:
    first, canary = served(fleet), begin(fleet, 2, shadow=True)
    assert answers(fleet, 12) == {first: 12}
    eventually(lambda: values(fleet)["compared"] + fleet.status["canary"]["skipped"] == 12, 5)
    measured = values(fleet)
    largest = np.abs(fleet.expected[first] - fleet.expected[canary]).max()
    assert (measured["differing"], measured["max_abs"]) == (1.0, pytest.approx(largest, rel=1e-4))
    eventually(lambda: fleet.counted("weightswap_server_canary_compared_total") == measured["compared"], 5)
    fleet.change("commit", expect=canary)
    assert answers(fleet, 12) + answers(fleet, 12, "1") == {canary: 24}
    fleet.change("rollback")
    assert answers(fleet, 12) == {first: 12}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "ends_on"), [("promote_if", "canary"), ("abort_if", "served")])
def test_rules_judge_what_all_workers_have_measured(fleet: Fleet, rule: str, ends_on: str) -> None:
    first = served(fleet)
    canary = begin(fleet, 3, share=0.5, **{rule: "requests >= 20 and served_requests >= 20 and errors < 0.001"})
    eventually(lambda: bool(answers(fleet, 1)) and fleet.status["canary"] is None)
    assert answers(fleet, 12, "1") == {canary if ends_on == "canary" else first: 12}
    if ends_on == "canary":
        history = fleet.operator.get("/admin/models/tiny/history")
        assert "served_requests >= 20" in history["receipts"][-1]["why"]
        fleet.change("rollback")


def kill_owner(fleet: Fleet) -> None:
    """Kill the owner; its staged weights are discarded."""
    fleet.replace(fleet.children[0])
    eventually(lambda: fleet.status["canary"] is None)
    assert answers(fleet, 1, "1") == {served(fleet): 1}


@pytest.mark.slow
def test_under_load_whoever_is_killed(fleet: Fleet) -> None:
    """Canaries come and go, workers and the owner are killed: each answer is of the weights that it names."""

    def client(_: int) -> str:
        try:
            return fleet.infer()[0]
        except (http.client.HTTPException, OSError):  # of the one that was killed
            return ""

    with storm(client, 2) as seen:
        for turn, seed in enumerate((2, 3, 2, 2, 3, 3)):  # never what is served: each odd turn is committed
            canary = begin(fleet, seed, share=0.5, shadow=turn % 2 == 0)
            eventually(lambda canary=canary: answers(fleet, 1, "1") == {canary: 1})  # type: ignore[misc]
            time.sleep(0.1)
            if turn == 2:  # the worker that replaces this one answers from the canary, too
                fleet.replace(fleet.children[1])
                eventually(lambda canary=canary: answers(fleet, 20, "1") == {canary: 20})  # type: ignore[misc]
            if turn == 4:
                kill_owner(fleet)
                continue
            fleet.change("commit" if turn % 2 else "discard")
    counts = Counter(chain(*seen))
    assert counts.keys() - {""} == set(fleet.expected)
    assert counts[""] <= 20
    print(counts)


def test_the_owner_removes_uploads_that_no_history_needs(fleet: Fleet) -> None:
    for seed in (2, 3, 1):
        fleet.operator.upload(fleet.files[seed], f"v{seed}.safetensors", "", lambda *_: None)
        fleet.change("swap", source=f"upload:v{seed}.safetensors")
    assert {path.name for path in (fleet.folder / "uploads").iterdir()} == {"v1.safetensors", "v3.safetensors"}


def sent(sender: Sender, fleet: Fleet, seed: int) -> str:
    receipt = sender.send(TinyArtifact.values(seed))
    assert isinstance(receipt, SwapReceipt)
    assert answers(fleet, 8) == {receipt.weights_id: 8}
    return receipt.weights_id


def test_all_serve_what_the_owner_receives(fleet: Fleet) -> None:
    tiny, at = fleet.folder / "tiny.artifact", trainer_of(fleet.folder)
    with Sender(at, tiny) as sender, Sender(fleet.where, tiny, token=TOKEN) as remote:
        sent(sender, fleet, 2)
        last = sent(remote, fleet, 3)
        with pytest.raises(NonFiniteWeights):
            sender.send({**TinyArtifact.values(3), "bias": TinyArtifact.values(3)["bias"] * float("nan")})
        owner = fleet.children[0]
        os.kill(owner, signal.SIGKILL)  # the segment keeps what was sent
        assert fleet.infer()[0] == last

        def sent_to_the_next() -> bool:
            try:
                return sent(sender, fleet, 2) != last
            except TransferFailed:
                return False

        eventually(sent_to_the_next)
        assert owner not in fleet.children


def test_what_was_taken_and_added_is_what_one_has_measured() -> None:
    whole, total, *parts = (CanaryAnalysis(CanaryPlan()) for _ in range(4))
    for number in range(100):
        answer = failures(1) if number % 10 == 3 else Side(requests=1, seconds=[number / 1000], failed=[False])
        for side in (whole, parts[number % 2]):
            side.add(Measured(canary=answer))
            side.add(Measured(canary=Side(nonfinite=[number % 4 == 0])))
        if number % 30 == 0:
            for part in parts:
                total.add(part.drain())
    for part in parts:
        total.add(part.drain())
        assert part.drain() == Measured()
    assert total.values() == whole.values()


def test_the_latest_answers_are_kept() -> None:
    side = Side()
    side.add(Side(requests=LAST, seconds=[1.0] * LAST, failed=[True] * LAST))
    side.add(Side(requests=2, seconds=[2.0] * 2, failed=[False] * 2))
    assert side.requests == LAST + 2
    assert side.seconds == [1.0] * (LAST - 2) + [2.0] * 2
    assert side.failed == [True] * (LAST - 2) + [False] * 2


def test_infinite_differences_are_told() -> None:
    one, other = CanaryAnalysis(CanaryPlan()), CanaryAnalysis(CanaryPlan())
    zeros, infinite = (array_content(np.full(2, value, np.float32)) for value in (0, np.inf))
    one.add(Measured(differences=compare([("y", zeros)], [("y", infinite)], 0.01)))
    told = one.values()
    other.add(msgspec.msgpack.decode(msgspec.msgpack.encode(one.drain()), type=Measured))
    assert other.values() == told
    assert told["max_rel"] == np.inf
    assert one.values()["compared"] == 0
