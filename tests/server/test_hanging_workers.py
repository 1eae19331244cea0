"""Workers that hang are replaced, and what only takes long is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import load
from tests.server.load import CLIENTS
from tests.server.worker_processes import Fleet, eventually, operated, serving
from weightswap_runtime import Unsupported
from weightswap_server import ModelSource, Settings
from weightswap_server.workers.manager import Workers

HANGING = '''
"""SIGUSR1 keeps the loop to itself for ever, SIGUSR2 the interpreter's lock for two seconds."""
import ctypes, signal, time

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
signal.signal(signal.SIGUSR2, lambda *_: ctypes.PyDLL(None).usleep(2_000_000))
'''


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "hanging_operators.py").write_text(HANGING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        options = [
            "--follow",
            str(folder / "desired_store"),
            "--worker-timeout",
            "3",
            "--op-library",
            "hanging_operators",
            *operated(folder),
        ]
        with serving(folder, 2, *options) as found:
            yield found


@pytest.mark.slow
def test_a_stopped_worker_is_replaced_under_load(fleet: Fleet, tmp_path: Path) -> None:
    """Requests and commits go on, and no answer is a mixture, though the stopped worker may hold a lease."""
    client = load.start(fleet, fleet.expected, tmp_path, 6)
    _, stopped, other = fleet.children
    eventually(lambda: fleet.answered() > 100)
    os.kill(stopped, signal.SIGSTOP)
    during = 0
    while stopped in fleet.children:
        fleet.infer()  # a new connection is the other worker's
        during += 1
        if during % 20 == 1:
            fleet.desired_store.set(
                fleet.files[during // 20 % 3 + 1], revision=fleet.desired_store.read().revision, by="test"
            )
    eventually(lambda: len(fleet.children) == 3)
    assert other in fleet.children
    fleet.desire(3)
    fleet.desire(1)  # which takes the arena that the stopped one may have held
    found = load.report_of(client)["answers"]
    assert (found["mixed"], found["stale"]) == (0, 0)
    assert found["failed"] <= 2 * CLIENTS  # a client may meet its lost connection twice: as it reads, and as it writes
    assert during > 20


@pytest.mark.slow
def test_a_worker_whose_loop_is_blocked_is_replaced(fleet: Fleet) -> None:
    _, blocked, other = fleet.children
    os.kill(blocked, signal.SIGUSR1)
    eventually(lambda: blocked not in fleet.children and len(fleet.children) == 3)
    assert other in fleet.children
    for _ in range(20):
        eventually(lambda: bool(fleet.infer()))


@pytest.mark.slow
def test_a_stopped_owner_is_replaced(fleet: Fleet) -> None:
    owner, *workers = fleet.children
    os.kill(owner, signal.SIGSTOP)
    eventually(lambda: owner not in fleet.children)
    fleet.desire(2)
    assert set(workers) < set(fleet.children)


@pytest.mark.slow
def test_who_is_stopped_while_it_starts_is_replaced(fleet: Fleet) -> None:
    before = fleet.children
    for pid in before[:2]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(fleet.children) == 3 and not set(before[:2]) & set(fleet.children))
    starting = set(fleet.children) - set(before)
    for pid in starting:
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: len(fleet.children) == 3 and not starting & set(fleet.children), 120)
    eventually(lambda: all(process["ready"] for process in fleet.processes))
    fleet.desire(2)
    assert before[2] in fleet.children


@pytest.mark.slow
def test_what_takes_long_is_not_replaced(fleet: Fleet) -> None:
    """A call that holds the GIL for two thirds of the limit, and a suspended computer."""
    before = fleet.children
    os.kill(before[1], signal.SIGUSR2)
    time.sleep(4)
    assert fleet.children == before
    everybody = [fleet.process.pid, *before]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in everybody:  # the manager wakes first, and looks
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    time.sleep(1)
    assert fleet.children == before
    fleet.desire(3)


@pytest.mark.parametrize("timeout", [-1.0, 2.9, float("nan"), "3"])
def test_a_limit_that_cannot_be_meant_is_refused(timeout: float) -> None:
    with pytest.raises(Unsupported, match="3 seconds"):
        Workers({"m": ModelSource(artifact="a", weights="w")}, Settings(), 1, worker_timeout=timeout)
