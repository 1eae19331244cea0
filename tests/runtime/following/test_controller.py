"""Changes in any order, each interrupted at any point, compared with a plain model of what is open and served."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.damage import damaged
from tests.support.machines import run_in_any_order
from tests.support.services import weights_id_of
from tests.support.tiny import TinyArtifact, X
from weightswap_runtime import (
    DigestMismatch,
    Event,
    Model,
    NothingToRollBack,
    StageCancelled,
    StageClosed,
    Staged,
    StagingBusy,
    WaitTimeout,
    load,
)
from weightswap_runtime.following.controller import REMEMBERED, Change, Controller, Lease
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_runtime.live.store import WeightStore

SETS, SECONDS = 4, 10.0
sets = st.integers(0, SETS - 1)
which = st.integers(0, 3)


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Return what is usual in three of four cases: else hardly any change would ever be ready."""
    return st.sampled_from([usual] * 3 * len(others) + list(others))


MEANWHILE = ("discard", "discard another", "unwanted", "lease", "interrupt", "busy", "roll back", "stop")
ENDING = {"discard", "unwanted", "lease", "interrupt", "roll back", "stop"}


class Owner(Controller):
    """Controller whose stagings wait, before they read, until `go`."""

    is_stopping = False

    def __init__(self, model: Model, paths: list[Path]) -> None:
        super().__init__(model._store, model._member, interval=0.001)
        self.go = threading.Event()
        self.staged: Callable[[], object] = lambda: None  # called before anybody knows that weights are staged
        self._model, self._paths = model, paths
        model._store.admit = lambda location, weights_id: self._hold()

    def _hold(self) -> None:
        deadline, job = time.monotonic() + 60, self.store.job
        assert job is not None
        while not self.go.wait(0.001):
            assert time.monotonic() < deadline, "\n".join(
                "".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()
            )
            job.check()
        job.check()  # so that one that was cancelled before has overwritten nothing

    def check(self) -> None:
        if self.is_stopping:
            raise StageCancelled("the owner stops")

    def _await(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        super()._await(staged, is_wanted)
        self.staged()

    def begin(self, path: str | Path, weights: DesiredWeights) -> Staged:
        return self._model.stage(path, expect=weights.weights_id, background=True)


def refusing(store: WeightStore) -> AbstractContextManager[Any]:
    def refuse(*_: object) -> None:
        raise WaitTimeout("the test's")

    return patch.multiple(store, commit=refuse, rollback=refuse)


class Machine(RuleBasedStateMachine):
    """Machine that knows the open changes by id, with their weights, and which weights calls must see."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.tiny = TinyArtifact(folder / "tiny.artifact")
        self.paths = [self.tiny.write(folder / f"v{seed}.safetensors", self.tiny.values(seed)) for seed in range(SETS)]
        self.ids = [weights_id_of(path) for path in self.paths]
        self.damaged = damaged(self.paths[1], folder / "damaged.safetensors")
        self.model = load(self.tiny.path, self.paths[0])
        self.owner = Owner(self.model, self.paths)
        self.now = 0.0
        self.served = 0
        self.open: dict[str, int] = {}
        self.changes: dict[str, Change] = {}  # the latest of each id
        self.leases: dict[str, float] = {}
        self.discarded: deque[str] = deque(maxlen=REMEMBERED)
        self.recorded: list[int] = []
        self.count = 0

    def _change(self, name: str, **options: Any) -> Change:
        return Change(id=name, lease=Lease(SECONDS, lambda: self.now), **options)

    @property
    def _previous(self) -> int | None:
        """The weights that are still in memory: a staging may have overwritten them, which is not the controller's."""
        previous = self.model.previous_weights_id
        return self.ids.index(previous) if previous in self.ids else None

    def _id(self, new: bool) -> str:
        """Return a new id, or one that was discarded lately."""
        if not new and self.discarded:
            return self.discarded[-1]
        self.count += 1
        return f"change {self.count}"

    def _find(self, which: int) -> str:
        """Return the id of an open change."""
        return list(self.open)[which % len(self.open)]

    def _refusal(self, name: str) -> type[Exception] | None:
        if name in self.discarded:
            return StageCancelled
        return StagingBusy if self.open else None

    @rule(
        new=mostly(True, False),
        seed=sets,
        damaged=mostly(False, True),
        early=mostly("", "discard", "interrupt"),
        meanwhile=mostly([], *([one] for one in MEANWHILE), ["busy", "discard another"], ["busy", "interrupt"]),
        late=mostly(False, True),
    )
    def prepare(self, new: bool, seed: int, damaged: bool, early: str, meanwhile: list[str], late: bool) -> None:
        """early: what happens when there is nothing to cancel yet; meanwhile: while it is staged. late: it is discarded
        just when it is staged."""
        change, todo, happened = self._change(self._id(new)), list(meanwhile), set[str]()
        path = self.damaged if damaged else self.paths[seed]
        self.owner.go.clear()

        def happens(what: str) -> bool:
            happened.add(what)
            return self._meanwhile(what, change)

        def begin() -> Staged:
            if early:
                happens(early)
            return self.model.stage(path, background=True)

        def is_wanted() -> bool:
            self.calls_see_what_is_served()
            if not todo or happened & ENDING:  # which is noticed at any time
                self.owner.go.set()
                return True
            return happens(todo.pop(0))

        error, verdict = self._refusal(change.id), DigestMismatch if damaged else None
        self.owner.staged = (lambda: happens("discard")) if late else (lambda: None)
        try:
            self.owner.prepare(change, begin, is_wanted)
            self._opened(change, seed)
            raised: type[Exception] | None = None
        except (StageCancelled, StagingBusy, DigestMismatch) as refused:
            raised = type(refused)
        finally:
            self.owner.is_stopping = False
            self.owner.go.set()
        assert raised is (error or (StageCancelled if happened & ENDING else verdict))

    def _meanwhile(self, what: str, change: Change) -> bool:
        if what == "discard":
            self.owner.discard(change.id)
            self.discarded.append(change.id)
        elif what == "discard another":
            self.owner.discard("another")
            self.discarded.append("another")
        elif what == "lease":
            self.now += SECONDS
        elif what == "interrupt":
            self.owner.interrupt()
        elif what == "stop":
            self.owner.is_stopping = True
            self.owner.interrupt()
        elif what == "roll back" and not self.owner.is_stopping:
            self.a_rollback_goes_ahead()
        elif change.phase == "staging":
            with pytest.raises(StagingBusy):
                self.owner.prepare(Change(id="busy"), lambda: pytest.fail("it is not begun"))
        return what != "unwanted"

    def _opened(self, change: Change, seed: int) -> None:
        assert change.phase == "ready"
        self.open[change.id], self.changes[change.id] = seed, change
        self.leases[change.id] = self.now + SECONDS

    @rule(new=mostly(True, False), served=mostly(False, True))
    def prepare_what_is_in_memory(self, new: bool, served: bool) -> None:
        seed = self.served if served else self._previous
        if seed is None:
            return
        change = self._change(self._id(new), weights_id=self.ids[seed])
        if refusal := self._refusal(change.id):
            with pytest.raises(refusal):
                self.owner.prepare(change)
        else:
            self._opened(self.owner.prepare(change), seed)

    @precondition(lambda self: any(change.staged for change in self.owner.open))
    @rule()
    def another_takes_the_staged_weights(self) -> None:
        """As an order to promote weights on trial: it discards them neither, nor does it wait."""
        first = next(change for change in self.owner.open if change.staged is not None)
        name = self._id(new=True)
        self._opened(self.owner.prepare(self._change(name, staged=first.staged)), self.open[first.id])

    @precondition(lambda self: self.open)
    @rule(which=which)
    def commit(self, which: int) -> None:
        self._commit(which, "", "")

    @precondition(lambda self: self.open)
    @rule(
        which=which,
        fails=st.sampled_from(["record", "commit", "commit", ""]),
        discarded=st.sampled_from(["", "by the record", "by a listener"]),
    )
    def commit_with_a_failure_or_a_discard(self, which: int, fails: str, discarded: str) -> None:
        self._commit(which, fails, discarded)

    def _commit(self, which: int, fails: str, discarded: str) -> None:
        name = self._find(which)
        change, seed = self.changes[name], self.open[name]
        error, before = self._error_of(change, fails), self.model.generation

        def discard(_: Event | None = None) -> None:
            if change.phase == "committing" and not change.is_discarded:
                self.owner.discard(name)
                self.discarded.append(name)

        def record() -> None:
            assert error is not NothingToRollBack
            if discarded == "by the record":
                discard()
            self._record(change, seed, fails)

        stop = self.model.listen(discard) if discarded == "by a listener" else lambda: None
        with refusing(self.model._store) if fails == "commit" else nullcontext():
            if error is None:
                is_due = change.staged is not None or seed != self.served
                assert (self.owner.commit(change, record) is not None) == is_due == (self.model.generation != before)
                self._committed(name, change)
            else:
                with pytest.raises(error):
                    self.owner.commit(change, record)
        stop()
        if name in self.open and change.is_discarded:
            self._is_over(name)
        assert change.phase == ("ready" if name in self.open else "over")

    def _record(self, change: Change, seed: int, fails: str) -> None:
        self.calls_see_what_is_served()
        with pytest.raises(StageClosed):
            self.owner.commit(change)
        if fails == "record":
            raise KeyError
        self.recorded.append(seed)

    @precondition(lambda self: self.changes.keys() - self.open.keys())
    @rule()
    def commit_what_is_over(self) -> None:
        for name in self.changes.keys() - self.open.keys():
            with pytest.raises(StageClosed):
                self.owner.commit(self.changes[name], lambda: pytest.fail("it is not recorded"))

    def _error_of(self, change: Change, fails: str) -> type[Exception] | None:
        if change.staged is None and self.owner.serves(change.weights_id):
            return None
        if change.staged is None and change.weights_id != self.model.previous_weights_id:
            return NothingToRollBack
        if fails == "record":
            return KeyError
        if change.staged is not None and not self._is_staged(change):
            return StageClosed
        return WaitTimeout if fails == "commit" else None

    def _is_staged(self, change: Change) -> bool:
        """Borrowed weights are discarded with the change that they were borrowed from."""
        return any(other.staged is change.staged and not other.is_borrowed for other in self.owner.open)

    def _committed(self, name: str, change: Change) -> None:
        """All that has these weights is over."""
        self.served = self.open[name]
        for other in list(self.open):
            if other == name or self.changes[other].staged is change.staged is not None:
                self._is_over(other)

    def _is_over(self, name: str) -> None:
        del self.open[name]

    @precondition(lambda self: self.open or len(self.discarded) < 3)
    @rule(which=which, new=mostly(True, False))
    def discard(self, which: int, new: bool) -> None:
        """Of one that is open, or has not come yet."""
        name = self._find(which) if self.open else self._id(new)
        self.owner.discard(name)
        self.discarded.append(name)
        if name in self.open:
            self._is_over(name)

    @precondition(lambda self: len(self.discarded) > 3)
    @rule()
    def discards_are_forgotten(self) -> None:
        first = self._id(new=True)
        for name in (first, *(self._id(new=True) for _ in range(REMEMBERED))):
            self.owner.discard(name)
            self.discarded.append(name)
        if not self.open:
            self.owner.drop(self.owner.prepare(Change(id=first)))

    @precondition(lambda self: self.open)
    @rule(which=which)
    def renew(self, which: int) -> None:
        name = self._find(which)
        change = self.owner.find(name)
        assert change is not None
        change.lease.renew()
        self.leases[name] = self.now + SECONDS

    @rule(seconds=mostly(1.0, SECONDS / 2, SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for change in self.owner.open:
            assert change.lease.is_over == (self.now >= self.leases[change.id])
            if change.lease.is_over:
                self.owner.drop(change)
                self._is_over(change.id)

    @precondition(lambda self: self.open)
    @rule()
    def an_interrupt_ends_nothing_that_is_ready(self) -> None:
        self.owner.interrupt()

    @rule()
    def a_rollback_goes_ahead(self) -> None:
        """It waits for no staging, nor for a change that nobody has decided."""
        with self.owner.turn(self.owner.interrupt):
            self.owner.close()
            self.open.clear()
            if (previous := self._previous) is not None:
                change = self.owner.prepare(Change(self.ids[previous]))
                receipt = self.owner.commit(change, lambda: self.recorded.append(previous))
                assert (receipt is None) == (previous == self.served)
                self.served = previous

    @rule(seed=sets)
    def somebody_else_stages(self, seed: int) -> None:
        self.owner.go.set()
        busy = any(change.staged is not None and self._is_staged(change) for change in self.owner.open)
        with pytest.raises(StagingBusy) if busy else nullcontext(), self.model.stage(self.paths[seed]):
            pass

    @rule()
    def an_owner_that_stops_begins_nothing(self) -> None:
        self.owner.is_stopping = True
        with pytest.raises(StagingBusy if self.open else StageCancelled):
            self.owner.prepare(Change(), lambda: pytest.fail("it is begun"))
        self.owner.is_stopping = False

    @rule(seed=sets, wanted=mostly(2, 1, 0), stops=mostly(False, True))
    def apply(self, seed: int, wanted: int, stops: bool) -> None:
        """wanted: how often it still is, of the two times that it is asked for. stops: the owner, just when the weights
        are staged."""
        asked = iter([True] * wanted + [False] * 2)
        weights = DesiredWeights(source=str(self.paths[seed]), weights_id=self.ids[seed], since=0.0)
        is_due = seed != self.served and wanted
        reads = seed != self._previous
        error = StagingBusy if is_due and self.open else StageCancelled if is_due and reads and stops else None
        self.owner.staged = lambda: setattr(self.owner, "is_stopping", stops)
        self.owner.go.set()
        self.owner.interval = 60.0
        with pytest.raises(error) if error else nullcontext():
            self.owner.apply(self.paths[seed], weights, lambda: next(asked), lambda: self.recorded.append(seed))
            if is_due and (wanted == 2 or not reads):
                self.served = seed
        self.owner.interval, self.owner.is_stopping = 0.001, False

    @invariant()
    def calls_see_what_is_served(self) -> None:
        assert torch.equal(self.model(X), TinyArtifact.eager(self.served, X))
        assert self.owner.serves(self.ids[self.served])

    @invariant()
    def at_most_one_set_of_weights_is_open(self) -> None:
        assert {change.id for change in self.owner.open} == self.open.keys()
        assert len({change.staged for change in self.owner.open}) <= 1
        for change in self.owner.open:
            assert change.phase == "ready"
            if change.staged is not None and not change.is_borrowed:
                assert change.staged._work.weights is not None
                assert not change.staged._work.job.cancelled

    @invariant()
    def what_is_served_was_recorded(self) -> None:
        served = [receipt.weights_id for receipt in self.model.history][1:]
        recorded = [self.ids[seed] for seed in self.recorded]
        left = iter(recorded)
        assert all(weights_id in left for weights_id in served)

    def teardown(self) -> None:
        """Nothing stays claimed."""
        self.owner.close()
        assert self.owner.open == ()
        self.owner.go.set()
        self.model.swap(self.paths[3])
        self.model.close()
        self.folder.cleanup()


@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_any_order(examples: int) -> None:
    run_in_any_order(Machine, examples, 40)


@pytest.mark.parametrize("which", [0, 1], ids=["who has staged them", "who has borrowed them"])
def test_one_of_two_changes_with_the_same_weights_is_discarded(which: int) -> None:
    machine = Machine()
    machine.prepare(new=True, seed=2, damaged=False, early="", meanwhile=[], late=False)
    machine.another_takes_the_staged_weights()
    machine.discard(new=True, which=which)
    machine.at_most_one_set_of_weights_is_open()
    machine.somebody_else_stages(seed=1)
    machine.commit(which=0)
    machine.calls_see_what_is_served()
    machine.teardown()
