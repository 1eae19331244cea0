"""Processes that share weights, some of which are killed at random: no mixture, no old weights, no deadlock."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from bisect import bisect_left
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.sharing import segment
from tests.support.watched import eventually
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import Segment

WORKERS = 3


class _Crew:
    """An owner and workers in processes."""

    def __init__(self, shared: Segment, folder: Path) -> None:
        self.folder = folder
        self.kills = {"owner": 0, "worker": 0}
        self._shared, self._mapped, self._control = shared, shared.read_only(), Control(shared.control)
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        for slot in range(-1, WORKERS):
            self._start(slot)

    def _start(self, slot: int) -> None:
        """Start a process; slot -1 is the owner's."""
        role, memory = ("owner", self._shared) if slot < 0 else ("worker", self._mapped)
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.support.sharing",
            role,
            ",".join(map(str, memory.descriptors)),
            str(slot),
        ]
        path = self.folder / f"{role}.{slot}.{len(list(self.folder.iterdir()))}"
        self._living[slot] = subprocess.Popen([*command, str(path)], cwd=ROOT, pass_fds=memory.descriptors)
        self._logs[slot] = path

    def works(self, slot: int) -> bool:
        """True once the process has done something; on a busy machine its start takes seconds."""
        path = self._logs[slot]
        return path.exists() and path.stat().st_size > 0

    def kill(self, slot: int, replace: bool = True) -> None:
        """Kill a process with SIGKILL, and clean up like the manager."""
        process = self._living.pop(slot)
        assert process.poll() is None
        process.kill()
        process.wait()
        if slot >= 0:
            self._control.empty_slot(slot)
        if replace:
            self.kills["owner" if slot < 0 else "worker"] += 1
            self._start(slot)

    def end(self) -> None:
        for slot in list(self._living):
            self.kill(slot, replace=False)
        self._mapped.close()


def _lines(folder: Path, role: str) -> list[tuple[str, float, int]]:
    events: list[Any] = []
    for path in folder.glob(f"{role}.*"):
        whole = path.read_bytes().rpartition(b"\n")[0]
        events += [json.loads(line) for line in whole.splitlines()]
    return events


def _has_done_enough(folder: Path, seconds: float) -> bool:
    events = _lines(folder, "worker")
    tried = {number for what, _, number in events if what == "trial"}
    calls = sum(what == "call" for what, _, _ in events)
    return calls > 10 * seconds and len(_lines(folder, "owner")) > seconds and len(tried) > seconds


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_storm_of_commits_and_kills(tmp_path: Path, seconds: float) -> None:
    dice = random.Random(5)
    with segment(WORKERS) as shared:
        crew = _Crew(shared, tmp_path)
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until or min(crew.kills.values()) == 0:  # on a busy machine it takes longer
                time.sleep(dice.uniform(0.3, 0.8))
                slot = dice.choice([-1, 0, 1, 2])
                assert eventually(partial(crew.works, slot)), "stuck"
                crew.kill(slot)
            control = Control(shared.control)
            last = control.generation or 0
            for slot in range(-1, WORKERS):
                assert eventually(partial(crew.works, slot)), "stuck"
            assert eventually(lambda: (control.generation or 0) > last), "stuck"
            assert eventually(lambda: _has_done_enough(tmp_path, seconds)), "slow"
        finally:
            crew.end()
    calls, commits = (
        _lines(tmp_path, "worker"),
        sorted((when, number) for _, when, number in _lines(tmp_path, "owner")),
    )
    assert [call for call in calls if call[0] == "mixed"] == []
    trials = [call for call in calls if call[0] == "trial"]
    calls = [call for call in calls if call[0] == "call"]
    times = [when for when, _ in commits]
    late = [call for call in calls if (before := bisect_left(times, call[1])) and call[2] < commits[before - 1][1]]
    assert late == []  # a call that began after a commit returned got those weights, or later ones
    assert min(crew.kills.values()) > 0
    assert len(calls) > 10 * seconds
    assert len(commits) > seconds
    assert len({number for _, _, number in trials}) > seconds
    print(f"{len(calls)} calls, {len(trials)} of sets on trial, {len(commits)} commits, {crew.kills} kills")
