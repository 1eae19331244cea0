"""Concurrent operators, trainers, trials and looks, in threads: no deadlock, and a revision is one set of weights."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.storm import storm
from weightswap_fleet import Deadlines
from weightswap_fleet.coordinator.agreement import Agreement
from weightswap_fleet.documents import TRIAL_LEASE, FleetPlan, PrepareRequest
from weightswap_runtime import DesiredWeights, WeightswapError

from .nodes import Fleet, FleetTrial, known_weights

SOON = Deadlines(prepare=5.0, commit=1.0)
SECONDS, SECONDS_A_SECOND = 40, 20  # so that leases run out


class People:
    """Single actions of all who change a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._agreement = Agreement(fleet.desired_store, fleet)

    def swap(self, dice: random.Random) -> None:
        time.sleep(dice.uniform(0, 0.1))
        path = self._file(dice) if dice.random() < 0.9 else self._fleet.damaged(5)
        self._agreement.swap(str(path), known_weights(path), "ana", "", SOON)

    def publish(self, dice: random.Random) -> None:
        time.sleep(dice.uniform(0, 0.2))
        path = self._file(dice)
        self._agreement.publish(str(path), known_weights(path), "trainer", "", SOON)

    def roll_back(self, dice: random.Random) -> None:
        time.sleep(dice.uniform(0, 0.2))
        self._agreement.rollback(None, "bo", "", False, SOON)

    def set_by_hand(self, dice: random.Random) -> None:
        time.sleep(dice.uniform(0.1, 0.4))
        self._fleet.desired_store.set(self._file(dice), revision=self._fleet.desired_store.read().revision)

    def release(self, dice: random.Random) -> None:
        time.sleep(0.1)
        self._fleet.desired_store.release(revision=self._fleet.desired_store.read().revision)

    def poll(self, dice: random.Random) -> None:
        for agent in self._fleet.agents.values():
            agent.reconcile()
            agent.status()

    def try_out(self, dice: random.Random) -> None:
        time.sleep(dice.uniform(0, 0.1))
        path = self._file(dice)
        known = known_weights(path)
        weights = DesiredWeights(source=str(path), weights_id=known.weights_id, since=time.time())
        plan = FleetPlan(share=0.5)
        request = PrepareRequest(uuid4().hex, 0, str(path), weights, TRIAL_LEASE, plan=plan)
        trial = FleetTrial(request, self._fleet)
        trial.begin(SOON.prepare)
        for _ in range(dice.randint(0, 5)):
            if trial.poll() is not None:
                return
            time.sleep(dice.uniform(0, 0.01))
        end = dice.choice(["given up", "promoted", "forgotten"])
        if end == "given up":
            trial.end()
        elif end == "promoted":
            self._agreement.swap(str(path), known, "ana", "", SOON)

    def _file(self, dice: random.Random) -> Path:
        return self._fleet.file(dice.randint(0, 4))


def slowly(stage: Callable[..., Any], dice: random.Random) -> Callable[..., Any]:
    return lambda *arguments, **options: stage(
        *arguments,
        rate_limit=dice.choice([None, 2000.0, 1000.0]),
        **options,  # of 92 bytes
    )


@pytest.mark.slow
def test_everybody_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 3, monkeypatch)
    fleet.desired_store.set(fleet.file(0), revision=0)
    fleet.damaged(5)
    for number in range(5):
        fleet.file(number)
    for number, agent in enumerate(fleet.agents.values()):
        agent.model.stage = slowly(agent.model.stage, random.Random(number))  # type: ignore[method-assign]
        agent.reconcile()
    people = People(fleet)
    works = [people.swap, people.publish, people.roll_back, people.set_by_hand, people.release, people.poll]
    works.append(people.try_out)
    dice = [random.Random(number) for number in range(len(works))]

    def work(number: int) -> str:
        """Do something, and return what, or by which error it was refused."""
        time.sleep(dice[number].uniform(0, 0.01))
        try:
            works[number](dice[number])
        except WeightswapError as error:
            return type(error).__name__
        return works[number].__name__

    began = time.monotonic()
    with storm(work, len(works)) as done:
        while (passed := time.monotonic() - began) < SECONDS:
            fleet.now = passed * SECONDS_A_SECOND
            time.sleep(0.01)
    said = Counter(chain(*done))
    for _ in range(3):
        fleet.now += 1000.0
        people.poll(random.Random())
    desired = fleet.desired_store.read()
    assert desired.weights is not None
    assert set(fleet.served().values()) == {desired.weights.weights_id}
    statuses = [agent.status() for agent in fleet.agents.values()]
    assert {(each.preparing, each.trying, each.revision) for each in statuses} == {("", "", desired.revision)}
    by_revision: dict[int, set[str]] = {}
    for revision, weights_id in fleet.commits:
        by_revision.setdefault(revision, set()).add(weights_id)
    assert [ids for ids in by_revision.values() if len(ids) > 1] == []
    assert {"swap", "roll_back", "try_out"} <= said.keys()
    print(dict(said), len(fleet.commits))
    fleet.close()
