"""The protocol of shared memory: each of its steps prevents a failure, which occurs if that step is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.sharing import BareOwner, BareWorker, is_whole, segment
from weightswap_runtime.errors import NoWeights, StageClosed, WaitTimeout
from weightswap_runtime.jobs import Claim, Job
from weightswap_runtime.shared import worker as worker_module
from weightswap_runtime.shared.control import Control, Summary
from weightswap_runtime.shared.owner import OwnerGate
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
        owner, worker = BareOwner(shared), kind(shared.read_only(), 0)
        owner.swap()
        with worker.call():
            pass

        def two_commits() -> None:
            owner.swap()
            owner.swap()

        _between(monkeypatch, two_commits)
        with worker.call() as version:
            assert is_whole(version) == whole
            assert (version.generation == 2) == whole


@pytest.mark.parametrize("waits", [True, False], ids=["protocol", "no wait for the idle arena"])
def test_a_call_keeps_its_arena(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(OwnerGate, "_wait_for_workers", lambda *_: None)
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        owner.swap()
        with worker.call() as version:
            owner.swap()
            if waits:
                with pytest.raises(WaitTimeout):
                    owner.swap(timeout=0.05)
            else:
                owner.swap()
            assert is_whole(version) == waits
        assert owner.swap() == (2 if waits else 3)


def test_a_commit_is_everybodys_at_once() -> None:
    with segment(3) as shared:
        owner = BareOwner(shared)
        workers = [BareWorker(shared.read_only(), slot) for slot in range(3)]
        with pytest.raises(NoWeights), workers[0].call():
            pass
        for generation in range(5):
            owner.swap()
            for worker in workers:
                with worker.call() as version:
                    assert version.generation == generation
                    assert is_whole(version)


def test_a_dead_worker_holds_nothing_once_its_slot_is_emptied() -> None:
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 1)
        owner.swap()
        with worker.call():
            owner.swap()
            with pytest.raises(WaitTimeout):
                owner.swap(timeout=0.02)
            owner.control.empty_slot(1)
            assert owner.swap() == 2


def test_a_lease_that_nobody_gives_back_ends_with_its_frame() -> None:
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        owner.swap()
        worker.gate.acquire(Claim())
        assert owner.control.holders(0)
        worker.gate.sweep()
        assert not owner.control.holders(0)


def test_another_owner_goes_on_where_one_has_ended() -> None:
    with segment() as shared:
        first, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        for _ in range(3):
            first.swap()
        with first.residency.target(None, Job()):  # it dies in the middle of a staging
            pass
        second = BareOwner(shared)
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
        owner, worker = BareOwner(shared), kind(shared.read_only(), 0)
        owner.swap()
        owner.try_out(71)
        assert not _is_mixed(worker)
        _between(monkeypatch, lambda: owner.try_out(72))
        assert _is_mixed(worker) == (not whole)


@pytest.mark.parametrize("numbered", [True, False], ids=["protocol", "a word for all trials"])
def test_the_next_trial_is_another(numbered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numbered:
        monkeypatch.setattr(Control, "trial", property(lambda control: min(_word(control), 2 + _word(control) % 2)))
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        owner.swap()
        owner.try_out(71)
        found = worker.find_trial()
        owner.try_out(72)
        assert _is_mixed(worker, found) == (not numbered)
        assert not _is_mixed(worker)


_word: Callable[[Control], int] = Control.trial.fget  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [True, False], ids=["protocol", "no end before the overwriting"])
def test_a_trial_ends_before_it_is_overwritten(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with segment() as shared:
        owner, worker, mixed = BareOwner(shared), BareWorker(shared.read_only(), 0), []
        owner.swap()
        owner.try_out(71)
        found = worker.find_trial()
        if not ends:
            monkeypatch.setattr(Control, "end_trial", lambda _: None)
        owner.stage(72, meanwhile=lambda: mixed.append(_is_mixed(worker, found)))
        assert mixed == [not ends]


@pytest.mark.parametrize("waits", [True, False], ids=["protocol", "no wait for the idle arena"])
def test_a_call_of_a_trial_keeps_its_arena(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(OwnerGate, "_wait_for_workers", lambda *_: None)
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        owner.swap()
        owner.try_out(71)
        with worker.trial() as version:
            if waits:
                with pytest.raises(WaitTimeout):
                    owner.stage(72, timeout=0.05)
            else:
                owner.stage(72)
            assert is_whole(version) == waits
        owner.stage(73)


def test_a_trial_that_is_committed_is_served() -> None:
    with segment() as shared:
        owner, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        owner.swap()
        staged = owner.try_out(1)
        with worker.trial() as tried:
            assert owner.commit(staged) == 1
            with worker.call() as served:
                assert served.session is tried.session
                assert is_whole(served)
            owner.swap()  # into the arena that nobody holds
            with pytest.raises(WaitTimeout):
                owner.swap(timeout=0.02)
            assert is_whole(tried)
        with pytest.raises(StageClosed):
            worker.find_trial()


def test_a_trial_ends_with_its_owner() -> None:
    with segment() as shared:
        first, worker = BareOwner(shared), BareWorker(shared.read_only(), 0)
        first.swap()
        first.try_out(71)
        found = worker.find_trial()
        assert not _is_mixed(worker)  # also when the first owner is dead
        second = BareOwner(shared)
        with pytest.raises(StageClosed), worker.trial(found):
            pass
        second.try_out(72)
        assert not _is_mixed(worker, found)
        assert not _is_mixed(worker)
        assert second.swap() == 1
