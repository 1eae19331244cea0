"""A node's keeper, and how all of them agree, step by step."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from weightswap_fleet.coordinator import agreement
from weightswap_fleet.coordinator.agreement import Agreement, Deadlines
from weightswap_fleet.documents import FleetPlan, Order, Spec, TrialOrder
from weightswap_fleet.errors import FleetError, FleetRefused, FleetUndecided, StaleReplica, UnknownFleet
from weightswap_fleet.node.keeper import NodeKeeper
from weightswap_runtime import (
    BaseMismatch,
    DesiredError,
    DigestMismatch,
    Held,
    NothingToRollBack,
    RevisionConflict,
    Superseded,
    write_delta,
)
from weightswap_runtime.desired.document import DesiredWeights
from weightswap_runtime.desired.place import known_weights
from weightswap_runtime.errors import NonFiniteWeights, NoWeights, StageCancelled, StageClosed, StagingBusy, Unsupported
from weightswap_runtime.sources.local import LocalFile
from weightswap_server.signed_weights import SignatureRefused, sign

from .nodes import Fleet

SOON = Deadlines(prepare=5.0, commit=0.2)


def order(fleet: Fleet, number: int, proven: bool = False) -> Order:
    path = fleet.file(number)
    weights = DesiredWeights(source=str(path), weights_id=fleet.weights_id(number), since=0.0, by="ana")
    return Order(f"order {number}", fleet.place.read().revision, str(path), weights, 10.0, proven)


def swap(fleet: Fleet, number: int, path: Path | None = None):  # type: ignore[no-untyped-def]
    path = path or fleet.file(number)
    return Agreement(fleet.place, fleet).swap(str(path), known_weights(path), "ana", "", SOON)


def test_what_is_prepared_is_committed_or_given_up(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    assert not keeper.changes.prepare(order(fleet, 1)).resident
    with pytest.raises(StagingBusy, match=r"n0: has an order by ana open, for \w+; try again"):
        keeper.changes.prepare(order(fleet, 2))
    assert keeper.status().preparing == keeper_wants(fleet, 1)
    keeper.changes.discard("another")
    assert keeper.status().preparing
    keeper.changes.discard("order 1")
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))
    with pytest.raises(StageClosed, match="not prepared any more"):
        keeper.changes.commit("order 1", 2)
    keeper.changes.prepare(order(fleet, 1)._replace(id="again"))
    done = keeper.changes.commit("again", 2)
    assert (done.generation, keeper.model.weights_id, keeper.status().revision) == (1, fleet.weights_id(1), 2)


def keeper_wants(fleet: Fleet, number: int) -> str:
    return fleet.weights_id(number)


def test_nan_is_refused_unless_the_deployment_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    """In orders, in what the place says, and in what is tried first."""
    values = fleet.tiny.values(1)
    values["weight"][0, 0] = float("nan")
    path = fleet.tiny.write(tmp_path / "nan.safetensors", values)
    with pytest.raises(FleetRefused) as refused:
        swap(fleet, 1, path)
    assert {type(error) for error in refused.value.reasons.values()} == {NonFiniteWeights}
    fleet.place.set(path, revision=1)
    keeper = fleet.keepers["n0"]
    keeper.changes.look()
    assert "weight: 1 NaN" in keeper.status().error
    assert set(fleet.served().values()) == {fleet.weights_id(0)}
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, allow_nonfinite=("weight",)))
    fleet.place.set(fleet.file(0), revision=2)
    fleet.place.set(path, revision=3)
    keeper.changes.look()
    assert keeper.status().revision == 4


def staging_slowly(fleet: Fleet, rate: float = 40.0) -> threading.Event:
    """From now on it takes seconds on every node, for 92 bytes. Set once something is being staged."""
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
    """Something that has a node stage number 2."""
    wanted = order(fleet, 2)
    if slow == "an order":
        swap(fleet, 2)
    elif slow == "a trial":
        fleet.keepers["n0"].changes.prepare_trial(TrialOrder("t", wanted.source, wanted.weights, FleetPlan()))
    else:
        fleet.place.set(fleet.file(2), revision=2)
        fleet.keepers["n0"].changes.look()


@pytest.mark.parametrize("slow", ["an order", "a trial", "what the place says"])
@pytest.mark.sampled(1)
def test_a_rollback_waits_for_nothing_that_is_being_staged(fleet: Fleet, slow: str) -> None:
    swap(fleet, 1)
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
    swap(fleet, 1)
    keeper = fleet.keepers["n0"]
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    keeper.changes.look()
    began = staging_slowly(fleet, 15.0)
    ended: list[BaseException | None] = []

    def change() -> None:
        try:
            keeper.changes.prepare(order(fleet, 2)) if what == "an order" else change_by(fleet, what)
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
    keeper.changes.look()
    wanted = fleet.place.read().weights
    assert wanted is not None
    assert keeper.model.weights_id == wanted.weights_id


def test_a_replica_that_begins_waits_for_no_staging(fleet: Fleet) -> None:
    keeper, began = fleet.keepers["n0"], staging_slowly(fleet, 15.0)
    wanted = order(fleet, 1)

    def prepare() -> None:
        with pytest.raises(StageCancelled):
            keeper.changes.prepare(wanted)

    thread = threading.Thread(target=prepare)
    thread.start()
    assert began.wait(30)
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0))
    assert keeper.spec.since == 1.0
    assert keeper.status().preparing
    keeper.changes.discard(wanted.id)
    thread.join(60)
    assert not thread.is_alive()


def trial(wanted: Order) -> TrialOrder:
    return TrialOrder(wanted.id, wanted.source, wanted.weights, FleetPlan())


@pytest.mark.parametrize("proven", [False, True], ids=["an order", "a rollback"])
def test_an_order_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet, proven: bool) -> None:
    """Messages overtake each other, and a keeper that was stopped gets all of them at once."""
    changes, wanted = fleet.keepers["n0"].changes, order(fleet, 2, proven)
    changes.discard(wanted.id)
    if proven:
        changes.prepare(order(fleet, 1))
    with pytest.raises(StageCancelled, match=r"n0: \w+ was given up"):
        changes.prepare(wanted)
    assert changes.preparing == (fleet.weights_id(1) if proven else "")  # which it does not end
    changes.discard("order 1")
    assert swap(fleet, 2).late == {}


def test_a_trial_that_comes_after_it_was_given_up_is_not_staged(fleet: Fleet) -> None:
    changes, wanted = fleet.keepers["n0"].changes, order(fleet, 2)
    changes.end_trial(wanted.id)
    with pytest.raises(StageCancelled, match=r"n0: \w+ was given up"):
        changes.prepare_trial(trial(wanted))
    assert changes.trial() is None
    assert swap(fleet, 1).late == {}


@pytest.mark.parametrize("what", ["an order", "a trial"])
def test_what_is_given_up_while_its_file_is_opened_is_staged_no_further(fleet: Fleet, what: str) -> None:
    keeper, wanted = fleet.keepers["n0"], order(fleet, 1)
    changes = keeper.changes
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, interval=0.01))
    keeper.changes.look()
    stage = keeper.model.stage
    giving_up = threading.Thread(target=changes.discard if what == "an order" else changes.end_trial, args=(wanted.id,))

    def opened_slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        giving_up.start()
        while wanted.id not in changes._given_up:
            pass
        return stage(*arguments, rate_limit=15.0, **options)

    keeper.model.stage = opened_slowly  # type: ignore[method-assign]
    prepare = partial(changes.prepare, wanted) if what == "an order" else partial(changes.prepare_trial, trial(wanted))
    with pytest.raises(StageCancelled):
        prepare()
    giving_up.join(60)
    assert (changes.preparing, changes.trial()) == ("", None)
    keeper.model.stage = stage  # type: ignore[method-assign]
    assert not changes.prepare(order(fleet, 2)).resident


@pytest.mark.parametrize("nodes", [["n0"], ["n0", "n1"]])
def test_a_rollback_waits_for_no_order_that_others_have_left(fleet: Fleet, nodes: list[str]) -> None:
    """Whoever gave it has died, or waits for nodes that take long; then it does not happen."""
    swap(fleet, 1)
    for name in nodes:
        fleet.keepers[name].changes.prepare(order(fleet, 2))
    receipt = Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON)
    assert set(fleet.served().values()) == {receipt.weights_id} == {fleet.weights_id(0)}
    for name in nodes:
        with pytest.raises(StageClosed):
            fleet.keepers[name].changes.commit("order 2", 3)


def test_a_rollback_undoes_no_order_that_was_decided(fleet: Fleet) -> None:
    """A node that has not heard of it yet commits it first."""
    swap(fleet, 1)
    for keeper in fleet.keepers.values():
        keeper.changes.prepare(order(fleet, 2))

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
    keeper.changes.prepare(order(fleet, 1))
    keeper.changes.look()
    assert keeper.status().preparing
    fleet.now += 11.0
    keeper.changes.look()
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))


def test_what_was_decided_is_done_without_a_word_and_without_reading_again(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    keeper.changes.prepare(order(fleet, 1))
    fleet.place.set(fleet.file(1), revision=1)
    fleet.file(1).unlink()
    keeper.changes.look()
    assert (keeper.model.weights_id, keeper.status().revision) == (keeper.status().weights_id, 2)
    assert fleet.place.read().weights.weights_id == keeper.model.weights_id  # type: ignore[union-attr]


def test_what_others_have_decided_is_not_the_order(fleet: Fleet) -> None:
    keeper = fleet.keepers["n0"]
    keeper.changes.prepare(order(fleet, 1))
    fleet.place.set(fleet.file(2), revision=1)
    fleet.commits.clear()
    keeper.changes.look()
    assert fleet.commits == [(2, fleet.weights_id(2))]
    with pytest.raises(StageClosed):
        keeper.changes.commit("order 1", 2)
    assert keeper.model.weights_id == fleet.weights_id(2)


def test_while_the_place_is_away_an_order_stays_open_until_it_is_over(fleet: Fleet) -> None:
    keeper, away = fleet.keepers["n0"], fleet.where.with_name("away")
    keeper.changes.prepare(order(fleet, 1))
    fleet.where.rename(away)
    keeper.changes.look()
    assert keeper.status().preparing
    keeper.changes.commit("order 1", 2)  # whoever says so has seen it written
    assert keeper.model.weights_id == fleet.weights_id(1)
    keeper.changes.look()
    assert (keeper.status().reachable, keeper.model.weights_id) == (False, fleet.weights_id(1))
    away.rename(fleet.where)


def test_a_place_that_never_answers_is_told_of(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system may that is mounted over a network: the look at it hangs, and the node serves on."""
    keeper, answers = fleet.keepers["n0"], threading.Event()
    read = keeper._place._storage.read
    monkeypatch.setattr(keeper._place._storage, "read", lambda check: answers.wait() and read(check))
    thread = threading.Thread(target=keeper.changes.look)
    thread.start()
    fleet.now += 30.0
    assert (keeper.status().reachable, keeper.status().error) == (True, "")
    fleet.now += 1.0
    status = keeper.status()
    assert (status.reachable, status.error) == (False, f"{fleet.where}: was not read for more than 30 s")
    assert status.weights_id == fleet.weights_id(0)
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 31.0' in keeper.metrics()
    answers.set()
    thread.join(60)
    status = keeper.status()
    assert (status.reachable, status.error) == (True, "")
    assert 'weightswap_fleet_unread_seconds{model="tiny"} 0.0' in keeper.metrics()
    assert 'weightswap_fleet_revision{model="tiny"} 1.0' in keeper.metrics()


def test_a_rollback_reads_nothing_and_a_swap_reads_what_it_is_given(fleet: Fleet) -> None:
    swap(fleet, 1)
    for number in (0, 1):
        fleet.file(number).rename(fleet.file(number).with_suffix(".away"))
    keeper = fleet.keepers["n0"]
    weights = fleet.place.read().history[-1]
    assert keeper.changes.prepare(Order("back", 2, weights.source, weights, 10.0, proven=True)).resident
    assert keeper.changes.commit("back", 3).generation == 2
    assert keeper.model.weights_id == weights.weights_id


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes were read of each file."""
    found: dict[str, int] = {}
    read_into = LocalFile.read_into

    def counted(self: LocalFile, buffers: list[memoryview], offset: int) -> None:
        read_into(self, buffers, offset)
        name = Path(self.where).name
        found[name] = found.get(name, 0) + sum(buffer.nbytes for buffer in buffers)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    return found


def swap_by_delta(fleet: Fleet, base: int, new: int):  # type: ignore[no-untyped-def]
    path = fleet.where / f"d{base}-{new}.safetensors"
    return swap(fleet, new, write_delta(fleet.file(base), fleet.file(new), path).path)


def test_a_delta_is_laid_over_what_a_node_serves_and_a_new_node_reads_its_base_first(
    fleet: Fleet, read: dict[str, int]
) -> None:
    for new in (1, 2):
        receipt = swap_by_delta(fleet, new - 1, new)
        assert (receipt.kind, receipt.late, receipt.weights_id) == ("swap", {}, fleet.weights_id(new))
    assert {keeper.model.history[-1].kind for keeper in fleet.keepers.values()} == {"delta"}
    fleet.place.set(write_delta(fleet.file(2), fleet.file(3), fleet.where / "d2-3.safetensors").path, revision=3)
    read.clear()
    for keeper in fleet.keepers.values():
        keeper.changes.look()
    assert set(fleet.served().values()) == {fleet.weights_id(3)}
    assert "v2.safetensors" not in read
    assert read.pop("d2-3.safetensors")
    read.clear()
    fleet.start("n2")
    assert fleet.keepers["n2"].model.weights_id == fleet.weights_id(3)
    assert set(read) >= {"v0.safetensors", "d0-1.safetensors", "d1-2.safetensors", "d2-3.safetensors"}
    assert fleet.commits[-1] == (4, fleet.weights_id(3))  # nothing in between was served


def test_a_node_that_serves_others_than_a_delta_starts_from_reads_them_too(fleet: Fleet) -> None:
    """And serves none of them on the way."""
    fleet.fate = lambda method, node: "lost" if node == "n1" and method in {"commit", "look_soon"} else ""
    swap(fleet, 1)
    fleet.keepers["n1"].changes.discard(fleet.keepers["n1"].changes._order.order.id)  # type: ignore[union-attr]
    fleet.fate = lambda method, node: ""
    fleet.commits.clear()
    assert swap_by_delta(fleet, 1, 2).late == {}
    assert fleet.commits == [(3, fleet.weights_id(2))] * 2
    assert not Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON).late
    assert set(fleet.served().values()) == {fleet.weights_id(1)}


def test_a_delta_from_other_weights_is_refused_before_anything_is_asked(fleet: Fleet) -> None:
    fleet.asked.clear()
    with pytest.raises(BaseMismatch, match=rf"from the weights {fleet.weights_id(1)[:12]}, and .* are desired"):
        swap_by_delta(fleet, 1, 2)
    assert fleet.asked == []
    path = write_delta(fleet.file(1), fleet.file(2), fleet.where / "d1-2.safetensors").path
    wrong = known_weights(path)._replace(base=fleet.weights_id(0))
    fleet.file(2)
    with pytest.raises(FleetRefused) as refused:
        Agreement(fleet.place, fleet).swap(str(path), wrong, "ana", "", SOON)
    assert {name: type(error) for name, error in refused.value.reasons.items()} == dict.fromkeys(
        ("n0", "n1"), BaseMismatch
    )
    assert fleet.place.read().revision == 1


def test_too_long_a_reason_is_refused_before_anything_is_asked(fleet: Fleet) -> None:
    swap(fleet, 1)
    fleet.asked.clear()
    agreement, path, why = Agreement(fleet.place, fleet), fleet.file(2), "x" * 5000
    for change in (
        lambda: agreement.swap(str(path), known_weights(path), "ana", why, SOON),
        lambda: agreement.publish(str(path), known_weights(path), "ana", why, SOON),
        lambda: agreement.rollback(None, "ana", why, True, SOON),
    ):
        with pytest.raises(Unsupported, match="why: has 5000 characters"):
            change()
    assert (fleet.asked, fleet.place.read().revision) == ([], 2)


def test_a_damaged_delta_is_refused_by_all(fleet: Fleet) -> None:
    path = write_delta(fleet.file(0), fleet.file(1), fleet.where / "d.safetensors").path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FleetRefused) as refused:
        swap(fleet, 1, path)
    assert {type(error) for error in refused.value.reasons.values()} == {DigestMismatch}


def test_the_reasons_of_all_come_back_together(fleet: Fleet) -> None:
    served = fleet.served()
    for number in (0, 1):  # 0 says that it is what is served
        with pytest.raises(FleetRefused) as refused:
            swap(fleet, number, fleet.damaged(number))
        assert {name: type(error) for name, error in refused.value.reasons.items()} == dict.fromkeys(
            ("n0", "n1"), DigestMismatch
        )
        assert str(refused.value).count("DigestMismatch") == len(refused.value.problems) == 2
    assert (fleet.served(), fleet.place.read().revision) == (served, 1)


def test_who_does_not_answer_refuses_and_who_has_gone_does_not(fleet: Fleet) -> None:
    fleet.fate = lambda method, node: "lost" if (method, node) == ("prepare", "n1") else ""
    with pytest.raises(FleetRefused, match="n1: TimeoutError") as refused:
        swap(fleet, 1)
    assert list(refused.value.reasons) == ["n1"]
    assert fleet.keepers["n0"].status().preparing == ""

    def goes(method: str, node: str) -> str:
        if node == "n1":
            fleet.gone.add(node)
        return ""

    fleet.fate = goes
    receipt = swap(fleet, 1)
    assert (list(receipt.nodes), receipt.late) == (["n0"], {})
    assert fleet.keepers["n0"].model.weights_id == receipt.weights_id


def test_who_was_not_told_is_asked_to_look_or_is_late(fleet: Fleet) -> None:
    fleet.fate = lambda method, node: "lost" if (method, node) == ("commit", "n1") else ""
    receipt = swap(fleet, 1)
    assert receipt.late == {}
    assert receipt.nodes["n1"].committed_at is None
    assert set(fleet.served().values()) == {receipt.weights_id}
    fleet.fate = lambda method, node: "lost" if node == "n1" and method in {"commit", "look_soon"} else ""
    receipt = swap(fleet, 2)
    assert receipt.late == {"n1": "is at revision 2"}


@pytest.mark.parametrize("stalls", ["before it asks", "after it has asked"])
def test_a_coordinator_that_stalls_for_longer_than_the_lease_decides_nothing(fleet: Fleet, stalls: str) -> None:
    now = 0.0

    def stall(method: str, node: str) -> str:
        nonlocal now
        if method == "renew" and stalls == "before it asks":
            fleet.now += 100.0
            for keeper in fleet.keepers.values():
                keeper.changes.look()
        elif method == "renew":
            now += 100.0
        return ""

    fleet.fate, path = stall, fleet.file(1)
    with pytest.raises(FleetRefused, match="n0: StageClosed: n0: has given the order up"):
        Agreement(fleet.place, fleet, lambda: now).swap(str(path), known_weights(path), "ana", "", SOON)
    assert fleet.place.read().revision == 1
    assert {keeper.status().preparing for keeper in fleet.keepers.values()} == {""}


def test_a_busy_node_may_take_its_time_to_say_that_it_is_ready(fleet: Fleet) -> None:
    """Not as long as its lease lasts."""
    fleet.fate = lambda method, node: "slow" if method == "renew" else ""
    assert swap(fleet, 1).late == {}


def test_an_order_is_renewed_until_it_is_decided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place may take longer than the lease."""
    monkeypatch.setattr(agreement, "_RENEW", 0.01)
    renewed, decide = threading.Event(), fleet.place.set

    def slow(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.fate = lambda method, node: renewed.set() or "" if method == "renew" else ""  # type: ignore[func-returns-value]
        assert renewed.wait(30)
        return decide(*arguments, **options)

    monkeypatch.setattr(fleet.place, "set", slow)
    assert swap(fleet, 1).late == {}


@pytest.mark.parametrize(("written", "held"), [(True, False), (True, True), (False, False), (False, True)])
def test_whether_a_write_that_failed_was_done_is_looked_up(
    fleet: Fleet, written: bool, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """held: somebody has written a hold since."""
    decide = fleet.place.set

    def fails(*arguments, **options):  # type: ignore[no-untyped-def]
        if written:
            decide(*arguments, **options)
        if held:
            fleet.place.hold(revision=fleet.place.read().revision)
        raise DesiredError("the bucket said nothing")

    monkeypatch.setattr(fleet.place, "set", fails)
    if written:
        assert swap(fleet, 1).late == {}
    else:
        with pytest.raises(DesiredError, match="said nothing"):
            swap(fleet, 1)
        assert {keeper.status().preparing for keeper in fleet.keepers.values()} == {""}
    assert set(fleet.served().values()) == {fleet.weights_id(int(written))}


def test_what_nobody_can_look_up_is_undecided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    away = fleet.where.with_name("away")

    def vanishes(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.where.rename(away)
        raise DesiredError("the bucket said nothing")

    monkeypatch.setattr(fleet.place, "set", vanishes)
    with pytest.raises(FleetUndecided, match="look there until it answers"):
        swap(fleet, 1)
    assert all(keeper.status().preparing for keeper in fleet.keepers.values())
    away.rename(fleet.where)
    fleet.now += 100.0
    for keeper in fleet.keepers.values():
        keeper.changes.look()
    assert set(fleet.served().values()) == {fleet.weights_id(0)}


def test_a_rollback_of_all(fleet: Fleet) -> None:
    swap(fleet, 1)
    receipt = Agreement(fleet.place, fleet).rollback(None, "bo", "worse", True, SOON)
    assert (receipt.kind, receipt.weights_id, receipt.by) == ("rollback", fleet.weights_id(0), "bo")
    assert all(each.resident for each in receipt.nodes.values())
    state = fleet.place.read()
    assert (state.revision, state.hold.by if state.hold else "", state.withdrawn[0].weights_id) == (
        3,
        "bo",
        fleet.weights_id(1),
    )
    with pytest.raises(NothingToRollBack):
        Agreement(fleet.place, fleet).rollback(None, "bo", "", True, SOON)


def test_a_rollback_of_all_needs_no_file_where_all_have_the_weights_in_memory(fleet: Fleet) -> None:
    """A node that comes later does; it has nothing to serve before, and says which file is missing."""
    swap(fleet, 1)
    swap(fleet, 2)
    fleet.file(1).rename(fleet.where / "away")
    receipt = Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON)
    assert {each.resident for each in receipt.nodes.values()} == {True}
    assert (set(fleet.served().values()), receipt.late) == ({receipt.weights_id}, {})
    fleet.start("n2")
    with pytest.raises(NoWeights, match=r"v1\.safetensors: cannot be opened"):
        fleet.keepers["n2"].take_seat(os.getpid(), fleet.spec)
    (fleet.where / "away").rename(fleet.file(0).with_name("v1.safetensors"))
    fleet.keepers["n2"].take_seat(os.getpid(), fleet.spec)
    assert fleet.keepers["n2"].model.weights_id == receipt.weights_id


def test_a_rollback_of_all_is_refused_where_one_has_to_read_a_file_that_has_gone(fleet: Fleet) -> None:
    swap(fleet, 1)
    fleet.start("n2")
    fleet.file(0).unlink()
    with pytest.raises(FleetRefused, match=r"n2: .*v0\.safetensors: cannot be opened") as refused:
        Agreement(fleet.place, fleet).rollback(None, "bo", "", False, SOON)
    assert list(refused.value.reasons) == ["n2"]
    assert set(fleet.served().values()) == {fleet.weights_id(1)}


def publish(fleet: Fleet, number: int):  # type: ignore[no-untyped-def]
    path = fleet.file(number)
    return Agreement(fleet.place, fleet).publish(str(path), known_weights(path), "run 7", "newest", SOON)


def test_what_a_trainer_publishes_all_serve_unless_an_operator_has_said_otherwise(fleet: Fleet) -> None:
    receipt = publish(fleet, 1)
    assert (receipt.kind, receipt.revision, receipt.by, receipt.late) == ("publish", 2, "run 7", {})
    assert set(fleet.served().values()) == {fleet.weights_id(1)}
    again = publish(fleet, 1)
    assert (again.kind, again.revision, again.late) == ("none", 2, {})
    assert {keeper.status().preparing for keeper in fleet.keepers.values()} == {""}
    fleet.asked.clear()
    with pytest.raises(Superseded, match="were desired before"):
        publish(fleet, 0)
    fleet.place.hold(revision=2, by="bo")
    with pytest.raises(Held, match="on hold by bo"):
        publish(fleet, 2)
    assert fleet.asked == []
    assert set(fleet.served().values()) == {fleet.weights_id(1)}


@pytest.mark.parametrize("what", ["hold", "set"])
def test_an_operator_who_says_so_while_a_trainer_publishes_is_obeyed(fleet: Fleet, what: str) -> None:
    def meanwhile(method: str, node: str) -> str:
        if (method, node) == ("prepare", "n1"):
            if what == "hold":
                fleet.place.hold(revision=1, by="bo")
            else:
                fleet.place.set(fleet.file(3), revision=1, by="bo")
        return ""

    fleet.fate = meanwhile
    with pytest.raises(Held if what == "hold" else RevisionConflict):
        publish(fleet, 2)
    assert fleet.place.read().revision == 2
    for keeper in fleet.keepers.values():
        assert keeper.status().preparing == ""
        keeper.changes.look()
    assert set(fleet.served().values()) == {fleet.weights_id(0 if what == "hold" else 3)}


def test_the_latest_deployment_counts(fleet: Fleet, tmp_path: Path) -> None:
    """Its key is asked for by keepers that were there before; other places have keepers of their own."""
    keeper = fleet.keepers["n0"]
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    with pytest.raises(Unsupported, match=r"key\.pem: no public key"):
        keeper.take_seat(os.getpid(), later)
    assert keeper.spec == fleet.spec
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    keeper.take_seat(os.getpid(), later)
    with pytest.raises(SignatureRefused, match="not signed"):
        keeper.changes.prepare(order(fleet, 1))
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))
    keeper.take_seat(os.getpid(), fleet.spec)
    assert keeper.spec == later
    assert fleet.spec._replace(place="elsewhere").key != fleet.spec.key == later.key


def test_any_of_several_keys_will_do(fleet: Fleet, tmp_path: Path) -> None:
    """As of a server: while one key takes the place of another."""
    publics = []
    for name in ("old", "new"):
        private = ec.generate_private_key(ec.SECP256R1())
        key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"{name}.private.pem").write_bytes(key)
        public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        publics.append(tmp_path / f"{name}.pem")
        publics[-1].write_bytes(public)
    spec = _spec(fleet, require_signature=publics)
    assert spec.require_signature == tuple(map(str, publics))
    keeper = fleet.keepers["n0"]
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, require_signature=spec.require_signature))
    with pytest.raises(SignatureRefused, match="not signed"):
        keeper.changes.prepare(order(fleet, 1))
    for number, name in ((2, "old"), (3, "new")):
        signature = sign(fleet.weights_id(number), str(tmp_path / f"{name}.private.pem"))
        path = fleet.file(number)
        path.with_name(f"{path.name}.sig").write_bytes(signature)
        keeper.changes.prepare(order(fleet, number))
        keeper.changes.discard(f"order {number}")


def _spec(fleet: Fleet, **options: Any) -> Spec:
    """What a deployment with these options tells its replicas."""
    deploying = pytest.importorskip("weightswap_fleet.deploying")
    application = deploying.deployment(fleet.tiny.path, follow=fleet.where, **options)
    spec: Spec = application._bound_deployment._replica_config.init_args[0]
    return spec


def test_what_was_refused_is_tried_again_by_a_deployment_that_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    keeper = fleet.keepers["n0"]
    key = tmp_path / "key.pem"
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
    fleet.place.set(fleet.file(1), revision=1)
    for _ in range(2):
        keeper.changes.look()
        assert "not signed" in keeper.status().error
    keeper.changes.bell.clear()
    keeper.take_seat(os.getpid(), fleet.spec._replace(since=2.0))
    assert keeper.changes.bell.is_set()
    keeper.changes.look()
    assert (keeper.model.weights_id, keeper.status().error) == (fleet.weights_id(1), "")


def test_a_keeper_that_begins_again_changes_nothing_until_it_knows_the_deployment(fleet: Fleet, tmp_path: Path) -> None:
    """Ray makes it with what the first one was made with; its replicas are of a later one, which asks for a key."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    fleet.keepers["n0"].take_seat(os.getpid(), later)
    fleet.place.set(fleet.file(1), revision=1)
    fleet.start("n0", deployed=False)
    keeper = fleet.keepers["n0"]
    keeper.changes.look()
    with pytest.raises(StagingBusy, match="has begun again"):
        keeper.changes.prepare(order(fleet, 2))
    assert keeper.model.weights_id == fleet.weights_id(0)
    keeper.told(os.getpid(), "", later)
    assert keeper.spec == later
    keeper.changes.look()
    assert "not signed" in keeper.status().error
    assert keeper.model.weights_id == fleet.weights_id(0)


def test_a_keeper_that_begins_again_alone_waits_for_the_deployment_too(fleet: Fleet, tmp_path: Path) -> None:
    """No replica has its memory any more; the place says weights that the latest deployment refuses."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with closing(NodeKeeper(fleet.spec, "n9", again=True)) as keeper:
        assert keeper.model.weights_id is None
        with pytest.raises(NoWeights, match="not signed"):
            keeper.take_seat(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
        assert keeper.model.weights_id is None
    with closing(NodeKeeper(fleet.spec, "n8", again=True)) as keeper:
        keeper.take_seat(os.getpid(), fleet.spec)
        assert keeper.model.weights_id == fleet.weights_id(0)


@pytest.mark.parametrize("told", [False, True])
def test_a_keeper_that_nobody_has_told_ends_soon(told: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses all changes until then; one that was told waits for replicas that come back."""
    actors = pytest.importorskip("weightswap_fleet.coordinator.actors")
    ended = threading.Event()
    monkeypatch.setattr(actors, "_LOOK", 0.01)
    monkeypatch.setattr(actors.ray, "get_runtime_context", MagicMock())
    monkeypatch.setattr(actors.ray, "kill", lambda _: ended.set())
    with closing(NodeKeeper(fleet.spec, "n9", again=True)) as keeper:
        if told:
            keeper.told(1, "", fleet.spec)
        actor = object.__new__(actors._Keeper)
        actor._keeper = keeper
        threading.Thread(target=actor._end_when_idle, daemon=True).start()
        if told:
            assert not ended.wait(0.2)
            monkeypatch.setattr(actors, "IDLE", 0.0)
        assert ended.wait(20)


def test_without_weights_nobody_gets_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 1, monkeypatch)
    with pytest.raises(NoWeights, match="no weights are desired yet"):
        fleet.keepers["n0"].take_seat(1, fleet.spec)
    fleet.close()


@pytest.mark.parametrize(
    "error",
    [
        FleetError("a"),
        FleetRefused("v1", {"n0": DigestMismatch("w", ["a differs"], "Copy it again"), "n1": TimeoutError("late")}),
        FleetUndecided("b"),
        StaleReplica("c"),
        UnknownFleet("d"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_whole(error: FleetError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert str(getattr(again, "reasons", "")) == str(getattr(error, "reasons", ""))
