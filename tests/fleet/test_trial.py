"""Trials on the nodes of a fleet, step by step: begin, renewal, judgement, promotion, and deaths."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightswap_fleet import FleetRefused
from weightswap_fleet.coordinator import agreement
from weightswap_fleet.coordinator.agreement import shares
from weightswap_fleet.documents import FleetPlan, PrepareRequest
from weightswap_runtime import DigestMismatch, StageCancelled, StageClosed, Staged, StagingBusy, Unsupported
from weightswap_server.canary import Measured, Side
from weightswap_server.workers.trials import TrialMeasures

from .nodes import SOON, Died, Fleet, FleetTrial, NodeAgent, kinds, known_weights, serving_zero

NODES = 3


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with serving_zero(tmp_path, NODES, monkeypatch) as made:
        yield made


def begun(fleet: Fleet, number: int = 1, now: float = 100.0, **plan: Any) -> FleetTrial:
    """Begin a trial on all nodes, at second 100; the leader's clock stands still."""
    trial = FleetTrial(fleet.trial(number, **plan), fleet, lambda: now)
    trial.begin(5.0)
    return trial


def verdict(trial: FleetTrial) -> str | None:
    found = trial.poll()
    return found[0] if found is not None else None


def answered(fleet: Fleet, node: str, canary: int, errors: int = 0, word: int | None = None) -> None:
    """Send the measures of a replica: so many answers of the weights on trial, and as many of the served ones."""
    served = Side(canary, [0.001] * canary, [False] * canary)
    failed = [False] * (canary - errors) + [True] * errors
    measured = Measured(served, Side(canary, [0.001] * (canary - errors), failed))
    trial = fleet.trial_words()[node] if word is None else word
    text = msgspec.msgpack.encode(TrialMeasures("tiny", trial, measured))
    fleet.agents[node].add_measures(b64encode(text).decode())


def test_all_nodes_try_and_serve_what_they_served(fleet: Fleet) -> None:
    trial = begun(fleet, share=0.25)
    assert fleet.trying() == {fleet.weights_id(1)}
    assert fleet.all_serve(0)
    assert fleet.desired_store.read().revision == 1
    assert trial.shares == dict.fromkeys(fleet.names(), 0.25)
    assert all(fleet.trial_words().values())
    report = trial.report()
    assert (report.weights_id, report.by, report.outcome) == (fleet.weights_id(1), "ana", "")
    assert report.as_dict()["plan"]["share"] == 0.25


def test_one_that_a_node_cannot_take_is_tried_by_none(fleet: Fleet) -> None:
    with pytest.raises(FleetRefused) as refused:
        FleetTrial(fleet.trial(1, fleet.damaged(1)), fleet).begin(5.0)
    assert set(kinds(refused).values()) == {DigestMismatch}
    assert fleet.trying() == {""}
    fleet.lose("prepare_trial", node="n1")
    with pytest.raises(FleetRefused) as refused:
        begun(fleet, 2)
    assert kinds(refused) == {"n1": TimeoutError}
    assert fleet.trying() == {""}


def test_one_whose_nodes_lose_it_as_it_begins_has_not_begun(fleet: Fleet) -> None:
    def all_give_up() -> None:
        for agent in fleet.agents.values():
            agent.discard("trial 1")

    fleet.before("continue_trial", all_give_up)
    with pytest.raises(FleetRefused):
        begun(fleet)


def test_what_is_served_is_not_tried(fleet: Fleet) -> None:
    with pytest.raises(FleetRefused) as refused:
        begun(fleet, 0)
    assert set(kinds(refused).values()) == {Unsupported}


def test_a_second_trial_and_a_change_wait_for_the_first(fleet: Fleet) -> None:
    trial = begun(fleet)
    for change in (lambda: begun(fleet, 2), lambda: fleet.swap(2)):
        with pytest.raises(FleetRefused, match=r"is on trial by ana; promote or abort it first") as refused:
            change()
        assert set(kinds(refused).values()) == {StagingBusy}
    assert (fleet.trying(), trial.poll()) == ({fleet.weights_id(1)}, None)
    trial.end()
    assert fleet.trying() == {""}
    fleet.swap(2)
    assert fleet.all_serve(2)


def test_a_promotion_reads_no_file_again(fleet: Fleet) -> None:
    trial = begun(fleet)
    known = known_weights(fleet.file(1))
    fleet.file(1).rename(fleet.file(1).with_suffix(".away"))
    fleet.desired_store.set(fleet.file(0), revision=1)  # somebody else decides something that changes nothing
    receipt = fleet.agreement.swap(trial.request.source, known, "bo", "", SOON)
    assert {each.resident for each in receipt.nodes.values()} == {True}
    assert fleet.all_serve(1)
    assert fleet.trying() == {""}
    assert verdict(trial) == "ended"


def test_a_copy_of_what_is_on_trial_is_another_file(fleet: Fleet) -> None:
    """No node has read the copy: it may be damaged, and a later node would have to start with it."""
    begun(fleet)
    copy = fleet.damaged(1)
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(copy, "bo")
    assert set(kinds(refused).values()) == {StagingBusy}
    assert fleet.desired_store.read().revision == 1
    fleet.swap(1)
    assert fleet.all_serve(1)


def test_a_promotion_that_is_not_decided_leaves_the_trial(fleet: Fleet, agent: NodeAgent) -> None:
    trial = begun(fleet)
    fleet.lose("prepare", node="n2")
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(1)
    assert list(refused.value.reasons) == ["n2"]
    assert (fleet.trying(), trial.poll()) == ({fleet.weights_id(1)}, None)
    assert fleet.preparing() == {""}
    # its coordinator dies
    agent.prepare(PrepareRequest("left", 1, trial.request.source, trial.request.weights, 10.0))
    fleet.now += 11.0
    trial.poll()
    agent.reconcile()
    assert (agent.status().preparing, agent.status().trying) == ("", fleet.weights_id(1))


def test_a_rollback_ends_it(fleet: Fleet) -> None:
    fleet.swap(2)
    trial = begun(fleet)
    fleet.rollback()
    assert fleet.all_serve(0)
    assert fleet.trying() == {""}
    assert verdict(trial) == "ended"


@pytest.mark.parametrize("number", [1, 2], ids=["what is on trial", "something else"])
def test_the_desired_store_says_something_meanwhile(fleet: Fleet, number: int) -> None:
    """An operator writes to the desired store: weights on trial are served without a read if desired, else
    discarded."""
    begun(fleet)
    fleet.desired_store.set(fleet.file(number), revision=1)
    fleet.file(1).rename(fleet.file(1).with_suffix(".away"))
    for agent in fleet.agents.values():
        agent.reconcile()
        assert agent.status().revision == 2
    assert set(fleet.served().values()) == {fleet.desired_store.read().weights.weights_id}  # type: ignore[union-attr]
    assert fleet.trying() == {""}
    assert not any(fleet.trial_words().values())


def test_without_its_leader_it_runs_out(fleet: Fleet) -> None:
    trial = begun(fleet)
    fleet.now += 9.0
    assert trial.poll() is None
    fleet.now += 9.0
    fleet.reconcile()
    assert fleet.trying() == {fleet.weights_id(1)}
    fleet.now += 2.0
    fleet.reconcile()
    assert fleet.trying() == {""}
    fleet.swap(2)


def test_the_next_leader_finds_it(fleet: Fleet) -> None:
    assert FleetTrial.find(fleet) is None
    begun(fleet, share=0.5)
    fleet.agents["n2"].discard("trial 1")
    found = FleetTrial.find(fleet)
    assert found is not None
    assert (found.request.id, set(found.shares)) == ("trial 1", {"n0", "n1"})
    fleet.now += 9.0
    assert found.poll() is None
    assert found.shares == {"n0": 0.5, "n1": 0.5}
    fleet.now += 9.0
    fleet.agents["n0"].reconcile()
    assert fleet.agents["n0"].status().trying
    found.end()
    assert fleet.trying() == {""}


class Staging:
    """A node that stages a trial until `go`, while the trial's leader dies."""

    def __init__(self, fleet: Fleet, pool: ThreadPoolExecutor) -> None:
        self.agent = fleet.agents["n0"]
        self._wait = self.agent._changes._await
        self.agent._changes._await = self._wait_longer  # type: ignore[method-assign]
        self.go, began = threading.Event(), threading.Event()
        self._began = began
        self.prepared = pool.submit(self.agent.prepare_trial, fleet.trial(1, share=0.5))
        assert began.wait(120)

    def _wait_longer(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        self._began.set()
        while not self.go.wait(0.01):
            if not is_wanted():
                raise StageCancelled("the test's")
        self._wait(staged, is_wanted)


@pytest.fixture
def staging(fleet: Fleet) -> Iterator[Staging]:
    with ThreadPoolExecutor(1) as pool:
        made = Staging(fleet, pool)
        yield made
        made.go.set()


def test_one_whose_leader_dies_while_it_is_staged_is_given_up(fleet: Fleet, staging: Staging) -> None:
    fleet.now += 9.0
    assert staging.agent.renew("trial 1")
    fleet.now += 9.0
    time.sleep(0.1)
    assert not staging.prepared.done()
    fleet.now += 2.0
    assert isinstance(staging.prepared.exception(120), StageCancelled)
    assert fleet.trying() == {""}
    assert not staging.agent.renew("trial 1")


def test_the_next_leader_gives_up_what_no_node_has_begun(fleet: Fleet, staging: Staging) -> None:
    """It waits for none that stages: waiting calls would use up the agent's concurrency."""
    assert FleetTrial.find(fleet) is None
    fleet.now += 11.0
    assert isinstance(staging.prepared.exception(120), StageCancelled)
    assert fleet.trying() == {""}


def test_a_trial_that_one_node_has_not_verified_is_not_taken_over(fleet: Fleet) -> None:
    def die() -> None:
        raise Died

    fleet.before("prepare_trial", die, node="n2")
    with pytest.raises(Died):
        FleetTrial(fleet.trial(1, share=0.5), fleet).begin(5.0)
    fleet.lose("no message")
    assert FleetTrial.find(fleet) is None
    assert not any(fleet.trial_words().values())
    fleet.now += 11.0
    fleet.reconcile()
    assert fleet.trying() == {""}


def test_nodes_that_are_ready_wait_for_one_that_takes_longer_than_the_lease(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_RENEW", 0.01)
    stage, renewed = fleet.agents["n2"].model.stage, threading.Semaphore(0)

    def takes_long(*arguments, **options):  # type: ignore[no-untyped-def]
        for _ in range(3):
            fleet.now += 9.0
            while renewed.acquire(blocking=False):
                pass
            assert renewed.acquire(timeout=120)
            fleet.agents["n1"].reconcile()
        return stage(*arguments, **options)

    fleet.before("renew", renewed.release, node="n1")
    monkeypatch.setattr(fleet.agents["n2"].model, "stage", takes_long)
    assert begun(fleet, share=0.5).shares == dict.fromkeys(fleet.names(), 0.5)


def test_a_node_that_is_late_keeps_it_and_one_that_has_gone_does_not(fleet: Fleet) -> None:
    trial = begun(fleet, share=0.5)
    fleet.lose(node="n1")
    assert trial.poll() is None
    assert set(trial.shares) == {"n0", "n1", "n2"}
    fleet.gone.add("n1")
    assert trial.poll() is None
    assert set(trial.shares) == {"n0", "n2"}
    del fleet.agents["n0"]
    fleet.start("n0")  # the next agent knows of no trial
    assert trial.poll() is None
    assert set(trial.shares) == {"n2"}
    assert fleet.trial_words()["n0"] == 0


def test_what_all_nodes_measure_is_judged_together(fleet: Fleet) -> None:
    """No node has a hundred requests, and one node's errors alone would have ended it there."""
    trial = begun(fleet, share=0.5, promote_if="requests >= 100 and errors < 0.1", abort_if="errors >= 0.1")
    for node in fleet.names():
        answered(fleet, node, 33, errors=5 if node == "n1" else 0)
    assert trial.poll() is None
    assert trial.report().values["requests"] == 99
    assert trial.report().values["errors"] == pytest.approx(5 / 99)
    answered(fleet, "n0", 1, word=12345)  # of an earlier trial
    assert trial.poll() is None
    answered(fleet, "n0", 1)
    assert trial.poll() == ("promote", "requests >= 100 and errors < 0.1")
    answered(fleet, "n2", 20, errors=20)
    assert verdict(trial) == "abort"


def test_steps(fleet: Fleet) -> None:
    now = [100.0]
    request = fleet.trial(1, steps=(0.0, 0.2, 1.0), step_seconds=60.0)
    trial = FleetTrial(request, fleet, lambda: now[0])
    trial.begin(5.0)
    found = {}
    for second in (0, 59, 60, 119, 120, 179):
        now[0] = 100.0 + second
        assert trial.poll() is None
        found[second] = trial.shares["n0"]
    assert found == {0: 0.0, 59: 0.0, 60: 0.2, 119: 0.2, 120: 1.0, 179: 1.0}
    now[0] = 280.0
    assert trial.poll() == ("promote", "3 steps of 60 s")


def test_a_share_of_the_nodes(fleet: Fleet) -> None:
    trial = begun(fleet, share=0.34, of="nodes")
    assert trial.shares == {"n0": 1.0, "n1": 1.0, "n2": 0.0}
    fleet.agents["n0"].discard("trial 1")
    trial.poll()
    trial.poll()
    assert trial.shares == {"n1": 1.0, "n2": 0.0}


@pytest.mark.parametrize("plan", [{"share": 0.7}, {"steps": (0.3, 0.7, 1.0)}])
def test_a_share_of_the_nodes_that_would_be_all_is_refused(fleet: Fleet, plan: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=r"share=0\.7 of 3 nodes would be all"):
        begun(fleet, of="nodes", **plan)
    assert fleet.trying() == {""}


@pytest.mark.parametrize(
    ("share", "first"), [(0.0, 0), (0.1, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4), (0.1 + 0.2 + 0.2, 2)]
)
def test_how_many_nodes_a_share_is(share: float, first: int) -> None:
    assert list(shares("abcd", share, by_nodes=True).values()) == [1.0] * first + [0.0] * (4 - first)
    assert shares("ab", share, by_nodes=False) == {"a": share, "b": share}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"share": 1.5}, "share=1.5"),
        ({"share": float("nan")}, "share=nan"),
        ({"of": "replicas"}, "'nodes'"),
        ({"share": 0.1, "steps": (0.2,)}, "only one"),
        ({"steps": (0.2, 2.0)}, "from 0 to 1"),
        ({"steps": (0.2, float("nan"))}, "from 0 to 1"),
        ({"steps": (0.2,), "step_seconds": 0.0}, "seconds"),
        ({"steps": (0.2,), "step_seconds": float("inf")}, "seconds"),
        ({"promote_if": "nonsense > 1"}, "nonsense"),
        ({"abort_if": "errors >"}, "errors >"),
        *(({"tolerance": tolerance}, "tolerance=") for tolerance in (-0.1, float("nan"), float("inf"))),
    ],
)
def test_plans_that_cannot_be_meant(plan: dict[str, Any], said: str) -> None:
    with pytest.raises((Unsupported, ValueError), match=said):
        FleetPlan(**plan).check()


def test_going_on_with_what_is_over(fleet: Fleet, agent: NodeAgent) -> None:
    with pytest.raises(StageClosed):
        agent.continue_trial("trial 1", 0.1)
    agent.discard("trial 1")
    agent.add_measures(b64encode(b"late").decode())  # nobody's, and not read
    assert agent.trial() is None
