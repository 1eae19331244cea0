"""Deltas that a fleet takes: operators at once, agents that begin again, chains, and nodes that come in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weightswap_fleet import FleetRefused
from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_runtime import (
    BaseMismatch,
    RevisionConflict,
    StageClosed,
    StagingBusy,
    Unsupported,
    write_delta,
)
from weightswap_runtime.following import desired_state
from weightswap_runtime.sources.byte_source import LocalFile

from .nodes import SOON, Fleet, kinds, known_weights

MOST_BASES = 20  # instead of many more


def before(fleet: Fleet, method: str, event: Callable[[], object], node: str = "n0") -> None:
    """Call a function once, just before a message reaches a node."""
    events = [event]
    fleet.before(method, lambda: events and events.pop()(), node)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the bytes read of each file."""
    found: dict[str, int] = {}
    read_into = LocalFile.read_into

    def counted(self: LocalFile, buffers: list[memoryview], offset: int) -> None:
        read_into(self, buffers, offset)
        name = Path(self.where).name
        found[name] = found.get(name, 0) + sum(buffer.nbytes for buffer in buffers)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    return found


@pytest.mark.usefixtures("_places")
def test_a_delta_is_laid_over_what_a_node_serves_and_a_new_node_reads_its_base_first(
    fleet: Fleet, read: dict[str, int]
) -> None:
    for new in (1, 2):
        receipt = fleet.swap(fleet.delta(new - 1, new))
        assert (receipt.kind, receipt.late, receipt.weights_id) == ("swap", {}, fleet.weights_id(new))
    assert {agent.model.history[-1].kind for agent in fleet.agents.values()} == {"delta"}
    fleet.desired_store.set(
        write_delta(fleet.file(2), fleet.file(3), fleet.where / "d2-3.safetensors").path, revision=3
    )
    read.clear()
    fleet.reconcile()
    assert fleet.all_serve(3)
    assert "v2.safetensors" not in read
    assert read.pop("d2-3.safetensors")
    read.clear()
    fleet.start("n2")
    assert fleet.agents["n2"].model.weights_id == fleet.weights_id(3)
    assert set(read) >= {"v0.safetensors", "d0-1.safetensors", "d1-2.safetensors", "d2-3.safetensors"}
    assert fleet.commits[-1] == (4, fleet.weights_id(3))  # nothing in between was served


@pytest.mark.usefixtures("_places")
def test_a_node_that_serves_others_than_a_delta_starts_from_reads_them_too(fleet: Fleet) -> None:
    """It serves none of them meanwhile."""
    fleet.lose("commit", "reconcile_soon", node="n1")
    fleet.swap(1)
    fleet.agents["n1"].discard(fleet.agents["n1"]._requested.request.id)  # type: ignore[union-attr]
    fleet.fate = lambda method, node: ""
    fleet.commits.clear()
    assert fleet.swap(fleet.delta(1, 2)).late == {}
    assert fleet.commits == [(3, fleet.weights_id(2))] * 2
    assert not fleet.rollback().late
    assert fleet.all_serve(1)


def test_a_delta_from_other_weights_is_refused_before_anything_is_asked(fleet: Fleet) -> None:
    fleet.asked.clear()
    with pytest.raises(BaseMismatch):
        fleet.swap(fleet.delta(1, 2))
    assert fleet.asked == []
    path = write_delta(fleet.file(1), fleet.file(2), fleet.where / "d1-2.safetensors").path
    wrong = known_weights(path)._replace(base=fleet.weights_id(0))
    fleet.file(2)
    with pytest.raises(FleetRefused) as refused:
        Agreement(fleet.desired_store, fleet).swap(str(path), wrong, "ana", "", SOON)
    assert kinds(refused) == dict.fromkeys(("n0", "n1"), BaseMismatch)
    assert fleet.desired_store.read().revision == 1


@pytest.mark.parametrize(
    ("when", "first_serves", "refusals"),
    [("prepare", False, {RevisionConflict}), ("renew", True, {StagingBusy}), ("commit", True, {BaseMismatch})],
)
def test_of_two_operators_at_once_one_is_refused(
    fleet: Fleet, when: str, first_serves: bool, refusals: set[type[Exception]]
) -> None:
    """Two coordinators, of which the second begins and ends in the middle of the first one's change."""
    first, second, refused = fleet.delta(0, 1), fleet.delta(0, 2), list[Exception]()

    def attempt(path: Path) -> None:
        try:
            fleet.swap(path)
        except FleetRefused as error:
            refused.extend(error.reasons.values())
        except (BaseMismatch, RevisionConflict) as error:
            refused.append(error)

    before(fleet, when, lambda: attempt(second))
    attempt(first)
    assert {type(each) for each in refused} == refusals
    winner = fleet.weights_id(1 if first_serves else 2)
    assert fleet.commits == [(2, winner)] * 2
    assert set(fleet.served().values()) == {winner}
    assert fleet.desired_store.read().revision == 2


@pytest.mark.parametrize("when", ["renew", "commit"])
@pytest.mark.parametrize("base_is_there", [True, False])
def test_an_agent_that_begins_again_before_it_commits_a_delta(fleet: Fleet, when: str, base_is_there: bool) -> None:
    """Before the decision no node changes; after it the next agent, with the base in memory, reads the delta."""
    path = fleet.delta(0, 1)
    if not base_is_there:
        fleet.file(0).rename(fleet.where / "away")
    before(fleet, when, lambda: fleet.start("n0"))
    if when == "renew":
        with pytest.raises(FleetRefused) as refused:
            fleet.swap(path)
        assert kinds(refused) == {"n0": StageClosed}
        assert (fleet.commits, fleet.desired_store.read().revision) == ([], 1)
    else:
        receipt = fleet.swap(path)
        assert (receipt.late, receipt.nodes["n0"].committed_at) == ({}, None)
        assert fleet.commits == [(2, receipt.weights_id)] * 2
        assert {agent.model.history[-1].kind for agent in fleet.agents.values()} == {"delta"}
    assert fleet.preparing() == {""}


@pytest.mark.parametrize("when", ["prepare", "renew", "commit", "status"])
def test_a_node_that_joins_while_a_delta_is_agreed_on(fleet: Fleet, when: str) -> None:
    """It starts with the present desired weights, and ends with the new ones; the receipt waits for it."""
    path = fleet.delta(0, 1)
    before(fleet, when, lambda: fleet.start("n2"))
    receipt = fleet.swap(path)
    assert (set(receipt.nodes), receipt.late) == ({"n0", "n1"}, {})
    assert fleet.served() == dict.fromkeys(("n0", "n1", "n2"), receipt.weights_id)
    assert {agent.status().revision for agent in fleet.agents.values()} == {2}


def test_a_node_that_joins_and_cannot_read_the_base_is_late_and_serves_nothing_old(fleet: Fleet) -> None:
    path = fleet.delta(0, 1)
    fleet.file(0).rename(fleet.where / "away")
    before(fleet, "commit", lambda: fleet.start("n2"), "n1")
    receipt = fleet.swap(path)
    assert set(receipt.nodes) == {"n0", "n1"}
    assert list(receipt.late) == ["n2"]
    assert "v0.safetensors: cannot be opened" in receipt.late["n2"]
    assert fleet.agents["n2"].model.weights_id is None


@pytest.mark.usefixtures("_places")
def test_a_chain_of_deltas_is_as_long_as_the_limit_and_no_longer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins then reads all of it. One more delta is refused before a node is asked, with advice."""
    monkeypatch.setattr(desired_state, "MOST_BASES", MOST_BASES)
    for new in range(1, MOST_BASES + 1):
        assert fleet.swap(fleet.delta(new - 1, new)).late == {}
    fleet.start("n2")
    assert len(fleet.agents["n2"].model.history) == 1  # nothing in between was served
    assert fleet.all_serve(MOST_BASES)
    last = MOST_BASES + 1
    fleet.asked.clear()
    with pytest.raises(Unsupported):
        fleet.swap(fleet.delta(MOST_BASES, last))
    assert fleet.asked == []
    assert fleet.swap(fleet.file(last)).late == {}
    assert fleet.swap(fleet.delta(last, last + 1)).late == {}
    assert not fleet.rollback(fleet.weights_id(MOST_BASES)).late
    assert fleet.all_serve(MOST_BASES)
