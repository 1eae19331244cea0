"""Watchers: the thread takes new files, calls its callback, and logs."""

from __future__ import annotations

import logging
import math
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, Directory, eventually, mark, somebody_swaps
from weightswap_runtime import Event, MissingExtra, Model, StagingBusy, Unsupported, Watcher, load, write_delta
from weightswap_runtime.following.file_queue import FileQueue
from weightswap_tools.commands.swap import print_event


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
        assert eventually(lambda: watcher.last_error is None)  # the commit comes before the watcher has noted it
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


@pytest.mark.usefixtures("_places")
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


def test_a_swap_by_hand_in_between_is_waited_for(model: Model, directory: Directory, tmp_path: Path) -> None:
    with model.watch(directory.path, SOON) as watcher:
        with model.stage(directory.tiny.write(tmp_path / "hand", directory.tiny.values(9))) as staged:
            directory.write(1)
            assert eventually(lambda: somebody_swaps(model))
            staged.commit()
        assert eventually(lambda: model.generation == 1 and watcher.last_error is None)
        assert serves(model, 1)


def test_the_options_are_those_of_a_swap(tiny: TinyArtifact, directory: Directory, weight_file: Any) -> None:
    model = load(tiny.path, weight_file(5))
    directory.tiny.write(directory.path / "v1.safetensors", tiny.values(1), graph_id="0" * 64)
    with model.watch(directory.path, SOON, only="bias", allow_other_graph=True, rate_limit=1e9, timeout=5):
        assert eventually(lambda: model.generation == 1)
    assert model.history[-1].kind == "partial"


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
            assert eventually(lambda: model.generation == 1 and watcher.skipped == {})
            assert serves(model, 3)
    finally:
        memory.rm("/watched", recursive=True)


def test_polls_keep_their_distance(model: Model, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    done = threading.Event()

    def wait(watcher: Watcher, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) >= 20:
            done.set()
            watcher.stop()

    monkeypatch.setattr(Watcher, "_wait", wait)
    polls: list[int] = []
    original = FileQueue.poll

    def poll(file_queue: FileQueue, target: Any) -> float:
        polls.append(1)
        if len(polls) % 2:
            raise RuntimeError("a poll's own")
        return original(file_queue, target)

    monkeypatch.setattr(FileQueue, "poll", poll)
    directory.damaged(1)
    watcher = model.watch(directory.path, 7.0)
    assert done.wait(120)
    assert eventually(lambda: not watcher.alive)
    assert (waits, len(polls)) == ([7.0] * 20, 20)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("interval", value) for value in (0, -1.0, math.nan, math.inf, "5", True)),
        ("start", "last"),
        *(("keys", value) for value in ("names", [])),
        *(("rate_limit", value) for value in (0, 10**400)),
        *(("timeout", value) for value in (math.nan, "5")),
        ("only", "bias"),
        *(("directory", value) for value in (7, "nothing-known://x")),
    ],
)
def test_invalid_arguments_are_refused_at_once(option: str, value: Any, tiny: TinyArtifact, tmp_path: Path) -> None:
    model = load(tiny.path)
    threads = threading.active_count()
    with pytest.raises(Unsupported, match=option if option == "only" else None) as caught:
        model.watch(**({"directory": tmp_path} | {option: value}))
    assert option in ("only", "directory") or f"{option}={value!r}"[:20] in str(caught.value)
    assert threading.active_count() <= threads  # those of earlier tests may end


def test_a_url_without_the_extra_is_refused_at_once(tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"watching s3:// URLs .* needs the extra `remote`"):
        load(tiny.path).watch("s3://bucket/run")


def test_what_does_not_fit_is_listed_once_in_the_log(
    model: Model, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "weightswap")
    odd = {f"odd{number}": torch.zeros(1) for number in range(60)}
    safetensors.torch.save_file(odd, directory.path / ".new")
    (directory.path / ".new").rename(directory.path / "v1.safetensors")
    with model.watch(directory.path, SOON) as watcher:
        assert eventually(lambda: bool(watcher.skipped))
    logged = [record.getMessage() for record in caplog.records]
    assert [message.split()[0] for message in logged] == ["staging", "refused", "skipped"]
    assert [message.count("odd0: unexpected") for message in logged] == [0, 1, 0]
    assert logged[2].endswith("v1.safetensors: refused, 64 problems")
