"""A bad day: broken checkpoints, one with NaN, a rollback, a kill, a new process. All end on the desired weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.services import FOLLOW, NODE, FollowingProcess, Service, weights_id_of
from tests.support.tiny import TinyArtifact
from tests.support.watched import SOON, Directory, eventually
from weightswap_runtime import Event, load

CHECKPOINTS = 20
DAMAGED, NOT_FINITE = (3, 6, 11, 14, 17), 9
ROLLED_BACK, BACK_AT = 12, 10
HELD = range(13, 16)  # the checkpoints that come while it is on hold


class Day:
    """Trainer's directory that one process watches, a desired store, and other processes that follow it."""

    def __init__(self, tiny: TinyArtifact, root: Path, following: str) -> None:
        self.tiny, self.following = tiny, following
        self.directory, self.service = Directory(tiny, root / "outbox"), Service(tiny, root / "service")
        self.good: dict[int, str] = {}
        self.served: list[str] = []
        self.model = load(tiny.path, on_event=self._note)
        self.everybody: list[FollowingProcess] = []
        self.alive = [self.start() for _ in range(2)]
        self.watch()

    def _note(self, event: Event) -> None:
        if event.kind in ("committed", "rolled back"):
            self.served.append(event.weights_id or "")

    def watch(self) -> None:
        self.watcher = self.model.watch(self.directory.path, SOON, promote=self.service.folder)

    def start(self) -> FollowingProcess:
        self.everybody.append(FollowingProcess(self.tiny.path, self.service.folder, self.following).ready())
        return self.everybody[-1]

    def train(self, seed: int) -> None:
        if seed in DAMAGED:
            self.directory.damaged(seed)
            return
        values = self.directory.tiny.values(seed)
        if seed == NOT_FINITE:
            values["weight"][1, 2] = torch.nan
        path = self.directory.tiny.write(self.directory.path / f"v{seed}.safetensors", values)
        if seed != NOT_FINITE:
            self.good[seed] = weights_id_of(path)

    def settle(self, seed: int) -> None:
        """Wait until a checkpoint is accepted or refused, and all agree."""
        if seed in HELD:
            assert self.service.desired == self.good[BACK_AT]
        elif seed in self.good:
            assert eventually(lambda: self.service.desired == self.good[seed])
        else:
            assert eventually(lambda: f"v{seed}.safetensors" in self.watcher.skipped)
        self.agree()

    def agree(self) -> None:
        desired = self.service.desired
        assert {process.served(self.service.revision) for process in self.alive} == {desired}
        assert eventually(lambda: self.model.weights_id == desired)

    def roll_back(self) -> None:
        """Roll back, kill a process, start another, and restart the watching one."""
        self.service.desired_store.rollback(revision=self.service.revision, by="operator", why="slow")
        assert self.service.desired == self.good[BACK_AT]
        self.agree()
        self.alive.pop(0).kill()
        self.alive.append(self.start())
        assert self.watcher.stop(60)
        self.watch()
        self.agree()

    def release(self) -> None:
        self.service.desired_store.release(revision=self.service.revision)
        assert eventually(lambda: self.service.desired == self.good[HELD[-1]])
        self.agree()

    def end(self) -> None:
        self.watcher.stop()
        for process in self.alive:
            process.kill()


@pytest.mark.parametrize(
    "following", [pytest.param(FOLLOW, id="models"), pytest.param(NODE, id="nodes of a fleet", marks=pytest.mark.slow)]
)
def test_every_process_ends_on_what_was_desired(tiny: TinyArtifact, tmp_path: Path, following: str) -> None:
    day = Day(tiny, tmp_path, following)
    try:
        for seed in range(1, CHECKPOINTS + 1):
            day.train(seed)
            day.settle(seed)
            if seed == ROLLED_BACK:
                day.roll_back()
            if seed == HELD[-1]:
                day.release()
        day.alive.append(day.start())
        day.agree()
        assert day.service.desired == day.good[CHECKPOINTS]
    finally:
        day.end()
    first, _, replacement, last = (process.commits for process in day.everybody)
    bad, back = day.good[ROLLED_BACK], day.good[BACK_AT]
    for commits in (day.served, *(process.commits for process in day.everybody)):
        assert set(commits) <= set(day.good.values())  # no refused weights
        assert all(before != after for before, after in pairwise(commits))
        assert commits.count(bad) <= 1  # and not again after the rollback
        assert bad not in commits or commits[commits.index(bad) + 1] == back
    assert first[-1] == replacement[0] == back
    assert bad not in replacement
    assert last == [day.good[CHECKPOINTS]]
