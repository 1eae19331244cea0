"""How all nodes agree, or refuse, step by step; what operators and trainers ask of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.support.refusals import because
from weightswap_fleet import FleetRefused, FleetUndecided, UnknownFleet
from weightswap_fleet.coordinator import agreement
from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_runtime import (
    DesiredError,
    DigestMismatch,
    NothingToRollBack,
    NotPromoted,
    NoWeights,
    RevisionConflict,
    StageClosed,
    Unsupported,
    WeightFileError,
)

from .nodes import SOON, Fleet, kinds, known_weights


def test_too_long_a_reason_is_refused_before_anything_is_asked(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.asked.clear()
    long = "x" * 5000
    changes = [lambda: fleet.swap(2, reason=long), lambda: fleet.publish(2, long), lambda: fleet.rollback(reason=long)]
    for change in changes:
        with pytest.raises(Unsupported):
            change()
    assert (fleet.asked, fleet.desired_store.read().revision) == ([], 2)


def test_the_reasons_of_all_come_back_together(fleet: Fleet) -> None:
    served = fleet.served()
    for number in (0, 1):  # 0 says that it is what is served
        with pytest.raises(FleetRefused) as refused:
            fleet.swap(fleet.damaged(number))
        assert kinds(refused) == dict.fromkeys(("n0", "n1"), DigestMismatch)
        assert str(refused.value).count("DigestMismatch") == len(refused.value.problems) == 2
    assert (fleet.served(), fleet.desired_store.read().revision) == (served, 1)


def test_who_does_not_answer_refuses_and_who_has_gone_does_not(fleet: Fleet) -> None:
    fleet.lose("prepare", node="n1")
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(1)
    assert kinds(refused) == {"n1": TimeoutError}
    assert fleet.agents["n0"].status().preparing == ""
    fleet.before("prepare", lambda: fleet.gone.add("n1"), node="n1")
    receipt = fleet.swap(1)
    assert (list(receipt.nodes), receipt.late) == (["n0"], {})
    assert fleet.agents["n0"].model.weights_id == receipt.weights_id


def test_who_was_not_told_is_asked_to_poll_or_is_late(fleet: Fleet) -> None:
    fleet.lose("commit", node="n1")
    receipt = fleet.swap(1)
    assert receipt.late == {}
    assert receipt.nodes["n1"].committed_at is None
    assert set(fleet.served().values()) == {receipt.weights_id}
    fleet.lose("commit", "reconcile_soon", node="n1")
    receipt = fleet.swap(2)
    assert receipt.late == {"n1": "is at revision 2"}


@pytest.mark.parametrize("stalls", ["before it asks", "after it has asked"])
def test_a_coordinator_that_stalls_for_longer_than_the_lease_decides_nothing(fleet: Fleet, stalls: str) -> None:
    now = 0.0

    def stall() -> None:
        nonlocal now
        if stalls == "before it asks":
            fleet.now += 100.0
            fleet.reconcile()
        else:
            now += 100.0

    fleet.before("renew", stall)
    path = fleet.file(1)
    with pytest.raises(FleetRefused) as refused:
        Agreement(fleet.desired_store, fleet, lambda: now).swap(str(path), known_weights(path), "ana", "", SOON)
    assert kinds(refused)["n0"] is StageClosed
    assert fleet.desired_store.read().revision == 1
    assert fleet.preparing() == {""}


def test_a_busy_node_may_take_its_time_to_say_that_it_is_ready(fleet: Fleet) -> None:
    """But not until its lease is over."""
    fleet.lose("renew", how="slow")
    assert fleet.swap(1).late == {}


def test_a_change_is_renewed_until_it_is_decided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The desired store may take longer than the lease."""
    monkeypatch.setattr(agreement, "_RENEW", 0.01)
    renewed, decide = threading.Event(), fleet.desired_store.set

    def slow(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.before("renew", renewed.set)
        assert renewed.wait(120)
        return decide(*arguments, **options)

    monkeypatch.setattr(fleet.desired_store, "set", slow)
    assert fleet.swap(1).late == {}


@pytest.mark.parametrize(("written", "held"), [(True, False), (True, True), (False, False), (False, True)])
def test_whether_a_write_that_failed_was_done_is_looked_up(
    fleet: Fleet, written: bool, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """held: an operator has written a hold since."""
    decide = fleet.desired_store.set

    def fails(*arguments, **options):  # type: ignore[no-untyped-def]
        if written:
            decide(*arguments, **options)
        if held:
            fleet.desired_store.hold(revision=fleet.desired_store.read().revision)
        raise DesiredError("the bucket said nothing")

    monkeypatch.setattr(fleet.desired_store, "set", fails)
    if written:
        assert fleet.swap(1).late == {}
    else:
        with pytest.raises(DesiredError):
            fleet.swap(1)
        assert fleet.preparing() == {""}
    assert fleet.all_serve(int(written))


def test_what_nobody_can_poll_up_is_undecided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    away = fleet.where.with_name("away")

    def vanishes(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.where.rename(away)
        raise DesiredError("the bucket said nothing")

    monkeypatch.setattr(fleet.desired_store, "set", vanishes)
    with pytest.raises(FleetUndecided):
        fleet.swap(1)
    assert all(agent.status().preparing for agent in fleet.agents.values())
    away.rename(fleet.where)
    fleet.now += 100.0
    fleet.reconcile()
    assert fleet.all_serve(0)


def test_a_rollback_of_all(fleet: Fleet) -> None:
    fleet.swap(1)
    receipt = fleet.rollback(None, "worse", hold=True)
    assert (receipt.kind, receipt.weights_id, receipt.by) == ("rollback", fleet.weights_id(0), "bo")
    assert all(each.resident for each in receipt.nodes.values())
    state = fleet.desired_store.read()
    assert state.hold is not None
    assert (state.revision, state.hold.by, state.withdrawn[0].weights_id) == (3, "bo", fleet.weights_id(1))
    with pytest.raises(NothingToRollBack):
        fleet.rollback(hold=True)


def test_a_rollback_that_was_made_already_still_holds(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.swap(2)
    fleet.before("renew", lambda: fleet.desired_store.rollback(revision=3, hold=False), node="n0")
    receipt = fleet.rollback(hold=True)
    state = fleet.desired_store.read()
    assert (receipt.revision, receipt.late, state.revision) == (5, {}, 5)
    assert state.hold is not None
    assert fleet.all_serve(1)


def test_a_rollback_of_all_needs_no_file_where_all_have_the_weights_in_memory(fleet: Fleet) -> None:
    """A node that joins later needs it; until then it serves nothing, and names the missing file."""
    fleet.swap(1)
    fleet.swap(2)
    fleet.file(1).rename(fleet.where / "away")
    receipt = fleet.rollback()
    assert {each.resident for each in receipt.nodes.values()} == {True}
    assert (set(fleet.served().values()), receipt.late) == ({receipt.weights_id}, {})
    fleet.start("n2")
    with pytest.raises(NoWeights):
        fleet.attach("n2")
    (fleet.where / "away").rename(fleet.file(0).with_name("v1.safetensors"))
    fleet.attach("n2")
    assert fleet.agents["n2"].model.weights_id == receipt.weights_id


def test_a_rollback_of_all_is_refused_where_one_has_to_read_a_file_that_has_gone(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.start("n2")
    fleet.file(0).unlink()
    with pytest.raises(FleetRefused) as refused:
        fleet.rollback()
    assert kinds(refused) == {"n2": WeightFileError}
    assert fleet.all_serve(1)


def test_a_rollback_of_all_to_what_is_refused_writes_nothing(fleet: Fleet) -> None:
    """Each node says which weights it has refused, until it serves them after all."""
    damaged = fleet.damaged(1)
    for revision, source in enumerate((damaged, fleet.file(2)), start=1):  # by hand, unverified
        fleet.desired_store.set(source, revision=revision)
        fleet.reconcile()
    bad, before = fleet.weights_id(1), fleet.desired_store.read()
    for to in (None, bad[:12]):
        with pytest.raises(FleetRefused) as refused:
            fleet.rollback(to, hold=True)
        assert set(kinds(refused).values()) == {DigestMismatch}
        assert fleet.desired_store.read() == before
    assert fleet.all_serve(2)
    status = fleet.agents["n0"].status()
    assert (list(status.refused), status.error, status.preparing) == ([bad], "", "")
    assert "digest" in status.refused[bad]

    damaged.write_bytes(fleet.file(1).read_bytes())
    receipt = fleet.rollback(bad, hold=True)
    assert set(fleet.served().values()) == {receipt.weights_id} == {bad}
    assert fleet.agents["n0"].status().refused == {}


@pytest.mark.parametrize("change", [lambda fleet: fleet.swap(2), lambda fleet: fleet.publish(2), Fleet.rollback])
def test_where_no_node_is_left_nothing_is_decided(change: Callable[[Fleet], object], fleet: Fleet) -> None:
    """Whether all have gone before, or while they verify."""
    fleet.swap(1)
    before = fleet.desired_store.read()

    def all_go(method: str, node: str) -> str:
        fleet.gone.update(fleet.agents)
        return "lost"

    fleet.fate = all_go
    for _ in range(2):
        with pytest.raises(UnknownFleet):
            change(fleet)
        assert fleet.desired_store.read() == before


@pytest.mark.parametrize("change", [lambda fleet: fleet.swap(3), lambda fleet: fleet.publish(3), Fleet.rollback])
@pytest.mark.parametrize("is_read", [False, True])
def test_what_an_older_document_would_change_is_refused(
    change: Callable[[Fleet], object], is_read: bool, fleet: Fleet
) -> None:
    """A revision would stand for other weights than those that clients have seen, or for earlier ones."""
    document = fleet.where / "desired.json"
    fleet.swap(1)
    older = document.read_bytes()
    fleet.swap(2)
    fleet.swap(1)
    if is_read:
        fleet.reconcile()
    newer = document.read_bytes()
    document.write_bytes(older)
    with pytest.raises(FleetRefused, match="an older copy replaced it") as refused:
        change(fleet)
    assert kinds(refused) == dict.fromkeys(("n0", "n1"), DesiredError)
    assert document.read_bytes() == older
    assert {agent.status().revision for agent in fleet.agents.values()} == {4}
    document.write_bytes(newer)
    fleet.reconcile()
    assert fleet.rollback().late == {}


def test_what_a_trainer_publishes_all_serve_unless_an_operator_has_said_otherwise(fleet: Fleet) -> None:
    receipt = fleet.publish(1)
    assert (receipt.kind, receipt.revision, receipt.by, receipt.late) == ("publish", 2, "run 7", {})
    assert fleet.all_serve(1)
    again = fleet.publish(1)
    assert (again.kind, again.revision, again.late) == ("none", 2, {})
    assert fleet.preparing() == {""}
    receipt = fleet.publish(0)  # a training that was repeated
    assert (receipt.kind, receipt.revision, receipt.late) == ("publish", 3, {})
    fleet.rollback(fleet.weights_id(1), hold=True)
    fleet.asked.clear()
    with pytest.raises(NotPromoted, check=because("superseded")):
        fleet.publish(0)
    with pytest.raises(NotPromoted, check=because("held")):
        fleet.publish(2)
    assert fleet.asked == []
    assert fleet.all_serve(1)


@pytest.mark.parametrize(("change", "what"), [(Fleet.publish, "hold"), (Fleet.publish, "set"), (Fleet.swap, "set")])
def test_an_operator_who_says_so_while_others_change_the_fleet_is_obeyed(
    fleet: Fleet, change: Callable[[Fleet, int], object], what: str
) -> None:
    def meanwhile() -> None:
        if what == "hold":
            fleet.desired_store.hold(revision=1, by="bo")
        else:
            fleet.desired_store.set(fleet.file(3), revision=1, by="bo")

    fleet.before("prepare", meanwhile, node="n1")
    with pytest.raises(NotPromoted if what == "hold" else RevisionConflict):
        change(fleet, 2)
    assert fleet.all_serve(0)
    assert fleet.desired_store.read().revision == 2
    assert fleet.preparing() == {""}
    fleet.reconcile()
    assert fleet.all_serve(0 if what == "hold" else 3)
