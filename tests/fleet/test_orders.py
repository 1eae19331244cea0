"""What a node's keeper does with orders: prepared, committed or given up, while others stage, stall or are gone."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_fleet.documents import FleetPlan, Order, TrialOrder
from weightswap_fleet.errors import FleetRefused
from weightswap_runtime import RevisionConflict
from weightswap_runtime.errors import StageCancelled, StageClosed, StagingBusy

from .nodes import SOON, Fleet


def test_what_is_prepared_is_committed_or_given_up(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    assert not keeper.prepare(fleet.order(1)).resident
    with pytest.raises(StagingBusy, match=r"n0: has an open order by ana for \w+; try again"):
        keeper.prepare(fleet.order(2))
    assert keeper.status().preparing == fleet.weights_id(1)
    keeper.discard("another")
    assert keeper.status().preparing
    keeper.discard("order 1")
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))
    with pytest.raises(StageClosed, match="no longer prepared"):
        keeper.commit("order 1", 2)
    keeper.prepare(fleet.order(1)._replace(id="again"))
    done = keeper.commit("again", 2)
    assert (done.generation, keeper.model.weights_id, keeper.status().revision) == (1, fleet.weights_id(1), 2)


def staging_slowly(fleet: Fleet, rate: float = 40.0) -> threading.Event:
    """Make stagings take seconds on every node. Returns an event that is set once weights are being staged."""
    began = threading.Event()
    for keeper in fleet.keepers.values():
        stage = keeper.model.stage

        def slowly(*arguments, stage=stage, **options):  # type: ignore[no-untyped-def]
            staged = stage(*arguments, rate_limit=rate, **options)
            began.set()
            return staged

        keeper.model.stage = slowly  # type: ignore[method-assign]
    return began


def change_by(fleet: Fleet, slow: str) -> None:
    """Make a node stage number 2, by an order, a trial, or the place."""
    wanted = fleet.order(2)
    if slow == "an order":
        fleet.swap(2)
    elif slow == "a trial":
        fleet.keepers["n0"].prepare_trial(TrialOrder("t", wanted.source, wanted.weights, FleetPlan()))
    else:
        fleet.place.set(fleet.file(2), revision=2)
        fleet.keepers["n0"].reconcile()


@pytest.mark.parametrize("slow", ["an order", "a trial", "what the place says"])
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
    receipt = Agreement(fleet.place, fleet).rollback(fleet.weights_id(0), "bo", "", False, SOON)
    thread.join(30)
    assert not thread.is_alive()
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    assert len(errors) == (slow != "what the place says")


@pytest.mark.parametrize(
    ("what", "event"),
    [
        ("an order", "its coordinator died"),
        ("an order", "hold"),
        ("an order", "rollback"),
        ("a trial", "rollback"),
        ("what the place says", "rollback"),
    ],
)
@pytest.mark.sampled(1)
def test_what_nobody_wants_any_more_is_staged_no_further(fleet: Fleet, what: str, event: str) -> None:
    fleet.swap(1)
    keeper = fleet.keepers["n0"]
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    keeper.reconcile()
    began = staging_slowly(fleet, 15.0)
    ended: list[BaseException | None] = []

    def change() -> None:
        try:
            keeper.prepare(fleet.order(2)) if what == "an order" else change_by(fleet, what)
            ended.append(None)
        except StageCancelled as error:
            ended.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    assert began.wait(30)
    if event == "its coordinator died":
        fleet.now += 11.0
    else:
        getattr(fleet.place, event)(revision=fleet.place.read().revision)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in ended] == [type(None) if what == "what the place says" else StageCancelled]
    assert (keeper.status().preparing, keeper.status().trying) == ("", "")
    keeper.reconcile()
    wanted = fleet.place.read().weights
    assert wanted is not None
    assert keeper.model.weights_id == wanted.weights_id


def test_a_replica_that_begins_waits_for_no_staging(fleet: Fleet) -> None:
    keeper, began = fleet.keepers["n0"], staging_slowly(fleet, 15.0)
    wanted = fleet.order(1)

    def prepare() -> None:
        with pytest.raises(StageCancelled):
            keeper.prepare(wanted)

    thread = threading.Thread(target=prepare)
    thread.start()
    assert began.wait(30)
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0))
    assert keeper.spec.since == 1.0
    assert keeper.status().preparing
    keeper.discard(wanted.id)
    thread.join(60)
    assert not thread.is_alive()


def trial(wanted: Order) -> TrialOrder:
    return TrialOrder(wanted.id, wanted.source, wanted.weights, FleetPlan())


@pytest.mark.parametrize("is_rollback", [False, True], ids=["an order", "a rollback"])
def test_an_order_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet, is_rollback: bool) -> None:
    """Messages can overtake each other, and a stopped keeper gets all of them at once."""
    keeper, wanted = fleet.keepers["n0"], fleet.order(2, is_rollback)
    keeper.discard(wanted.id)
    if is_rollback:
        keeper.prepare(fleet.order(1))
    with pytest.raises(StageCancelled, match=r"n0: \w+ was discarded"):
        keeper.prepare(wanted)
    assert keeper.preparing == (fleet.weights_id(1) if is_rollback else "")  # which it does not end
    keeper.discard("order 1")
    assert fleet.swap(2).late == {}


def test_a_trial_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet) -> None:
    keeper, wanted = fleet.keepers["n0"], fleet.order(2)
    keeper.end_trial(wanted.id)
    with pytest.raises(StageCancelled, match=r"n0: \w+ was discarded"):
        keeper.prepare_trial(trial(wanted))
    assert keeper.trial() is None
    assert fleet.swap(1).late == {}


@pytest.mark.parametrize("what", ["an order", "a trial"])
def test_what_is_given_up_while_its_file_is_opened_is_staged_no_further(fleet: Fleet, what: str) -> None:
    keeper, wanted = fleet.keepers["n0"], fleet.order(1)
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    keeper.reconcile()
    stage = keeper.model.stage
    giving_up = threading.Thread(target=keeper.discard if what == "an order" else keeper.end_trial, args=(wanted.id,))

    def opened_slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        giving_up.start()
        while wanted.id not in keeper._changes._discarded:
            pass
        return stage(*arguments, rate_limit=15.0, **options)

    keeper.model.stage = opened_slowly  # type: ignore[method-assign]
    prepare = partial(keeper.prepare, wanted) if what == "an order" else partial(keeper.prepare_trial, trial(wanted))
    with pytest.raises(StageCancelled):
        prepare()
    giving_up.join(60)
    assert (keeper.preparing, keeper.trial()) == ("", None)
    keeper.model.stage = stage  # type: ignore[method-assign]
    assert not keeper.prepare(fleet.order(2)).resident


@pytest.mark.parametrize("nodes", [["n0"], ["n0", "n1"]])
def test_a_rollback_waits_for_no_order_that_others_have_left(fleet: Fleet, nodes: list[str]) -> None:
    """Its coordinator has died, or waits for slow nodes; the order is then discarded."""
    fleet.swap(1)
    for name in nodes:
        fleet.keepers[name].prepare(fleet.order(2))
    receipt = Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON)
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    for name in nodes:
        with pytest.raises(StageClosed):
            fleet.keepers[name].commit("order 2", 3)


def test_a_rollback_undoes_no_order_that_was_decided(fleet: Fleet) -> None:
    """A node that has not got the commit yet makes it first."""
    fleet.swap(1)
    for keeper in fleet.keepers.values():
        keeper.prepare(fleet.order(2))

    def decided_meanwhile(method: str, node: str) -> str:
        if (method, node) == ("prepare", "n0"):
            fleet.place.set(fleet.file(2), revision=2)
        return ""

    fleet.fate = decided_meanwhile
    with pytest.raises(RevisionConflict):
        Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON)
    assert set(fleet.served().values()) == {fleet.weights_id(2)}


def test_an_order_that_nobody_speaks_of_runs_out(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    keeper.prepare(fleet.order(1))
    keeper.reconcile()
    assert keeper.status().preparing
    fleet.now += 11.0
    keeper.reconcile()
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))


def test_what_was_decided_is_done_without_a_word_and_without_reading_again(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    keeper.prepare(fleet.order(1))
    fleet.place.set(fleet.file(1), revision=1)
    fleet.file(1).unlink()
    keeper.reconcile()
    assert (keeper.model.weights_id, keeper.status().revision) == (keeper.status().weights_id, 2)
    assert fleet.place.read().weights.weights_id == keeper.model.weights_id  # type: ignore[union-attr]


def test_what_others_have_decided_is_not_the_order(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    keeper.prepare(fleet.order(1))
    fleet.place.set(fleet.file(2), revision=1)
    fleet.commits.clear()
    keeper.reconcile()
    assert fleet.commits == [(2, fleet.weights_id(2))]
    with pytest.raises(StageClosed):
        keeper.commit("order 1", 2)
    assert keeper.model.weights_id == fleet.weights_id(2)


def test_while_the_place_is_away_an_order_stays_open_until_it_is_over(fleet: Fleet) -> None:
    keeper, away = fleet.keepers["n0"], fleet.where.with_name("away")
    keeper.prepare(fleet.order(1))
    fleet.where.rename(away)
    keeper.reconcile()
    assert keeper.status().preparing
    keeper.commit("order 1", 2)  # whoever says so has seen it written
    assert keeper.model.weights_id == fleet.weights_id(1)
    keeper.reconcile()
    assert (keeper.status().reachable, keeper.model.weights_id) == (False, fleet.weights_id(1))
    away.rename(fleet.where)


def test_a_place_that_never_answers_is_told_of(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may hang so: the look hangs, and the node goes on serving."""
    keeper, answers = fleet.keepers["n0"], threading.Event()
    read = keeper._place._storage.read
    monkeypatch.setattr(keeper._place._storage, "read", lambda check: answers.wait() and read(check))
    thread = threading.Thread(target=keeper.reconcile)
    thread.start()
    fleet.now += 30.0
    assert (keeper.status().reachable, keeper.status().error) == (True, "")
    fleet.now += 1.0
    status = keeper.status()
    assert (status.reachable, status.error) == (False, f"{fleet.where}: has not been read for more than 30 s")
    assert status.weights_id == fleet.weights_id(0)
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 31.0' in keeper.metrics()
    answers.set()
    thread.join(60)
    status = keeper.status()
    assert (status.reachable, status.error) == (True, "")
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 0.0' in keeper.metrics()
    assert 'weightswap_fleet_revision{model="tiny"} 1.0' in keeper.metrics()


def test_a_rollback_reads_nothing_and_a_swap_reads_what_it_is_given(fleet: Fleet) -> None:
    fleet.swap(1)
    for number in (0, 1):
        fleet.file(number).rename(fleet.file(number).with_suffix(".away"))
    keeper = fleet.keepers["n0"]
    weights = fleet.place.read().history[-1]
    assert keeper.prepare(Order("back", 2, weights.source, weights, 10.0, is_rollback=True)).resident
    assert keeper.commit("back", 3).generation == 2
    assert keeper.model.weights_id == weights.weights_id
