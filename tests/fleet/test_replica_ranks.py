"""Replicas of two ranks take part in a fleet's changes as one node each: all ranks of all replicas change, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import X, values, whole, write_set
from weightswap_fleet import FleetPlan, FleetRefused
from weightswap_fleet.documents import PrepareRequest
from weightswap_fleet.node.replica_ranks import Rank
from weightswap_runtime import (
    InputMismatch,
    NoWeights,
    RanksRefused,
    StageClosed,
    Unsupported,
    write_delta,
)
from weightswap_runtime.following.desired_store import described, known_weights

from .rank_threads import Replicas, replicas_of_two


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with replicas_of_two(tmp_path, "a", "b") as made:
        yield made


def serve(replicas: Replicas, seed: int) -> bool:
    """Return whether all ranks have these weights, and calls answer as one process with them."""
    for agent in replicas.agents.values():
        output, marks = agent.model(X)
        assert torch.allclose(output, whole(values(seed), X), atol=1e-4)
        assert marks.tolist() == [float(seed)] * 2
    return replicas.served() == {replicas.weights_id(seed)}


def test_a_swap_and_its_rollback_are_every_rank_s(replicas: Replicas) -> None:
    assert serve(replicas, 0)
    receipt = replicas.swap(1)
    assert (receipt.kind, receipt.revision, receipt.late) == ("swap", 2, {})
    assert set(receipt.nodes) == {"a", "b"}
    assert serve(replicas, 1)
    assert {agent.status().revision for agent in replicas.agents.values()} == {2}
    back = replicas.rollback()
    assert (back.kind, back.late) == ("rollback", {})
    assert all(each.resident for each in back.nodes.values())
    assert serve(replicas, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_take_no_rank_of_any_replica_does(replicas: Replicas, rank: int) -> None:
    before, damaged = replicas.desired_store.read(), str(replicas.damaged(1))
    if rank == 1:  # only the second rank of one replica reads what is damaged

        def misled(method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return (damaged, *arguments[1:]) if method == "stage" else arguments

        replicas.others["b"].before = misled
    with pytest.raises(FleetRefused) as refused:
        replicas.swap(Path(damaged) if rank == 0 else replicas.file(1))
    assert set(refused.value.reasons) == ({"a", "b"} if rank == 0 else {"b"})
    assert "digest" in str(refused.value)
    if rank == 1:
        (error,) = refused.value.reasons.values()
        assert isinstance(error, RanksRefused)
        assert list(error.reasons) == [1]
    assert replicas.desired_store.read() == before
    assert all("digest" in why for each in replicas.agents.values() for why in each.status().refused.values())
    assert len(replicas.agents["b"].status().refused) == 1
    assert {agent.preparing for agent in replicas.agents.values()} == {""}
    assert serve(replicas, 0)
    replicas.others["b"].before = lambda method, arguments: arguments
    replicas.swap(1)
    assert serve(replicas, 1)


def test_a_rank_that_kept_nothing_reads_what_is_rolled_back_to(replicas: Replicas) -> None:
    """Its staging had begun when the first rank's was refused, so it alone has no previous weights."""
    replicas.swap(1)
    other = replicas.others["b"].rank.result()
    other.stage(str(replicas.file(2)), (), {"expect": replicas.weights_id(2)})
    while not other.state().has_staged:
        pass
    assert other.state().previous_weights_id is None
    receipt = replicas.rollback()
    assert {name: each.resident for name, each in receipt.nodes.items()} == {"a": True, "b": False}
    assert receipt.late == {}
    assert serve(replicas, 0)


def test_wrong_goldens_are_refused_before_the_decision(replicas: Replicas) -> None:
    before = replicas.desired_store.read()
    with pytest.raises(FleetRefused) as refused:
        replicas.swap(replicas.with_goldens(1, outputs_of=2))
    for error in refused.value.reasons.values():
        assert isinstance(error, RanksRefused)
        assert error.reasons[0].startswith("GoldenMismatch")
    assert replicas.desired_store.read() == before
    assert serve(replicas, 0)
    receipt = replicas.swap(replicas.with_goldens(3, outputs_of=3))
    assert {each.verified for each in receipt.nodes.values()} == {"goldens"}
    assert serve(replicas, 3)


def test_what_the_desired_store_says_is_followed(replicas: Replicas) -> None:
    replicas.desired_store.set(replicas.file(2), revision=1)
    for agent in replicas.agents.values():
        agent.reconcile()
    assert serve(replicas, 2)
    replicas.desired_store.set(replicas.damaged(1), revision=2, known=known_weights(replicas.damaged(1)))
    for agent in replicas.agents.values():
        agent.reconcile()
        assert "digest" in agent.status().error
    assert serve(replicas, 2)


class Caller(threading.Thread):
    """A thread that calls a replica's first rank all the time, with pins, and checks each answer."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._model, self._ids = replicas.agents["a"].model, [replicas.weights_id(seed) for seed in range(3)]
        self.done = threading.Event()
        self.seen: set[int] = set()
        self.wrong: list[Any] = []

    def run(self) -> None:
        while not self.done.is_set() and not self.wrong:
            try:
                with self._model.pin() as pinned:
                    output, marks = pinned(X)
                    weights_id = pinned.weights_id
            except Exception as error:
                self.wrong.append(error)
                return
            seed = int(marks[0])
            self.seen.add(seed)
            is_whole = torch.allclose(output, whole(values(seed), X), atol=1e-4)
            if not is_whole or marks.tolist() != [seed] * 2 or weights_id != self._ids[seed]:
                self.wrong.append((output, marks, weights_id))


def test_calls_while_weights_change_are_of_one_set(replicas: Replicas) -> None:
    """Of several threads, with pins: a pin keeps changes out."""
    callers = [Caller(replicas) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for turn in range(12):
            replicas.swap(replicas.file(1 + turn % 2))
    finally:
        for caller in callers:
            caller.done.set()
            caller.join()
    assert [caller.wrong for caller in callers] == [[], []]
    assert all({1, 2} <= caller.seen for caller in callers)
    assert serve(replicas, 2)


def test_inputs_that_are_refused_are_told_to_nobody(replicas: Replicas) -> None:
    model, others = replicas.agents["a"].model, replicas.others["a"]
    others.told.clear()
    with pytest.raises(InputMismatch):
        model(torch.zeros(2, 3))
    assert others.told == []
    assert serve(replicas, 0)


def test_a_rank_does_not_answer_with_other_weights_than_the_first(replicas: Replicas) -> None:
    """Nothing leads to that. If it did, there would be no answer, rather than a mixture."""
    rank = replicas.others["a"].rank.result()
    with pytest.raises(StageClosed):
        rank.call("forward", "1" * 64, [X])
    assert serve(replicas, 0)


def test_deltas(replicas: Replicas) -> None:
    """A replica that starts with one reads its base, too; one that leads elsewhere is refused by all."""
    replicas.swap(1)
    other = write_set(replicas.folder / "other.safetensors", 1, bias=7.0)
    write_delta(replicas.file(1), other, out=replicas.where / "whole.safetensors")  # of what all ranks have whole
    receipt = replicas.swap(replicas.where / "whole.safetensors")
    assert (receipt.late, replicas.served()) == ({}, {known_weights(other).weights_id})
    expected = whole(values(1) | {"bias": torch.full((4,), 7.0)}, X)
    for agent in (*replicas.agents.values(), replicas.start("c")):
        output, marks = agent.model(X)
        assert marks.tolist() == [1.0, 1.0]
        assert torch.allclose(output, expected, atol=1e-4)
    parts = replicas.where / "parts.safetensors"
    write_delta(other, replicas.file(2), out=parts)
    wanted = known_weights(replicas.file(2)).weights_id
    forged = replicas.where / "forged.safetensors"
    forged.write_bytes(parts.read_bytes().replace(wanted.encode(), known_weights(other).weights_id[::-1].encode()))
    with pytest.raises(FleetRefused, match=f"leads to the weights {wanted[:12]}, not to") as refused:
        replicas.swap(forged)
    assert set(refused.value.reasons) == {"a", "b", "c"}
    replicas.swap(parts)
    assert replicas.served() == {wanted}
    for agent in (*replicas.agents.values(), replicas.start("d")):
        output, marks = agent.model(X)
        assert marks.tolist() == [2.0, 2.0]
        assert torch.allclose(output, whole(values(2), X), atol=1e-4)


def test_a_trial_is_refused_by_name(replicas: Replicas) -> None:
    path = replicas.file(1)
    weights = described(str(path), known_weights(path), "ana", "", replicas.desired_store.read())
    with pytest.raises(Unsupported):
        replicas.agents["a"].prepare_trial(
            PrepareRequest("trial", 0, str(path), weights, 10.0, plan=FleetPlan(share=0.5))
        )
    assert serve(replicas, 0)


def test_status_and_metrics(replicas: Replicas) -> None:
    status = replicas.agents["a"].status()
    assert (status.node, status.revision, status.error) == ("a", 1, "")
    assert status.weights_id == replicas.weights_id(0)
    assert len(status.ranks) == 2
    assert status.replicas == (status.agent,)
    assert 'weightswap_fleet_revision{model="two"} 1.0' in replicas.agents["a"].metrics()


def test_a_replica_starts_with_the_desired_weights_or_not_at_all(tmp_path: Path) -> None:
    with replicas_of_two(tmp_path) as replicas:
        replicas.desired_store.set(replicas.damaged(1), revision=1, known=known_weights(replicas.damaged(1)))
        replicas.desired_store.read()
        (replicas.folder / "0.safetensors").unlink()
        with pytest.raises(NoWeights):
            replicas.start("a")
        assert replicas.others["a"].ask(Rank.state)[0].weights_id is None
