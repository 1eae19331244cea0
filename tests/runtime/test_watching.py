"""Watching in a thread: it takes what appears, ends when it is told to, and holds nothing that nobody needs."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.tiny import TinyArtifact, serves
from weightswap_runtime import (
    Event,
    MissingExtra,
    Model,
    StageCancelled,
    StagingBusy,
    Superseded,
    Unsupported,
    Watcher,
    load,
    watching,
    write_delta,
)
from weightswap_runtime.cli.watching import print_event
from weightswap_runtime.following import Follower
from weightswap_runtime.job import Job
from weightswap_runtime.store import Store

SOON = 0.01


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(SOON)
    return True


class Directory:
    """A directory into which weight files are renamed."""

    def __init__(self, tiny: TinyArtifact, path: Path) -> None:
        self.tiny = tiny
        self.path = path
        path.mkdir()

    def write(self, seed: int) -> Path:
        return self.tiny.write(self.path / f"v{seed}.safetensors", self.tiny.values(seed))

    def damaged(self, seed: int) -> Path:
        path = self.tiny.write(self.path / "hidden", self.tiny.values(seed))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        return path.rename(self.path / f"v{seed}.safetensors")


@pytest.fixture
def directory(tiny: TinyArtifact, tmp_path: Path) -> Directory:
    return Directory(tiny, tmp_path / "run")


@pytest.fixture
def model(tiny: TinyArtifact, residency: Any) -> Model:
    return load(tiny.path, residency=residency)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Stagings go on until they are cancelled; the event says that one has begun."""
    begun = threading.Event()

    def stage(store: Store, member: object, request: object, timeout: object, job: Job) -> None:
        begun.set()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            job.check()
            time.sleep(SOON)

    monkeypatch.setattr(Store, "stage", stage)
    yield begun
    monkeypatch.undo()


def test_each_new_file_is_served_and_damage_is_skipped(model: Model, directory: Directory) -> None:
    events: list[Event] = []
    everything: list[Event] = []
    model.listen(everything.append)
    with model.watch(directory.path, SOON, callback=events.append, by="trainer") as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        assert serves(model, 1)
        directory.damaged(2)
        assert eventually(lambda: bool(watcher.skipped))
        assert serves(model, 1)
        directory.write(3)
        assert eventually(lambda: model.generation == 1)
        assert serves(model, 3)
        assert list(watcher.skipped) == ["v2.safetensors"]
        assert watcher.last_error is None
        assert watcher.alive
    assert not watcher.alive
    assert [event.kind for event in events] == [
        *("staging", "staged", "committed"),
        *("staging", "refused", "skipped"),
        *("staging", "staged", "committed"),
    ]
    assert {event.by for event in events} == {"trainer"}
    assert events == everything
    assert model.history[-1].source == str(directory.path / "v3.safetensors")


def test_the_callback_is_told_only_what_the_watching_does(model: Model, directory: Directory, tmp_path: Path) -> None:
    events: list[Event] = []
    with model.watch(directory.path, SOON, callback=events.append):
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        model.swap(directory.tiny.write(tmp_path / "hand", directory.tiny.values(2)), busy="wait")
        directory.write(3)
        assert eventually(lambda: model.generation == 2)
    assert {Path(event.source).stem for event in events} == {"v1", "v3"}


@pytest.mark.parametrize("error", [ValueError("a callback's own"), SystemExit(3)], ids=["error", "exit"])
def test_a_callback_that_fails_ends_nothing(error: BaseException, model: Model, directory: Directory) -> None:
    def fails(event: Event) -> None:
        raise error

    with model.watch(directory.path, SOON, callback=fails) as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        directory.write(2)
        assert eventually(lambda: model.generation == 1)
        assert watcher.last_error is None


def test_a_listener_that_would_exit_does_not_end_the_watching(model: Model, directory: Directory) -> None:
    raised: list[SystemExit] = []

    def exits(event: Event) -> None:
        if event.kind == "committed":
            raised.append(SystemExit(3))
            raise raised[-1]

    stop = model.listen(exits)
    with model.watch(directory.path, SOON) as watcher:
        directory.write(1)
        assert eventually(lambda: mark(watcher) == "v1.safetensors")
        assert len(raised) == 1
        stop()
        directory.write(2)
        assert eventually(lambda: serves(model, 2))
        assert model.generation == 1


def test_two_watchers_of_a_directory_commit_each_file_once(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path)
    events: list[Event] = []
    model.listen(events.append)
    watchers = [model.watch(directory.path, SOON) for _ in range(2)]
    for seed in range(5):
        directory.write(seed)
        # both have looked at it, one of them while the other took it
        assert eventually(lambda: all(mark(watcher) == f"v{seed}.safetensors" for watcher in watchers))  # noqa: B023
    for watcher in watchers:
        assert watcher.stop(30)
    assert model.generation == 4
    assert [event.kind for event in events] == ["staging", "staged", "committed"] * 5
    model.rollback()
    assert serves(model, 3)


def test_a_callback_that_swaps_is_refused_at_once(model: Model, directory: Directory, weight_file: Any) -> None:
    refused: list[BaseException] = []

    def swap(event: Event) -> None:
        if event.kind == "committed":
            try:
                model.swap(weight_file(9))
            except StagingBusy as error:
                refused.append(error)

    with model.watch(directory.path, SOON, callback=swap) as watcher:
        directory.write(1)
        assert eventually(lambda: len(refused) == 1)
        model.swap(weight_file(2))
        assert watcher.stop(30)
    assert serves(model, 2)


def test_a_file_is_taken_when_its_goldens_are_whole(model: Model, directory: Directory) -> None:
    goldens = directory.path / "v1.goldens.safetensors"
    goldens.write_bytes(b"cut off")
    with model.watch(directory.path, SOON) as watcher:
        path = directory.write(1)
        assert eventually(lambda: path.name in watcher.skipped)
        goldens.unlink()
        assert eventually(lambda: model.generation == 0)


def test_a_part_of_weights_that_were_rolled_back_gives_others(
    tiny: TinyArtifact, directory: Directory, weight_file: Any, residency: Any
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    with model.watch(directory.path, SOON, start="all", only="bias") as watcher:
        model.swap(weight_file(1))
        model.rollback()
        path = directory.write(1)
        assert eventually(lambda: mark(watcher) == path.name)
    assert [receipt.kind for receipt in model.history] == ["full", "full", "rollback", "partial"]


def mark(watcher: Watcher) -> str | None:
    taken = watcher._follower._mark
    return taken.entry.name if taken else None


def test_what_another_has_put_in_while_the_turn_was_waited_for_is_not_put_in_again(
    model: Model, directory: Directory, tmp_path: Path
) -> None:
    events: list[Event] = []
    with model._store.swapping:
        watcher = model.watch(directory.path, SOON, callback=events.append)
        path = directory.write(1)
        assert eventually(lambda: looked_at(watcher, path.name))
        model.stage(path).commit()
    assert eventually(lambda: mark(watcher) == path.name)
    assert watcher.stop(30)
    assert (model.generation, events) == (0, [])


def looked_at(watcher: Watcher, name: str) -> bool:
    file = watcher._follower._files.get(name)
    return file is not None and file.glance is not None


def test_weights_that_were_rolled_back_stay_away_until_others_come(
    tiny: TinyArtifact, directory: Directory, residency: Any
) -> None:
    model = load(tiny.path, residency=residency, keep_previous="host")
    events: list[Event] = []
    with model.watch(directory.path, SOON, start="all", callback=events.append) as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        second = directory.write(2)
        assert eventually(lambda: mark(watcher) == second.name)
        model.rollback(by="operator", busy="wait")
        for time_ns in (1, 2):
            os.utime(second, ns=(time_ns, time_ns))
            assert eventually(lambda: [event.kind for event in events].count("skipped") == time_ns)  # noqa: B023
        assert "rolled back by operator (generation 2)" in str(watcher.skipped["v2.safetensors"])
        assert isinstance(events[-1].error, Superseded)
        assert (model.generation, serves(model, 1)) == (2, True)
        directory.write(3)
        assert eventually(lambda: model.generation == 3)
        assert serves(model, 3)


def test_weights_that_came_back_after_a_rollback_are_wanted(model: Model, directory: Directory, tmp_path: Path) -> None:
    by_hand = [directory.tiny.write(tmp_path / f"{seed}", directory.tiny.values(seed)) for seed in range(4)]
    model.swap(by_hand[1])
    model.swap(by_hand[2])
    with model.watch(directory.path, SOON, start="all"):
        model.swap(by_hand[0], busy="wait")
        if model.residency == "double":
            model.rollback(busy="wait")
        model.swap(by_hand[0], busy="wait")
        model.swap(by_hand[3], busy="wait")
        directory.write(0)
        assert eventually(lambda: serves(model, 0))


def test_a_rollback_before_the_watching_began_says_nothing(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path, directory.write(1))
    model.swap(directory.write(2))
    model.rollback()
    with model.watch(directory.path, SOON):
        assert eventually(lambda: serves(model, 2))


def test_a_file_without_digests_is_not_put_back_after_a_rollback(tiny: TinyArtifact, directory: Directory) -> None:
    import safetensors.torch

    model = load(tiny.path, directory.write(1), keep_previous="host")
    path = directory.path / "v2.safetensors"
    values = {key: value.clone() for key, value in tiny.values(2).items()}
    with model.watch(directory.path, SOON) as watcher:
        safetensors.torch.save_file(values, path)
        assert eventually(lambda: mark(watcher) == path.name)
        model.rollback(busy="wait")
        os.utime(path, ns=(1, 1))
        assert eventually(lambda: path.name in watcher.skipped)
        assert serves(model, 1)


def test_a_delta_that_waits_is_told(tiny: TinyArtifact, directory: Directory, tmp_path: Path) -> None:
    model = load(tiny.path, directory.write(1))
    files = [tiny.write(tmp_path / f"{seed}", tiny.values(seed)) for seed in (2, 3)]
    write_delta(*files, directory.path / "v3.safetensors")
    events: list[Event] = []
    with model.watch(directory.path, SOON, callback=events.append) as watcher:
        assert eventually(lambda: list(watcher.waiting) == ["v3.safetensors"])
        model.swap(files[0], busy="wait")
        assert eventually(lambda: serves(model, 3))
        assert eventually(lambda: not watcher.waiting)
    assert [event.kind for event in events] == ["waiting", "staging", "staged", "committed"]
    assert str(events[0]).startswith(f"waiting for watch: {directory.path / 'v3.safetensors'}: BaseMismatch: ")


def test_a_name_cannot_forge_a_line_of_the_log(
    model: Model, directory: Directory, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "weightswap.events")
    path = directory.path / "v1\nrolled back for operator\x1b[2J.safetensors"
    directory.damaged(1).rename(path)
    with model.watch(directory.path, SOON, callback=print_event) as watcher:
        assert eventually(lambda: path.name in watcher.skipped)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["staging", "refused", "skipped"]
    assert all(line.isprintable() and r"v1\nrolled back" in line for line in printed)
    logged = [record.getMessage() for record in caplog.records if record.name == "weightswap.events"]
    assert len(logged) == 2
    assert not any(line.startswith("rolled back") for text in logged for line in text.splitlines())


def test_a_callback_may_stop_the_watching(model: Model, directory: Directory) -> None:
    watchers: list[Watcher] = []
    directory.write(1)
    started = threading.Event()

    def stop(event: Event) -> None:
        if event.kind == "committed":
            assert started.wait(60)
            watchers[0].stop()

    watchers.append(model.watch(directory.path, SOON, callback=stop))
    started.set()
    assert eventually(lambda: not watchers[0].alive)
    assert serves(model, 1)


def test_stop_cancels_a_long_staging(model: Model, directory: Directory, held: threading.Event) -> None:
    events: list[Event] = []
    watcher = model.watch(directory.path, SOON, callback=events.append)
    directory.write(1)
    assert held.wait(60)
    assert watcher.stop(30)
    assert watcher.stop()
    assert [event.kind for event in events] == ["staging", "cancelled"]
    assert isinstance(events[1].error, StageCancelled)
    assert (model.generation, watcher.last_error, repr(watcher)) == (
        None,
        None,
        f"Watcher({str(directory.path)!r}, stopped)",
    )


def test_stop_does_not_wait_for_a_swap_by_hand(model: Model, directory: Directory) -> None:
    directory.write(1)
    with model._store.swapping:
        watcher = model.watch(directory.path, SOON)
        assert eventually(lambda: watcher._follower._old is not None)
        assert watcher.stop(30)
    assert model.generation is None


def test_stop_does_not_wait_for_a_staging_by_hand(model: Model, directory: Directory, tmp_path: Path) -> None:
    directory.write(1)
    with model.stage(directory.tiny.write(tmp_path / "hand", directory.tiny.values(9))):
        watcher = model.watch(directory.path, SOON)
        assert eventually(model._store.swapping.locked)
        assert watcher.stop(30)
    assert model.generation is None


def test_a_swap_by_hand_in_between_is_waited_for(model: Model, directory: Directory, tmp_path: Path) -> None:
    with model.watch(directory.path, SOON) as watcher:
        with model.stage(directory.tiny.write(tmp_path / "hand", directory.tiny.values(9))) as staged:
            directory.write(1)
            assert eventually(model._store.swapping.locked)
            staged.commit()
        assert eventually(lambda: model.generation == 1)
        assert serves(model, 1)
        assert watcher.last_error is None


def test_the_options_are_those_of_a_swap(tiny: TinyArtifact, directory: Directory, weight_file: Any) -> None:
    model = load(tiny.path, weight_file(5))
    directory.tiny.write(directory.path / "v1.safetensors", tiny.values(1), graph_id="0" * 64)
    with model.watch(directory.path, SOON, only="bias", allow_other_graph=True, rate_limit=1e9, timeout=5):
        assert eventually(lambda: model.generation == 1)
    assert model.history[-1].kind == "partial"


def test_watching_does_not_keep_a_model(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path)
    events: list[Event] = []
    watcher = model.watch(directory.path, SOON, callback=events.append)
    directory.write(1)
    directory.damaged(2)
    assert eventually(lambda: bool(watcher.skipped) and events[-1].kind == "skipped")
    gone = weakref.ref(model)
    del model
    assert eventually(lambda: gc.collect() >= 0 and gone() is None)
    assert eventually(lambda: not watcher.alive)


def test_a_watcher_that_is_waiting_ends_with_its_model(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path)
    watcher = model.watch(directory.path, 1e9)
    assert eventually(lambda: watcher._follower._old is not None)
    del model
    gc.collect()
    assert eventually(lambda: not watcher.alive)


def test_a_missing_directory_may_come_later(model: Model, tiny: TinyArtifact, tmp_path: Path) -> None:
    events: list[Event] = []
    with model.watch(tmp_path / "later", SOON, callback=events.append) as watcher:
        assert eventually(lambda: watcher.last_error is not None)
        directory = Directory(tiny, tmp_path / "later")
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        assert watcher.last_error is None
    assert [event.kind for event in events] == ["unreachable", "staging", "staged", "committed"]
    assert events[0].source == str(tmp_path / "later")


def test_a_url_is_watched(model: Model, tiny: TinyArtifact, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    raw = [tiny.write(tmp_path / "local", tiny.values(seed)).read_bytes() for seed in range(4)]
    memory.pipe("/watched/v1.safetensors", raw[1])
    try:
        with model.watch("memory://watched", SOON) as watcher:
            assert eventually(lambda: model.generation == 0)
            memory.pipe("/watched/v2.safetensors", raw[2][:-1] + bytes([raw[2][-1] ^ 1]))
            assert eventually(lambda: list(watcher.skipped) == ["v2.safetensors"])
            assert serves(model, 1)
            memory.pipe("/watched/v2.safetensors", raw[3])
            assert eventually(lambda: model.generation == 1)
            assert serves(model, 3)
            assert watcher.skipped == {}
    finally:
        memory.rm("/watched", recursive=True)


def test_looks_keep_their_distance(model: Model, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    done = threading.Event()

    def wait(loop: watching._Loop, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) >= 20:
            done.set()
            loop.stop()

    monkeypatch.setattr(watching._Loop, "_wait", wait)
    looks: list[int] = []
    original = Follower.look

    def look(follower: Follower, target: Any) -> float:
        looks.append(1)
        if len(looks) % 2:
            raise RuntimeError("a look's own")
        return original(follower, target)

    monkeypatch.setattr(Follower, "look", look)
    directory.damaged(1)
    watcher = model.watch(directory.path, 7.0)
    assert done.wait(60)
    assert eventually(lambda: not watcher.alive)
    assert (waits, len(looks)) == ([7.0] * 20, 20)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"interval": 0}, "interval=0: expected seconds, more than 0"),
        ({"interval": -1.0}, "interval=-1.0"),
        ({"interval": math.nan}, "interval=nan"),
        ({"interval": math.inf}, "interval=inf"),
        ({"interval": "5"}, "interval='5'"),
        ({"start": "last"}, 'start=\'last\': expected "newest", "all" or "new"'),
        ({"keys": "names"}, "keys='names'"),
        ({"rate_limit": 0}, "rate_limit=0"),
        ({"only": "bias"}, "only: a part of a set goes into weights that are served, and none are"),
        ({"directory": 7}, "expected a directory's path or URL, got a int"),
        ({"directory": "nothing-known://x"}, "nothing-known://"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    options: dict[str, Any], says: str, tiny: TinyArtifact, tmp_path: Path
) -> None:
    model = load(tiny.path)
    threads = threading.active_count()
    with pytest.raises(Unsupported) as caught:
        model.watch(**({"directory": tmp_path} | options))
    assert says in str(caught.value)
    assert threading.active_count() == threads


def test_a_url_without_the_extra_is_refused_at_once(tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match="remote"):
        load(tiny.path).watch("s3://bucket/run")


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


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_the_end_of_the_interpreter_ends_the_watching(tiny: TinyArtifact, directory: Directory) -> None:
    for seed in range(20):
        directory.write(seed)
    command = [sys.executable, "-c", ENDS, str(tiny.path), str(directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


SWAP = """
import signal

from weightswap_runtime.cli.swap import swap_command

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background, it is ignored
swap_command()
"""


@contextmanager
def watch_command(tiny: TinyArtifact, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-c", SWAP, str(tiny.path), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            break
    return lines


def test_the_command_prints_each_event_until_it_is_interrupted(
    tiny: TinyArtifact, directory: Directory, weight_file: Any
) -> None:
    first = weight_file(7)
    with watch_command(tiny, str(first), "--watch", str(directory.path), "--interval", "0.01") as process:
        lines = lines_until(process, "committed")
        directory.write(1)
        lines += lines_until(process, "committed")
        directory.damaged(2)
        lines += lines_until(process, "skipped")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert [line.split()[0].rstrip(":") for line in lines] == [
        *("staging", "staged", "committed"),
        *("staging", "staged", "committed"),
        *("staging", "refused", "skipped"),
    ]
    assert "DigestMismatch" in lines[-1]


def test_the_command_prints_json_lines(tiny: TinyArtifact, directory: Directory) -> None:
    directory.write(1)
    directory.damaged(2)
    arguments = ("--watch", str(directory.path), "--interval", "0.01", "--start", "all", "--json")
    with watch_command(tiny, *arguments) as process:
        lines = lines_until(process, "skipped")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    documents = [json.loads(line) for line in lines]
    assert [document["kind"] for document in documents] == [
        *("staging", "staged", "committed"),
        *("staging", "refused", "skipped"),
    ]
    assert documents[2]["receipt"]["generation"] == 0
    assert documents[5]["error"]["error"] == "DigestMismatch"
    assert len(documents[5]["error"]["problems"]) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "give files, or --watch DIR"),
        (("--watch", "x", "--interval", "0"), 2, "expected seconds, more than 0"),
        (("nowhere.safetensors", "--watch", "x"), 1, "cannot be opened"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], status: int, says: str, tiny: TinyArtifact) -> None:
    with watch_command(tiny, *arguments) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert says in err
