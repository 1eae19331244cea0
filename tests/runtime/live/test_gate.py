"""The gate: a property-based state machine compares it with a simple model; other tests use threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.machines import run_in_any_order
from weightswap_runtime import ModelFailed, NoWeights, StagingBusy, WaitTimeout
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.jobs import Claim, ClaimReference
from weightswap_runtime.live.gate import Gate, Turns, Version, _held_leases


class Place:
    """A fake session."""

    def __init__(self) -> None:
        self.leases: dict[int, ClaimReference] = {}


class GateMachine(RuleBasedStateMachine):
    """A state machine with one thread and two places: which is current, and how many leases each has."""

    pool: ThreadPoolExecutor

    @initialize()
    def start(self) -> None:
        self.gate: Gate = Gate()
        self.places = [Place(), Place()]
        self.current: Version | None = None
        self.failed = False
        self.leases: list[tuple[Place, Claim]] = []

    @rule(index=st.integers(0, 1))
    def exchange(self, index: int) -> None:
        generation = self.current.generation + 1 if self.current else 0
        self.current = Version(self.places[index], generation, Identity(str(generation), {}, {}))
        self.gate.exchange(self.current)
        self.failed = False

    @rule()
    def acquire(self) -> None:
        expected = ModelFailed if self.failed else NoWeights if self.current is None else None
        if expected:
            with pytest.raises(expected):
                self.gate.acquire(Claim())
            return
        lease = Claim()
        version = self.gate.acquire(lease)
        assert version is self.current
        self.leases.append((version.session, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.gate.release(place, lease)
        self.gate.release(place, lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Drop a lease without releasing it, as an interrupted frame does."""
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))

    @rule()
    def fail(self) -> None:
        self.gate.fail("broken")
        self.failed = True

    @rule(index=st.integers(0, 1))
    def wait_idle(self, index: int) -> None:
        """In the thread that has the leases, which is told at once, and in another one."""
        place, gate = self.places[index], self.gate
        is_leased = any(leased is place for leased, _ in self.leases)
        for wait in (gate.wait_idle, lambda *given: self.pool.submit(gate.wait_idle, *given).result()):
            with pytest.raises(WaitTimeout) if is_leased else nullcontext():
                wait(place, 0)

    @invariant()
    def leases_add_up(self) -> None:
        for place in self.places:
            assert len(_held_leases(place)) == sum(leased is place for leased, _ in self.leases)


def test_any_order_of_steps() -> None:
    with ThreadPoolExecutor(1) as pool:
        run_in_any_order(GateMachine, 60, 50, pool=pool)


def opened() -> tuple[Gate, Place]:
    gate: Gate = Gate()
    place = Place()
    gate.exchange(Version(place, 0, Identity("first", {}, {})))
    return gate, place


def test_a_hold_waits_for_leases_and_keeps_new_calls_waiting() -> None:
    gate, place = opened()
    order: list[str] = []
    lease = Claim()
    version = gate.acquire(lease)
    entered = threading.Event()

    def commit() -> None:
        with gate.hold(place, 10):
            order.append("held")
            entered.set()
            time.sleep(0.05)
            gate.exchange(Version(place, 1, Identity("second", {}, {})))
            order.append("committed")

    def call() -> None:
        entered.wait(120)
        own = Claim()
        seen = gate.acquire(own)
        order.append(seen.weights_id)
        gate.release(seen.session, own)

    threads = [threading.Thread(target=target) for target in (commit, call)]
    for each in threads:
        each.start()
    time.sleep(0.05)
    assert order == []
    gate.release(version.session, lease)
    for each in threads:
        each.join(120)
    assert order == ["held", "committed", "second"]


def test_a_thread_with_the_number_of_one_that_ended_has_not_pinned_anything() -> None:
    gate, place = opened()
    numbers: list[int] = []
    leases = []
    refusals: list[str] = []

    def pin() -> None:
        numbers.append(threading.get_ident())
        leases.append(Claim())
        gate.acquire(leases[-1])

    def commit() -> None:
        numbers.append(threading.get_ident())
        with pytest.raises(WaitTimeout) as caught, gate.hold(place, 0):
            pass
        refusals.append(str(caught.value))

    while not numbers[1:] or (numbers[0] not in numbers[1:] and len(numbers) < 1000):
        thread = threading.Thread(target=commit if numbers else pin)
        thread.start()
        thread.join(120)
    assert numbers[0] in numbers[1:]  # the system gives them out again
    assert len(refusals) == len(numbers) - 1
    assert all("still held by 1 call" in refusal for refusal in refusals)


def test_turns_are_those_of_whoever_came_first_and_still_waits() -> None:
    turns, had = Turns(), list[int]()
    looked, gives_up = [threading.Event() for _ in range(5)], threading.Event()

    def take(number: int) -> None:
        def look() -> None:
            looked[number].set()
            if number in (0, 2) and gives_up.is_set():
                raise StagingBusy("waited for long enough")

        with turns.wait_for_turn(look):
            had.append(number)

    with ThreadPoolExecutor() as pool:
        with turns.wait_for_turn(lambda: None), turns.wait_for_turn(lambda: None):  # nobody waits for his own turn
            taken = []
            for number, has_looked in enumerate(looked):
                taken.append(pool.submit(take, number))
                assert has_looked.wait(60)
            gives_up.set()
            assert [isinstance(taken[number].exception(60), StagingBusy) for number in (0, 2)] == [True, True]
        assert [taken[number].result(60) for number in (1, 3, 4)] == [None, None, None]
    assert had == [1, 3, 4]
