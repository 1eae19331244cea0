"""How all nodes agree, or refuse, step by step; what operators and trainers ask of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.refusals import because
from weightswap_fleet.coordinator import agreement
from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_fleet.errors import FleetRefused, FleetUndecided, UnknownFleet
from weightswap_runtime import DesiredError, DigestMismatch, NothingToRollBack, NotPromoted, RevisionConflict
from weightswap_runtime.errors import NoWeights, Unsupported
from weightswap_runtime.following.desired_store import known_weights

from .nodes import SOON, Fleet


def test_too_long_a_reason_is_refused_before_anything_is_asked(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.asked.clear()
    agreement, path, why = Agreement(fleet.desired_store, fleet), fleet.file(2), "x" * 5000
    for change in (
        lambda: agreement.swap(str(path), known_weights(path), "ana", why, SOON),
        lambda: agreement.publish(str(path), known_weights(path), "ana", why, SOON),
        lambda: agreement.rollback(None, "ana", why, True, SOON),
    ):
        with pytest.raises(Unsupported, match="why: has 5000 characters"):
            change()
    assert (fleet.asked, fleet.desired_store.read().revision) == ([], 2)


def test_the_reasons_of_all_come_back_together(fleet: Fleet) -> None:
    served = fleet.served()
    for number in (0, 1):  # 0 says that it is what is served
        with pytest.raises(FleetRefused) as refused:
            fleet.swap(fleet.damaged(number))
        assert {name: type(error) for name, error in refused.value.reasons.items()} == dict.fromkeys(
            ("n0", "n1"), DigestMismatch
        )
        assert str(refused.value).count("DigestMismatch") == len(refused.value.problems) == 2
    assert (fleet.served(), fleet.desired_store.read().revision) == (served, 1)


def test_who_does_not_answer_refuses_and_who_has_gone_does_not(fleet: Fleet) -> None:
    fleet.fate = lambda method, node: "lost" if (method, node) == ("prepare", "n1") else ""
    with pytest.raises(FleetRefused, match="n1: TimeoutError") as refused:
        fleet.swap(1)
    assert list(refused.value.reasons) == ["n1"]
    assert fleet.agents["n0"].status().preparing == ""

    def goes(method: str, node: str) -> str:
        if node == "n1":
            fleet.gone.add(node)
        return ""

    fleet.fate = goes
    receipt = fleet.swap(1)
    assert (list(receipt.nodes), receipt.late) == (["n0"], {})
    assert fleet.agents["n0"].model.weights_id == receipt.weights_id


def test_who_was_not_told_is_asked_to_poll_or_is_late(fleet: Fleet) -> None:
    fleet.fate = lambda method, node: "lost" if (method, node) == ("commit", "n1") else ""
    receipt = fleet.swap(1)
    assert receipt.late == {}
    assert receipt.nodes["n1"].committed_at is None
    assert set(fleet.served().values()) == {receipt.weights_id}
    fleet.fate = lambda method, node: "lost" if node == "n1" and method in {"commit", "reconcile_soon"} else ""
    receipt = fleet.swap(2)
    assert receipt.late == {"n1": "is at revision 2"}


@pytest.mark.parametrize("stalls", ["before it asks", "after it has asked"])
def test_a_coordinator_that_stalls_for_longer_than_the_lease_decides_nothing(fleet: Fleet, stalls: str) -> None:
    now = 0.0

    def stall(method: str, node: str) -> str:
        nonlocal now
        if method == "renew" and stalls == "before it asks":
            fleet.now += 100.0
            for agent in fleet.agents.values():
                agent.reconcile()
        elif method == "renew":
            now += 100.0
        return ""

    fleet.fate, path = stall, fleet.file(1)
    with pytest.raises(FleetRefused, match="n0: StageClosed: n0: has discarded the change"):
        Agreement(fleet.desired_store, fleet, lambda: now).swap(str(path), known_weights(path), "ana", "", SOON)
    assert fleet.desired_store.read().revision == 1
    assert {agent.status().preparing for agent in fleet.agents.values()} == {""}


def test_a_busy_node_may_take_its_time_to_say_that_it_is_ready(fleet: Fleet) -> None:
    """But not until its lease is over."""
    fleet.fate = lambda method, node: "slow" if method == "renew" else ""
    assert fleet.swap(1).late == {}


def test_a_change_is_renewed_until_it_is_decided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The desired store may take longer than the lease."""
    monkeypatch.setattr(agreement, "_RENEW", 0.01)
    renewed, decide = threading.Event(), fleet.desired_store.set

    def slow(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.fate = lambda method, node: renewed.set() or "" if method == "renew" else ""  # type: ignore[func-returns-value]
        assert renewed.wait(30)
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
        with pytest.raises(DesiredError, match="said nothing"):
            fleet.swap(1)
        assert {agent.status().preparing for agent in fleet.agents.values()} == {""}
    assert set(fleet.served().values()) == {fleet.weights_id(int(written))}


def test_what_nobody_can_poll_up_is_undecided(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    away = fleet.where.with_name("away")

    def vanishes(*arguments, **options):  # type: ignore[no-untyped-def]
        fleet.where.rename(away)
        raise DesiredError("the bucket said nothing")

    monkeypatch.setattr(fleet.desired_store, "set", vanishes)
    with pytest.raises(FleetUndecided, match="keep reading it until it answers"):
        fleet.swap(1)
    assert all(agent.status().preparing for agent in fleet.agents.values())
    away.rename(fleet.where)
    fleet.now += 100.0
    for agent in fleet.agents.values():
        agent.reconcile()
    assert set(fleet.served().values()) == {fleet.weights_id(0)}


def test_a_rollback_of_all(fleet: Fleet) -> None:
    fleet.swap(1)
    receipt = Agreement(fleet.desired_store, fleet).rollback(None, "bo", "worse", True, SOON)
    assert (receipt.kind, receipt.weights_id, receipt.by) == ("rollback", fleet.weights_id(0), "bo")
    assert all(each.resident for each in receipt.nodes.values())
    state = fleet.desired_store.read()
    assert (state.revision, state.hold.by if state.hold else "", state.withdrawn[0].weights_id) == (
        3,
        "bo",
        fleet.weights_id(1),
    )
    with pytest.raises(NothingToRollBack):
        Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", True, SOON)


def test_a_rollback_of_all_needs_no_file_where_all_have_the_weights_in_memory(fleet: Fleet) -> None:
    """A node that joins later needs it; until then it serves nothing, and names the missing file."""
    fleet.swap(1)
    fleet.swap(2)
    fleet.file(1).rename(fleet.where / "away")
    receipt = Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", False, SOON)
    assert {each.resident for each in receipt.nodes.values()} == {True}
    assert (set(fleet.served().values()), receipt.late) == ({receipt.weights_id}, {})
    fleet.start("n2")
    with pytest.raises(NoWeights, match=r"v1\.safetensors: cannot be opened"):
        fleet.agents["n2"].attach(os.getpid(), fleet.spec)
    (fleet.where / "away").rename(fleet.file(0).with_name("v1.safetensors"))
    fleet.agents["n2"].attach(os.getpid(), fleet.spec)
    assert fleet.agents["n2"].model.weights_id == receipt.weights_id


def test_a_rollback_of_all_is_refused_where_one_has_to_read_a_file_that_has_gone(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.start("n2")
    fleet.file(0).unlink()
    with pytest.raises(FleetRefused, match=r"n2: .*v0\.safetensors: cannot be opened") as refused:
        Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", False, SOON)
    assert list(refused.value.reasons) == ["n2"]
    assert set(fleet.served().values()) == {fleet.weights_id(1)}


def desire(fleet: Fleet, source: Path) -> None:
    """Make weights desired by hand, unverified, and let all nodes look."""
    fleet.desired_store.set(source, revision=fleet.desired_store.read().revision)
    for agent in fleet.agents.values():
        agent.reconcile()


def test_a_rollback_of_all_to_what_is_refused_writes_nothing(fleet: Fleet) -> None:
    """Each node says which weights it has refused, until it serves them after all."""
    desire(fleet, damaged := fleet.damaged(1))
    desire(fleet, fleet.file(2))
    bad, before = fleet.weights_id(1), fleet.desired_store.read()
    for to in (None, bad[:12]):
        with pytest.raises(FleetRefused) as refused:
            Agreement(fleet.desired_store, fleet).rollback(to, "bo", "", True, SOON)
        assert {type(error) for error in refused.value.reasons.values()} == {DigestMismatch}
        assert fleet.desired_store.read() == before
    assert set(fleet.served().values()) == {fleet.weights_id(2)}
    status = fleet.agents["n0"].status()
    assert (list(status.refused), status.error, status.preparing) == ([bad], "", "")
    assert "digest" in status.refused[bad]

    damaged.write_bytes(fleet.file(1).read_bytes())
    receipt = Agreement(fleet.desired_store, fleet).rollback(bad, "bo", "", True, SOON)
    assert set(fleet.served().values()) == {receipt.weights_id} == {bad}
    assert fleet.agents["n0"].status().refused == {}


@pytest.mark.parametrize("change", ["swap", "publish", "rollback"])
def test_where_no_node_is_left_nothing_is_decided(change: str, fleet: Fleet) -> None:
    """Whether all have gone before, or while they verify."""
    fleet.swap(1)
    before = fleet.desired_store.read()

    def all_go(method: str, node: str) -> str:
        fleet.gone.update(fleet.agents)
        return "lost"

    fleet.fate = all_go
    changes: dict[str, Callable[[], object]] = {
        "swap": lambda: fleet.swap(2),
        "publish": lambda: publish(fleet, 2),
        "rollback": lambda: Agreement(fleet.desired_store, fleet).rollback(None, "bo", "", True, SOON),
    }
    for _ in range(2):
        with pytest.raises(UnknownFleet, match="nothing was written"):
            changes[change]()
        assert fleet.desired_store.read() == before


def publish(fleet: Fleet, number: int):  # type: ignore[no-untyped-def]
    path = fleet.file(number)
    return Agreement(fleet.desired_store, fleet).publish(str(path), known_weights(path), "run 7", "newest", SOON)


def test_what_a_trainer_publishes_all_serve_unless_an_operator_has_said_otherwise(fleet: Fleet) -> None:
    receipt = publish(fleet, 1)
    assert (receipt.kind, receipt.revision, receipt.by, receipt.late) == ("publish", 2, "run 7", {})
    assert set(fleet.served().values()) == {fleet.weights_id(1)}
    again = publish(fleet, 1)
    assert (again.kind, again.revision, again.late) == ("none", 2, {})
    assert {agent.status().preparing for agent in fleet.agents.values()} == {""}
    receipt = publish(fleet, 0)  # a training that was repeated
    assert (receipt.kind, receipt.revision, receipt.late) == ("publish", 3, {})
    Agreement(fleet.desired_store, fleet).rollback(fleet.weights_id(1), "bo", "", True, SOON)
    fleet.asked.clear()
    with pytest.raises(NotPromoted, check=because("superseded"), match="then withdrawn"):
        publish(fleet, 0)
    with pytest.raises(NotPromoted, check=because("held"), match="on hold by bo"):
        publish(fleet, 2)
    assert fleet.asked == []
    assert set(fleet.served().values()) == {fleet.weights_id(1)}


@pytest.mark.parametrize("what", ["hold", "set"])
def test_an_operator_who_says_so_while_a_trainer_publishes_is_obeyed(fleet: Fleet, what: str) -> None:
    def meanwhile(method: str, node: str) -> str:
        if (method, node) == ("prepare", "n1"):
            if what == "hold":
                fleet.desired_store.hold(revision=1, by="bo")
            else:
                fleet.desired_store.set(fleet.file(3), revision=1, by="bo")
        return ""

    fleet.fate = meanwhile
    with pytest.raises(NotPromoted if what == "hold" else RevisionConflict):
        publish(fleet, 2)
    assert fleet.desired_store.read().revision == 2
    for agent in fleet.agents.values():
        assert agent.status().preparing == ""
        agent.reconcile()
    assert set(fleet.served().values()) == {fleet.weights_id(0 if what == "hold" else 3)}
