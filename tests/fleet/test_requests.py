"""What a node's agent does with changes: prepared, committed or given up, while others stage, stall or are gone."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_fleet.documents import FleetPlan, PrepareRequest, TrialRequest
from weightswap_fleet.errors import FleetRefused
from weightswap_runtime import RevisionConflict
from weightswap_runtime.errors import StageCancelled, StageClosed, StagingBusy

from .nodes import SOON, Fleet


def test_what_is_prepared_is_committed_or_given_up(fleet: Fleet) -> None:
    agent = fleet.agents["n0"]
    assert not agent.prepare(fleet.request(1)).resident
    with pytest.raises(StagingBusy, match=r"n0: has an open change by ana for \w+; try again"):
        agent.prepare(fleet.request(2))
    assert agent.status().preparing == fleet.weights_id(1)
    agent.discard("another")
    assert agent.status().preparing
    agent.discard("change 1")
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))
    with pytest.raises(StageClosed, match="no longer prepared"):
        agent.commit("change 1", 2)
    agent.prepare(fleet.request(1)._replace(id="again"))
    done = agent.commit("again", 2)
    assert (done.generation, agent.model.weights_id, agent.status().revision) == (1, fleet.weights_id(1), 2)


def staging_slowly(fleet: Fleet, rate: float = 40.0) -> threading.Event:
    """Make stagings take seconds on every node. Returns an event that is set once weights are being staged."""
    began = threading.Event()
    for agent in fleet.agents.values():
        stage = agent.model.stage

        def slowly(*arguments, stage=stage, **options):  # type: ignore[no-untyped-def]
            staged = stage(*arguments, rate_limit=rate, **options)
            began.set()
            return staged

        agent.model.stage = slowly  # type: ignore[method-assign]
    return began


def change_by(fleet: Fleet, slow: str) -> None:
    """Make a node stage number 2, by a change, a trial, or the desired store."""
    wanted = fleet.request(2)
    if slow == "a change":
        fleet.swap(2)
    elif slow == "a trial":
        fleet.agents["n0"].prepare_trial(TrialRequest("t", wanted.source, wanted.weights, FleetPlan()))
    else:
        fleet.desired_store.set(fleet.file(2), revision=2)
        fleet.agents["n0"].reconcile()


@pytest.mark.parametrize("slow", ["a change", "a trial", "what the desired store says"])
@pytest.mark.sampled(1)
def test_a_rollback_waits_for_nothing_that_is_being_staged(fleet: Fleet, slow: str) -> None:
    fleet.swap(1)
    began = staging_slowly(fleet)
    errors: list[Exception] = []

    def change() -> None:
        try:
            change_by(fleet, slow)
        except (FleetRefused, StageCancelled) as error:
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    assert began.wait(30)
    receipt = Agreement(fleet.desired_store, fleet).rollback(fleet.weights_id(0), "bo", "", False, SOON)
    thread.join(30)
    assert not thread.is_alive()
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    assert len(errors) == (slow != "what the desired store says")


@pytest.mark.parametrize(
    ("what", "event"),
    [
        ("a change", "its coordinator died"),
        ("a change", "hold"),
        ("a change", "rollback"),
        ("a trial", "rollback"),
        ("what the desired store says", "rollback"),
    ],
)
@pytest.mark.sampled(1)
def test_what_nobody_wants_any_more_is_staged_no_further(fleet: Fleet, what: str, event: str) -> None:
    fleet.swap(1)
    agent = fleet.agents["n0"]
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    agent.reconcile()
    began = staging_slowly(fleet, 15.0)
    ended: list[BaseException | None] = []

    def change() -> None:
        try:
            agent.prepare(fleet.request(2)) if what == "a change" else change_by(fleet, what)
            ended.append(None)
        except StageCancelled as error:
            ended.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    assert began.wait(30)
    if event == "its coordinator died":
        fleet.now += 11.0
    else:
        getattr(fleet.desired_store, event)(revision=fleet.desired_store.read().revision)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in ended] == [type(None) if what == "what the desired store says" else StageCancelled]
    assert (agent.status().preparing, agent.status().trying) == ("", "")
    agent.reconcile()
    wanted = fleet.desired_store.read().weights
    assert wanted is not None
    assert agent.model.weights_id == wanted.weights_id


def test_a_replica_that_begins_waits_for_no_staging(fleet: Fleet) -> None:
    agent, began = fleet.agents["n0"], staging_slowly(fleet, 15.0)
    wanted = fleet.request(1)

    def prepare() -> None:
        with pytest.raises(StageCancelled):
            agent.prepare(wanted)

    thread = threading.Thread(target=prepare)
    thread.start()
    assert began.wait(30)
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0))
    assert agent.spec.since == 1.0
    assert agent.status().preparing
    agent.discard(wanted.id)
    thread.join(60)
    assert not thread.is_alive()


def trial(wanted: PrepareRequest) -> TrialRequest:
    return TrialRequest(wanted.id, wanted.source, wanted.weights, FleetPlan())


@pytest.mark.parametrize("is_rollback", [False, True], ids=["a change", "a rollback"])
def test_a_change_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet, is_rollback: bool) -> None:
    """Messages can overtake each other, and a stopped agent gets all of them at once."""
    agent, wanted = fleet.agents["n0"], fleet.request(2, is_rollback)
    agent.discard(wanted.id)
    if is_rollback:
        agent.prepare(fleet.request(1))
    with pytest.raises(StageCancelled, match=r"n0: \w+ was discarded"):
        agent.prepare(wanted)
    assert agent.preparing == (fleet.weights_id(1) if is_rollback else "")  # which it does not end
    agent.discard("change 1")
    assert fleet.swap(2).late == {}


def test_a_trial_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet) -> None:
    agent, wanted = fleet.agents["n0"], fleet.request(2)
    agent.end_trial(wanted.id)
    with pytest.raises(StageCancelled, match=r"n0: \w+ was discarded"):
        agent.prepare_trial(trial(wanted))
    assert agent.trial() is None
    assert fleet.swap(1).late == {}


@pytest.mark.parametrize("what", ["a change", "a trial"])
def test_what_is_given_up_while_its_file_is_opened_is_staged_no_further(fleet: Fleet, what: str) -> None:
    agent, wanted = fleet.agents["n0"], fleet.request(1)
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    agent.reconcile()
    stage = agent.model.stage
    giving_up = threading.Thread(target=agent.discard if what == "a change" else agent.end_trial, args=(wanted.id,))

    def opened_slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        giving_up.start()
        while wanted.id not in agent._changes._discarded:
            pass
        return stage(*arguments, rate_limit=15.0, **options)

    agent.model.stage = opened_slowly  # type: ignore[method-assign]
    prepare = partial(agent.prepare, wanted) if what == "a change" else partial(agent.prepare_trial, trial(wanted))
    with pytest.raises(StageCancelled):
        prepare()
    giving_up.join(60)
    assert (agent.preparing, agent.trial()) == ("", None)
    agent.model.stage = stage  # type: ignore[method-assign]
    assert not agent.prepare(fleet.request(2)).resident


@pytest.mark.parametrize("nodes", [["n0"], ["n0", "n1"]])
def test_a_rollback_waits_for_no_order_that_others_have_left(fleet: Fleet, nodes: list[str]) -> None:
    """Its coordinator has died, or waits for slow nodes; the change is then discarded."""
    fleet.swap(1)
    for name in nodes:
        fleet.agents[name].prepare(fleet.request(2))
    receipt = Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", False, SOON)
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    for name in nodes:
        with pytest.raises(StageClosed):
            fleet.agents[name].commit("change 2", 3)


def test_a_rollback_undoes_no_order_that_was_decided(fleet: Fleet) -> None:
    """A node that has not got the commit yet makes it first."""
    fleet.swap(1)
    for agent in fleet.agents.values():
        agent.prepare(fleet.request(2))

    def decided_meanwhile(method: str, node: str) -> str:
        if (method, node) == ("prepare", "n0"):
            fleet.desired_store.set(fleet.file(2), revision=2)
        return ""

    fleet.fate = decided_meanwhile
    with pytest.raises(RevisionConflict):
        Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", False, SOON)
    assert set(fleet.served().values()) == {fleet.weights_id(2)}


def test_a_change_that_nobody_speaks_of_runs_out(fleet: Fleet) -> None:
    agent = fleet.agents["n0"]
    agent.prepare(fleet.request(1))
    agent.reconcile()
    assert agent.status().preparing
    fleet.now += 11.0
    agent.reconcile()
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))


def test_what_was_decided_is_done_without_a_word_and_without_reading_again(fleet: Fleet) -> None:
    agent = fleet.agents["n0"]
    agent.prepare(fleet.request(1))
    fleet.desired_store.set(fleet.file(1), revision=1)
    fleet.file(1).unlink()
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().revision) == (agent.status().weights_id, 2)
    assert fleet.desired_store.read().weights.weights_id == agent.model.weights_id  # type: ignore[union-attr]


def test_what_others_have_decided_is_not_the_order(fleet: Fleet) -> None:
    agent = fleet.agents["n0"]
    agent.prepare(fleet.request(1))
    fleet.desired_store.set(fleet.file(2), revision=1)
    fleet.commits.clear()
    agent.reconcile()
    assert fleet.commits == [(2, fleet.weights_id(2))]
    with pytest.raises(StageClosed):
        agent.commit("change 1", 2)
    assert agent.model.weights_id == fleet.weights_id(2)


def test_while_the_desired_store_is_away_a_change_stays_open_until_it_is_over(fleet: Fleet) -> None:
    agent, away = fleet.agents["n0"], fleet.where.with_name("away")
    agent.prepare(fleet.request(1))
    fleet.where.rename(away)
    agent.reconcile()
    assert agent.status().preparing
    agent.commit("change 1", 2)  # whoever says so has seen it written
    assert agent.model.weights_id == fleet.weights_id(1)
    agent.reconcile()
    assert (agent.status().reachable, agent.model.weights_id) == (False, fleet.weights_id(1))
    away.rename(fleet.where)


def test_a_desired_store_that_never_answers_is_told_of(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may hang so: the look hangs, and the node goes on serving."""
    agent, answers = fleet.agents["n0"], threading.Event()
    read = agent._desired_store._storage.read
    monkeypatch.setattr(agent._desired_store._storage, "read", lambda check: answers.wait() and read(check))
    thread = threading.Thread(target=agent.reconcile)
    thread.start()
    fleet.now += 30.0
    assert (agent.status().reachable, agent.status().error) == (True, "")
    fleet.now += 1.0
    status = agent.status()
    assert (status.reachable, status.error) == (False, f"{fleet.where}: has not been read for more than 30 s")
    assert status.weights_id == fleet.weights_id(0)
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 31.0' in agent.metrics()
    answers.set()
    thread.join(60)
    status = agent.status()
    assert (status.reachable, status.error) == (True, "")
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 0.0' in agent.metrics()
    assert 'weightswap_fleet_revision{model="tiny"} 1.0' in agent.metrics()


def test_a_rollback_reads_nothing_and_a_swap_reads_what_it_is_given(fleet: Fleet) -> None:
    fleet.swap(1)
    for number in (0, 1):
        fleet.file(number).rename(fleet.file(number).with_suffix(".away"))
    agent = fleet.agents["n0"]
    weights = fleet.desired_store.read().history[-1]
    assert agent.prepare(PrepareRequest("back", 2, weights.source, weights, 10.0, is_rollback=True)).resident
    assert agent.commit("back", 3).generation == 2
    assert agent.model.weights_id == weights.weights_id
