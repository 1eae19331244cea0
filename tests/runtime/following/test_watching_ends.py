"""Ends of a watcher, and what its stop does not wait for."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, Directory, environment, eventually, somebody_swaps
from weightswap_runtime import Event, Model, StageCancelled, Watcher, load
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.store import WeightStore


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let stagings run until they are cancelled; return a threading.Event that is set when one has begun."""
    begun = threading.Event()

    def stage(store: WeightStore, member: object, request: object, job: Job) -> None:
        begun.set()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            job.check()
            time.sleep(SOON)

    monkeypatch.setattr(WeightStore, "stage", stage)
    yield begun
    monkeypatch.undo()


def test_a_callback_may_stop_the_watching(model: Model, directory: Directory) -> None:
    watchers: list[Watcher] = []
    directory.write(1)
    started = threading.Event()

    def stop(event: Event) -> None:
        if event.kind == "committed":
            assert started.wait(120)
            watchers[0].stop()

    watchers.append(model.watch(directory.path, SOON, callback=stop))
    started.set()
    assert eventually(lambda: not watchers[0].alive)
    assert serves(model, 1)


def test_stop_cancels_a_long_staging(model: Model, directory: Directory, held: threading.Event) -> None:
    events: list[Event] = []
    watcher = model.watch(directory.path, SOON, callback=events.append)
    directory.write(1)
    assert held.wait(120)
    assert watcher.stop(30)
    assert watcher.stop()
    assert [event.kind for event in events] == ["staging", "cancelled"]
    assert isinstance(events[1].error, StageCancelled)
    assert (model.generation, watcher.last_error, repr(watcher)) == (
        None,
        None,
        f"Watcher({str(directory.path)!r}, stopped)",
    )


def test_stop_does_not_wait_for_a_staging_by_hand(model: Model, directory: Directory, tmp_path: Path) -> None:
    directory.write(1)
    with model.stage(directory.tiny.write(tmp_path / "hand", directory.tiny.values(9))):
        watcher = model.watch(directory.path, SOON)
        assert eventually(lambda: somebody_swaps(model))
        assert watcher.stop(30)
    assert model.generation is None


def test_watching_does_not_keep_a_model(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path)
    events: list[Event] = []
    watcher = model.watch(directory.path, SOON, callback=events.append)
    directory.write(1)
    directory.damaged(2)
    assert eventually(lambda: bool(watcher.skipped) and events[-1].kind == "skipped")
    gone, weights = weakref.ref(model), weakref.ref(model._store)
    del model
    assert eventually(lambda: gc.collect() >= 0 and gone() is None)
    assert eventually(lambda: not watcher.alive)
    assert eventually(lambda: gc.collect() >= 0 and weights() is None)
    assert watcher.skipped


def test_a_watcher_that_begins_while_its_model_closes_ends(
    tiny: TinyArtifact, directory: Directory, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = load(tiny.path, share=model)
    begin = Watcher.__init__

    def beginning(watcher: Watcher, *arguments: Any) -> None:
        begin(watcher, *arguments)
        closed.close()

    monkeypatch.setattr(Watcher, "__init__", beginning)
    assert not closed.watch(directory.path, SOON).alive


def test_a_watcher_that_is_waiting_ends_with_its_model(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path)
    watcher = model.watch(directory.path, 1e9)
    assert eventually(lambda: watcher._queue._initial_names is not None)
    del model
    gc.collect()
    assert eventually(lambda: not watcher.alive)


def test_a_forked_child_does_not_watch(model: Model, directory: Directory) -> None:
    with model.watch(directory.path, SOON) as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a lock that nobody releases ends the child
            ended = not watcher.alive and watcher.stop() and serves(model, 1)
            model.swap(directory.write(2))
            os._exit(0 if ended and serves(model, 2) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert watcher.alive


ENDS = """
import sys, time
from weightswap_runtime import load
model = load(sys.argv[1])
watcher = model.watch(sys.argv[2], 0.01, start="all")
while model.generation is None:
    time.sleep(0.01)
print(model.generation)
"""


def test_the_end_of_the_interpreter_ends_the_watching(tiny: TinyArtifact, directory: Directory) -> None:
    for seed in range(20):
        directory.write(seed)
    command = [warm.python(), "-e", "-c", ENDS, str(tiny.path), str(directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
