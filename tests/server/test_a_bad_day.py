"""A bad day of a server with workers: broken checkpoints, one with NaN, a rollback, kills, restarts, while clients ask.

Whoever is killed and restarted ends on what was desired; what was refused, or rolled back, is never served again.
"""

from __future__ import annotations

import http.client
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.server.worker_processes import Running, eventually, started
from tests.support.damage import damaged
from tests.support.refusals import because
from tests.support.served import expected
from tests.support.services import Service, weights_id_of
from tests.support.tiny import TinyArtifact
from weightswap_runtime import NotPromoted

WORKERS = 2


class Plan(NamedTuple):
    """The events of a day, by checkpoint. back: the rollback's target; held: checkpoints during the hold."""

    checkpoints: int
    damaged: tuple[int, ...]
    not_finite: int
    rollback: int
    back: int
    held: range
    kill_worker: tuple[int, ...]
    kill_owner: tuple[int, ...]
    restart: dict[int, int]  # by which signal


PLAN = Plan(
    20,
    (3, 6, 11, 14, 17),
    not_finite=9,
    rollback=12,
    back=10,
    held=range(13, 16),
    kill_worker=(5, 9, 14),
    kill_owner=(8, 12, 17),
    restart={13: signal.SIGTERM, 17: signal.SIGKILL, 20: signal.SIGTERM},
)


class Seen(NamedTuple):
    """An answer: the time of its request, its weights, and if they really give it."""

    asked: float
    weights_id: str
    right: bool


class Day:
    """A server, a trainer that writes each checkpoint to the desired store, an operator, and clients."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan, self.root = plan, root
        self.tiny = TinyArtifact(root / "tiny.artifact")
        self.service = Service(self.tiny, root / "service")
        self.good: dict[int, str] = {}
        self.expected: dict[str, np.ndarray[Any, Any]] = {}
        self.seen: list[Seen] = []
        self.failures = 0
        self.server: Running
        self._running = ExitStack()
        self._ended = Event()

    def start(self) -> None:
        options = ["--follow", str(self.service.folder), "--admin-socket", str(self.root / "s")]
        self.server = self._running.enter_context(started(self.root, WORKERS, *options))

    def restart(self, number: int) -> None:
        """Restart the whole server, with the manager."""
        children, process = self.server.children, self.server.process
        process.send_signal(number)
        assert process.wait(120) == (0 if number == signal.SIGTERM else -number)
        eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
        self._running.close()
        self.start()

    def kill_owner(self) -> None:
        self.server.replace(self.server.operator.get("/admin/status")["pid"])

    def kill_worker(self) -> None:
        owner = self.server.operator.get("/admin/status")["pid"]
        self.server.replace(next(child for child in self.server.children if child != owner))

    def train(self, seed: int) -> None:
        """Write a checkpoint, whole or broken, to the desired store, as a trainer that checks nothing."""
        path = self.service.folder / f"v{seed}.safetensors"
        values = self.tiny.values(seed)
        if seed == self.plan.not_finite:
            values["weight"][1, 2] = torch.nan
        self.tiny.write(path, values)
        if seed in self.plan.damaged:
            damaged(path)
        elif seed != self.plan.not_finite:
            self.good[seed] = weights_id_of(path)
            self.expected[self.good[seed]] = expected(seed)
        if seed in self.plan.held:
            with pytest.raises(NotPromoted, check=because("held")):
                self.service.desired_store.promote(path, by="trainer")
        else:
            self.service.desired_store.promote(path, by="trainer")

    @property
    def wanted(self) -> str:
        """Return the desired checkpoint, or the last whole one before it."""
        state = self.service.desired_store.read()
        assert state.weights is not None
        known = [each.weights_id for each in (state.weights, *reversed(state.history))]
        return next(each for each in known if each in self.expected)

    def roll_back(self) -> float:
        """Roll back by the admin plane, and return the time after it. What is not finite is refused by the owner."""
        bad = weights_id_of(self.service.folder / f"v{self.plan.not_finite}.safetensors")
        before = self.service.desired_store.read()
        assert "1 NaN" in self.server.refused_change("rollback", to=bad)
        assert self.service.desired_store.read() == before
        eventually(lambda: bool(self.server.change("rollback", to=self.good[self.plan.back][:12], why="slow")))
        assert self.service.desired == self.good[self.plan.back]
        return time.monotonic()

    def release(self) -> None:
        self.service.desired_store.release(revision=self.service.revision)
        bad = self.service.folder / f"v{self.plan.rollback}.safetensors"
        with pytest.raises(NotPromoted, check=because("superseded")):
            self.service.desired_store.promote(bad, by="trainer")

    def agree(self, wanted: str) -> None:
        """Wait until the owner serves a checkpoint; from then on every worker does."""
        eventually(lambda: self._told(wanted))
        for _ in range(10):
            eventually(lambda: self._ask().weights_id == wanted, 5)

    def settle(self, seed: int) -> None:
        """Wait for the outcome of a checkpoint."""
        if seed not in self.good and seed not in self.plan.held:
            name = f"v{seed}.safetensors"
            history = "/admin/models/tiny/history"
            eventually(lambda: any(name in each["source"] for each in self.server.operator.get(history)["refusals"]))
        self.agree(self.wanted)

    def _told(self, wanted: str) -> bool:
        served = self.server.status["served"]
        return served is not None and served["weights_id"] == wanted

    def _ask(self) -> Seen:
        """Send a request on a new connection, to any worker."""
        asked = time.monotonic()
        try:
            said, values = self.server.answer()
        except AssertionError as error:
            raise OSError("refused") from error
        weights_id = said["weights_id"]
        right = weights_id in self.expected and np.allclose(values, self.expected[weights_id], rtol=1e-5, atol=1e-5)
        self.seen.append(Seen(asked, weights_id, right))
        return self.seen[-1]

    def clients(self) -> None:
        while not self._ended.wait(0.005):
            try:
                self._ask()
            except (OSError, http.client.HTTPException):  # of a worker that was killed, or a server that is restarted
                self.failures += 1

    def run(self) -> Iterator[int]:
        """Run the day: the events after each checkpoint follow its outcome."""
        asking = Thread(target=self.clients)
        try:
            self.train(1)
            self.start()
            asking.start()
            for seed in range(1, self.plan.checkpoints + 1):
                if seed > 1:
                    self.train(seed)
                self.settle(seed)
                yield seed
        finally:
            self._ended.set()
            if asking.ident is not None:
                asking.join()
            self._running.close()


@pytest.mark.slow
def test_every_process_ends_on_what_was_desired(tmp_path: Path) -> None:
    plan, day, rolled_back, released = PLAN, Day(PLAN, tmp_path), 0.0, 0.0
    for seed in day.run():
        if seed == plan.rollback:
            rolled_back = day.roll_back()
        if seed in plan.kill_worker:
            day.kill_worker()
        if seed in plan.kill_owner:
            day.kill_owner()
        if seed in plan.restart:
            day.restart(plan.restart[seed])
        if seed in plan.held:
            assert day.wanted == day.good[plan.back]
        if seed == plan.held[-1]:
            day.release()
            released = time.monotonic()
        day.agree(day.wanted)
    assert day.wanted == day.good[plan.checkpoints]
    served = {each.weights_id for each in day.seen}
    assert all(each.right for each in day.seen)  # each by its weights' eager model, and none of what was refused
    assert served <= set(day.good.values())
    bad = day.good[plan.rollback]
    assert any(each.weights_id == bad for each in day.seen if each.asked < rolled_back)
    assert not any(each.weights_id == bad for each in day.seen if each.asked > rolled_back)
    held = {each.weights_id for each in day.seen if rolled_back < each.asked < released}
    assert held == {day.good[plan.back]}
    assert len(served) == len(day.good) - len([seed for seed in plan.held if seed in day.good])
    print(f"{len(day.seen)} answers, {day.failures} broken connections")
