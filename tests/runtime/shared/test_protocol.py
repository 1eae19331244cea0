"""The protocol of shared memory: each of its steps prevents a failure, which occurs if that step is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.sharing import BareKeeper, BareWorker, is_whole, segment
from weightswap_runtime.errors import NoWeights, StageClosed, WaitTimeout
from weightswap_runtime.jobs import Claim, Job
from weightswap_runtime.shared import worker as worker_module
from weightswap_runtime.shared.control import Control, Summary
from weightswap_runtime.shared.keeper import KeeperGate
from weightswap_runtime.shared.worker import WorkerGate


class _NoSecondRead(WorkerGate):
    def _moved(self, word: int) -> bool:
        return False

    def _trial_over(self, trial: int) -> bool:
        return False


class _HalfBlind(BareWorker):
    gate_class = _NoSecondRead


def _between(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something once, after a worker has read the word and before it holds an arena."""
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
        monkeypatch.setattr(KeeperGate, "_wait_for_workers", lambda *_: None)
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        with worker.call() as version:
            keeper.swap()
            if waits:
                with pytest.raises(WaitTimeout, match="held by 1 worker"):
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
            with pytest.raises(WaitTimeout):
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


def _is_mixed(worker: BareWorker, found: tuple[int, Summary] | None = None) -> bool:
    """Return whether a call of the trial gets other weights than those on trial; a refused call gets none."""
    try:
        with worker.trial(found) as version:
            return not is_whole(version)
    except StageClosed:
        return False


@pytest.mark.parametrize(
    ("kind", "whole"), [(BareWorker, True), (_HalfBlind, False)], ids=["protocol", "no second read"]
)
def test_trials_between_the_word_and_the_hold(
    kind: type[BareWorker], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with segment() as shared:
        keeper, worker = BareKeeper(shared), kind(shared.read_only(), 0)
        keeper.swap()
        keeper.try_out(71)
        assert not _is_mixed(worker)
        _between(monkeypatch, lambda: keeper.try_out(72))
        assert _is_mixed(worker) == (not whole)


@pytest.mark.parametrize("numbered", [True, False], ids=["protocol", "a word for all trials"])
def test_the_next_trial_is_another(numbered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numbered:
        monkeypatch.setattr(Control, "trial", property(lambda control: min(_word(control), 2 + _word(control) % 2)))
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        keeper.try_out(71)
        found = worker.find_trial()
        keeper.try_out(72)
        assert _is_mixed(worker, found) == (not numbered)
        assert not _is_mixed(worker)


_word: Callable[[Control], int] = Control.trial.fget  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [True, False], ids=["protocol", "no end before the overwriting"])
def test_a_trial_ends_before_it_is_overwritten(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with segment() as shared:
        keeper, worker, mixed = BareKeeper(shared), BareWorker(shared.read_only(), 0), []
        keeper.swap()
        keeper.try_out(71)
        found = worker.find_trial()
        if not ends:
            monkeypatch.setattr(Control, "end_trial", lambda _: None)
        keeper.stage(72, meanwhile=lambda: mixed.append(_is_mixed(worker, found)))
        assert mixed == [not ends]


@pytest.mark.parametrize("waits", [True, False], ids=["protocol", "no wait for the idle arena"])
def test_a_call_of_a_trial_keeps_its_arena(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(KeeperGate, "_wait_for_workers", lambda *_: None)
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        keeper.try_out(71)
        with worker.trial() as version:
            if waits:
                with pytest.raises(WaitTimeout, match="held by 1 worker"):
                    keeper.stage(72, timeout=0.05)
            else:
                keeper.stage(72)
            assert is_whole(version) == waits
        keeper.stage(73)


def test_a_trial_that_is_committed_is_served() -> None:
    with segment() as shared:
        keeper, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        keeper.swap()
        staged = keeper.try_out(1)
        with worker.trial() as tried:
            assert keeper.commit(staged) == 1
            with worker.call() as served:
                assert served.session is tried.session
                assert is_whole(served)
            keeper.swap()  # into the arena that nobody holds
            with pytest.raises(WaitTimeout):
                keeper.swap(timeout=0.02)
            assert is_whole(tried)
        with pytest.raises(StageClosed):
            worker.find_trial()


def test_a_trial_ends_with_its_keeper() -> None:
    with segment() as shared:
        first, worker = BareKeeper(shared), BareWorker(shared.read_only(), 0)
        first.swap()
        first.try_out(71)
        found = worker.find_trial()
        assert not _is_mixed(worker)  # also when the first keeper is dead
        second = BareKeeper(shared)
        with pytest.raises(StageClosed), worker.trial(found):
            pass
        second.try_out(72)
        assert not _is_mixed(worker, found)
        assert not _is_mixed(worker)
        assert second.swap() == 1
