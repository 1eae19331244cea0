"""A service's bad day: broken checkpoints, one with NaN, a rollback, a kill, a new process; nobody serves what is not desired."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.services import FollowingProcess, Service, weights_id_of
from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, Directory, eventually
from weightswap_runtime import Event, load

CHECKPOINTS = 20
DAMAGED, NOT_FINITE = (3, 6, 11, 14, 17), 9
BAD = 12  # what the operator rolls back
HELD = (13, 15)  # the first and last that come while it is on hold


def spoiled(directory: Directory, seed: int) -> None:
    values = directory.tiny.values(seed)
    values["weight"][1, 2] = torch.nan
    directory.tiny.write(directory.path / f"v{seed}.safetensors", values)


def test_every_process_ends_on_what_was_desired(tiny: TinyArtifact, tmp_path: Path) -> None:
    directory, service = Directory(tiny, tmp_path / "outbox"), Service(tiny, tmp_path / "service")
    trainer = load(tiny.path)
    served: list[str] = []

    def note(event: Event) -> None:
        if event.kind in ("committed", "rolled back"):
            served.append(event.weights_id or "")

    trainer.listen(note)
    others = [FollowingProcess(tiny.path, service.folder).ready() for _ in range(2)]
    killed: list[FollowingProcess] = []
    good: dict[int, str] = {}
    watcher = trainer.watch(directory.path, SOON, promote=service.folder)
    try:
        for seed in range(1, CHECKPOINTS + 1):
            if seed in DAMAGED:
                directory.damaged(seed)
            elif seed == NOT_FINITE:
                spoiled(directory, seed)
            else:
                good[seed] = weights_id_of(directory.write(seed))
            if HELD[0] <= seed <= HELD[1]:
                assert service.desired == good[10]
            elif seed in good:
                assert eventually(lambda: service.desired == good[seed])  # noqa: B023
            else:
                assert eventually(lambda: f"v{seed}.safetensors" in watcher.skipped)  # noqa: B023
            assert all(other.served() == service.desired for other in others)
            if seed == BAD:
                service.place.rollback(revision=service.revision, by="operator", why="slow")
                assert eventually(lambda: serves(trainer, 10))
                assert {other.served() for other in others} == {good[10]}
                killed.append(others.pop(0))
                killed[-1].kill()
                others.append(FollowingProcess(tiny.path, service.folder).ready())
                assert watcher.stop(60)  # and a restart of what watches
                watcher = trainer.watch(directory.path, SOON, promote=service.folder)
            if seed == HELD[1]:
                assert {other.served() for other in others} == {good[10]}
                service.place.release(revision=service.revision)
                assert eventually(lambda: service.desired == good[HELD[1]])
        last = good[CHECKPOINTS]
        late = FollowingProcess(tiny.path, service.folder).ready()
        others.append(late)
        assert [other.served() for other in others] == [last] * 3
        assert trainer.weights_id == service.desired == last
        assert late.commits == [last]
    finally:
        watcher.stop()
        for other in others:
            other.kill()
    newcomer = next(other for other in others if other.commits[0] == good[10])
    assert good[BAD] not in newcomer.commits
    for commits in (served, *(other.commits for other in (*killed, *others))):
        assert set(commits) <= set(good.values())
        assert all(before != after for before, after in zip(commits, commits[1:], strict=False))
        if good[BAD] in commits:  # once, before it was rolled back
            assert commits.count(good[BAD]) == 1
            assert commits[commits.index(good[BAD]) + 1 :][:1] in ([good[10]], [])
