"""The protocol of shared memory, step by step: what goes wrong without each of its steps, and does not with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.sharing import BareKeeper, BareWorker, is_whole, segment
from weightswap_runtime.errors import LeaseTimeout, NoWeights
from weightswap_runtime.shared import worker as worker_module
from weightswap_runtime.shared.keeper import KeeperGate
from weightswap_runtime.shared.worker import WorkerGate
from weightswap_runtime.threads.claims import Claim
from weightswap_runtime.threads.job import Job


class _NoSecondRead(WorkerGate):
    def _moved(self, word: int) -> bool:
        return False


class _HalfBlind(BareWorker):
    gate_class = _NoSecondRead


def _between(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something once, when a worker has read the word and holds nothing yet."""
    left = [work]
    monkeypatch.setattr(worker_module, "between", lambda: left.pop()() if left else None)


@pytest.mark.parametrize(
    ("kind", "whole"), [(BareWorker, True), (_HalfBlind, False)], ids=["protocol", "no second read"]
)
def test_commits_between_the_word_and_the_hold(
    kind: type[BareWorker], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with segment() as shared:
        keeper, worker = BareKeeper(shared), kind(shared.read_only(), 0)
        keeper.swap()
        with worker.call():
            pass

        def two_commits() -> None:
            keeper.swap()
            keeper.swap()

        _between(monkeypatch, two_commits)
        with worker.call() as version:
            assert is_whole(version) == whole
            assert (version.generation == 2) == whole


@pytest.mark.parametrize("waits", [True, False], ids=["protocol", "no wait for the idle arena"])
def test_a_call_keeps_its_arena(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(KeeperGate, "_await_workers", lambda *_: None)
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        with worker.call() as version:
            keeper.swap()
            if waits:
                with pytest.raises(LeaseTimeout, match="held by 1 worker"):
                    keeper.swap(timeout=0.05)
            else:
                keeper.swap()
            assert is_whole(version) == waits
        assert keeper.swap() == (2 if waits else 3)


def test_a_commit_is_everybodys_at_once() -> None:
    with segment(3) as shared:
        keeper = BareKeeper(shared)
        workers = [BareWorker(shared.read_only(), slot) for slot in range(3)]
        with pytest.raises(NoWeights), workers[0].call():
            pass
        for generation in range(5):
            keeper.swap()
            for worker in workers:
                with worker.call() as version:
                    assert version.generation == generation
                    assert is_whole(version)


def test_a_dead_worker_holds_nothing_once_its_slot_is_emptied() -> None:
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 1)
        keeper.swap()
        with worker.call():
            keeper.swap()
            with pytest.raises(LeaseTimeout):
                keeper.swap(timeout=0.02)
            keeper.control.empty_slot(1)
            assert keeper.swap() == 2


def test_a_lease_that_nobody_gives_back_ends_with_its_frame() -> None:
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        worker.gate.acquire(Claim())
        assert keeper.control.holders(0)
        worker.gate.sweep()
        assert not keeper.control.holders(0)


def test_another_keeper_goes_on_where_one_has_ended() -> None:
    with segment() as shared:
        first, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        for _ in range(3):
            first.swap()
        with first.residency.target(None, Job()):  # it dies in the middle of a staging
            pass
        second = BareKeeper(shared)
        with worker.call() as version:
            assert version.generation == 2
            assert second.swap() == 3
            assert is_whole(version)
        with worker.call() as version:
            assert (version.generation, is_whole(version)) == (3, True)
