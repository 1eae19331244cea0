"""What a node's agent does with changes: prepared, committed or given up, while others stage, stall or are gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from weightswap_fleet import FleetRefused
from weightswap_fleet.documents import PrepareRequest
from weightswap_fleet.node import changes
from weightswap_runtime import RevisionConflict, StageCancelled, StageClosed, StagingBusy

from .nodes import Fleet, NodeAgent


def test_what_is_prepared_is_committed_or_given_up(fleet: Fleet, agent: NodeAgent) -> None:
    assert not agent.prepare(fleet.request(1)).resident
    with pytest.raises(StagingBusy):
        agent.prepare(fleet.request(2))
    assert agent.status().preparing == fleet.weights_id(1)
    agent.discard("another")
    assert agent.status().preparing
    agent.discard("change 1")
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))
    with pytest.raises(StageClosed):
        agent.commit("change 1", 2)
    agent.prepare(fleet.request(1)._replace(id="again"))
    _, generation = agent.commit("again", 2)
    assert (generation, agent.model.weights_id, agent.status().revision) == (1, fleet.weights_id(1), 2)


def staging_slowly(fleet: Fleet, rate: float = 40.0) -> threading.Event:
    """Make stagings take seconds on the first node. Returns an event that is set once weights are being staged."""
    began, agent = threading.Event(), fleet.agents["n0"]
    stage = agent.model.stage

    def slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        staged = stage(*arguments, rate_limit=rate, **options)
        began.set()
        return staged

    agent.model.stage = slowly  # type: ignore[method-assign]
    return began


def change_by(fleet: Fleet, slow: str) -> None:
    """Make a node stage number 2, by a change, a trial, or the desired store."""
    if slow == "a change":
        fleet.swap(2)
    elif slow == "a trial":
        fleet.agents["n0"].prepare_trial(fleet.trial(2))
    else:
        fleet.desired_store.set(fleet.file(2), revision=2)
        fleet.agents["n0"].reconcile()


@pytest.mark.parametrize("slow", ["a change", "a trial", "what the desired store says"])
@pytest.mark.sampled(1)
def test_a_rollback_waits_for_nothing_that_is_being_staged(fleet: Fleet, slow: str) -> None:
    fleet.swap(1)
    began = staging_slowly(fleet)
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change_by, fleet, slow)
        assert began.wait(120)
        receipt = fleet.rollback(fleet.weights_id(0))
        error = changing.exception(120)
    assert (receipt.weights_id, fleet.all_serve(0)) == (fleet.weights_id(0), True)
    refusals = (type(None),) if slow == "what the desired store says" else (FleetRefused, StageCancelled)
    assert isinstance(error, refusals)


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
    agent = fleet.agents["n0"]
    fleet.swap(1)
    fleet.attach(since=1.0, interval=0.01)
    agent.reconcile()
    began = staging_slowly(fleet, 15.0)
    with ThreadPoolExecutor(1) as pool:
        change = partial(agent.prepare, fleet.request(2)) if what == "a change" else partial(change_by, fleet, what)
        changing = pool.submit(change)
        assert began.wait(120)
        if event == "its coordinator died":
            fleet.now += 11.0
        else:
            getattr(fleet.desired_store, event)(revision=fleet.desired_store.read().revision)
        error = changing.exception(120)
    assert isinstance(error, type(None) if what == "what the desired store says" else StageCancelled)
    assert (agent.status().preparing, agent.status().trying) == ("", "")
    agent.reconcile()
    wanted = fleet.desired_store.read().weights
    assert wanted is not None
    assert agent.model.weights_id == wanted.weights_id


def test_a_replica_that_begins_waits_for_no_staging(fleet: Fleet, agent: NodeAgent) -> None:
    began, wanted = staging_slowly(fleet, 15.0), fleet.request(1)
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(agent.prepare, wanted)
        assert began.wait(120)
        fleet.attach(since=1.0)
        assert agent.spec.since == 1.0
        assert agent.status().preparing
        agent.discard(wanted.id)
        assert isinstance(preparing.exception(120), StageCancelled)


def steps(fleet: Fleet, what: str, number: int) -> tuple[Any, Any, Any]:
    """Return a change or a trial of a number, and what prepares it and gives it up on the first node."""
    agent = fleet.agents["n0"]
    if what == "a trial":
        return fleet.trial(number), agent.prepare_trial, agent.discard
    return fleet.request(number, what == "a rollback"), agent.prepare, agent.discard


@pytest.mark.parametrize("what", ["a change", "a rollback", "a trial"])
def test_what_comes_after_it_was_given_up_is_not_staged(fleet: Fleet, agent: NodeAgent, what: str) -> None:
    """Messages can overtake each other, and a stopped agent gets all of them at once."""
    wanted, prepare, give_up = steps(fleet, what, 2)
    give_up(wanted.id)
    if what == "a rollback":
        agent.prepare(fleet.request(1))
    with pytest.raises(StageCancelled):
        prepare(wanted)
    left = fleet.weights_id(1) if what == "a rollback" else ""  # which it does not end
    assert (agent.preparing, agent.trial()) == (left, None)
    agent.discard("change 1")
    assert fleet.swap(2).late == {}


@pytest.mark.parametrize("what", ["a change", "a trial"])
def test_what_is_given_up_while_its_file_is_opened_is_staged_no_further(fleet: Fleet, what: str) -> None:
    agent = fleet.agents["n0"]
    wanted, prepare, give_up = steps(fleet, what, 1)
    fleet.attach(since=1.0, interval=0.01)
    agent.reconcile()
    stage = agent.model.stage
    giving_up = threading.Thread(target=give_up, args=(wanted.id,))

    def opened_slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        giving_up.start()
        while wanted.id not in agent._changes._discarded:
            pass
        return stage(*arguments, rate_limit=15.0, **options)

    agent.model.stage = opened_slowly  # type: ignore[method-assign]
    with pytest.raises(StageCancelled):
        prepare(wanted)
    giving_up.join(120)
    assert (agent.preparing, agent.trial()) == ("", None)
    agent.model.stage = stage  # type: ignore[method-assign]
    assert not agent.prepare(fleet.request(2)).resident


@pytest.mark.parametrize("nodes", [["n0"], ["n0", "n1"]])
def test_a_rollback_waits_for_no_order_that_others_have_left(fleet: Fleet, nodes: list[str]) -> None:
    """Its coordinator has died, or waits for slow nodes; the change is then discarded."""
    fleet.swap(1)
    for name in nodes:
        fleet.agents[name].prepare(fleet.request(2))
    receipt = fleet.rollback()
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    for name in nodes:
        with pytest.raises(StageClosed):
            fleet.agents[name].commit("change 2", 3)


def test_a_rollback_undoes_no_order_that_was_decided(fleet: Fleet) -> None:
    """A node that has not got the commit yet makes it first."""
    fleet.swap(1)
    for agent in fleet.agents.values():
        agent.prepare(fleet.request(2))

    fleet.before("prepare", lambda: fleet.desired_store.set(fleet.file(2), revision=2), node="n0")
    with pytest.raises(RevisionConflict):
        fleet.rollback()
    assert fleet.all_serve(2)


def test_a_change_that_nobody_speaks_of_runs_out(fleet: Fleet, agent: NodeAgent) -> None:
    agent.prepare(fleet.request(1))
    agent.reconcile()
    assert agent.status().preparing
    fleet.now += 11.0
    agent.reconcile()
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))


def test_what_was_decided_is_done_without_a_word_and_without_reading_again(fleet: Fleet, agent: NodeAgent) -> None:
    agent.prepare(fleet.request(1))
    fleet.desired_store.set(fleet.file(1), revision=1)
    fleet.file(1).unlink()
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().revision) == (agent.status().weights_id, 2)
    assert fleet.desired_store.read().weights.weights_id == agent.model.weights_id  # type: ignore[union-attr]


def test_what_others_have_decided_is_not_the_order(fleet: Fleet, agent: NodeAgent) -> None:
    agent.prepare(fleet.request(1))
    fleet.desired_store.set(fleet.file(2), revision=1)
    fleet.commits.clear()
    agent.reconcile()
    assert fleet.commits == [(2, fleet.weights_id(2))]
    with pytest.raises(StageClosed):
        agent.commit("change 1", 2)
    assert agent.model.weights_id == fleet.weights_id(2)


def test_while_the_desired_store_is_away_a_change_stays_open_until_it_is_over(fleet: Fleet, agent: NodeAgent) -> None:
    away = fleet.where.with_name("away")
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
    agent = fleet.agents["n0"]
    answers = threading.Event()
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
    thread.join(120)
    status = agent.status()
    assert (status.reachable, status.error) == (True, "")
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 0.0' in agent.metrics()
    assert 'weightswap_fleet_revision{model="tiny"} 1.0' in agent.metrics()


@pytest.mark.parametrize("number", [0, 2])
def test_an_older_document_decides_on_no_change(fleet: Fleet, agent: NodeAgent, number: int) -> None:
    """Not even if it names the same weights: they were desired before, and are not yet again."""
    document = fleet.where / "desired.json"
    older = document.read_bytes()
    fleet.swap(1)
    newer = document.read_bytes()
    agent.prepare(fleet.request(number))
    document.write_bytes(older)
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().revision) == (fleet.weights_id(1), 2)
    assert agent.status().preparing == fleet.weights_id(number)
    document.write_bytes(newer)
    agent.reconcile()
    assert agent.commit(f"change {number}", 3)[1] == 2
    assert agent.model.weights_id == fleet.weights_id(number)


def test_a_node_whose_desired_store_never_answers_takes_part_in_changes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hanging read must not keep the turn, for which the changes of all nodes would wait."""
    agent = fleet.agents["n0"]
    answers = threading.Event()
    read = agent._desired_store._storage.read
    monkeypatch.setattr(changes, "_READ", 0.1)
    monkeypatch.setattr(agent._desired_store._storage, "read", lambda check: answers.wait() and read(check))
    with ThreadPoolExecutor(1) as pool:
        try:
            agent.reconcile()
            assert agent.status().error == f"{fleet.where}: a read of it has not ended within 0.1 s"
            assert pool.submit(fleet.swap, 1).result(60).late == {}
            assert pool.submit(fleet.rollback).result(60).late == {}
            assert not agent.status().reachable
        finally:
            answers.set()
        assert agent._desired_store._hanging is not None
        agent._desired_store._hanging.result(60)
        agent.reconcile()
    assert (agent.status().reachable, agent.status().error, agent.status().revision) == (True, "", 3)
    assert fleet.all_serve(0)


def test_a_rollback_reads_nothing_and_a_swap_reads_what_it_is_given(fleet: Fleet, agent: NodeAgent) -> None:
    fleet.swap(1)
    for number in (0, 1):
        fleet.file(number).rename(fleet.file(number).with_suffix(".away"))
    weights = fleet.desired_store.read().history[-1]
    assert agent.prepare(PrepareRequest("back", 2, weights.source, weights, 10.0, is_rollback=True)).resident
    assert agent.commit("back", 3)[1] == 2
    assert agent.model.weights_id == weights.weights_id
