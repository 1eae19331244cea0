"""Failures of a file queue: what it skips and what it retries, with a clock that the tests control."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.file_queue_rig import INTERVAL, FileQueueRig
from weightswap_runtime import (
    ModelFailed,
    OutOfMemory,
    StageCancelled,
    StagingBusy,
    SwapError,
    WaitTimeout,
    WeightFileError,
)
from weightswap_runtime.following import directory
from weightswap_runtime.following.file_queue import LONGEST_DELAY, FileQueue

FORGED = "v2\nrolled back for operator: x\x1b[2J"


def test_names_with_line_ends_are_escaped_in_texts(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta(FORGED, 8, 9)
    rig.poll()
    waiting = str(rig.file_queue.waiting[f"{FORGED}.safetensors"])
    rig.write(FORGED.replace("2", "3", 1), 3)
    rig.poll()
    superseded = str(rig.file_queue.skipped[f"{FORGED}.safetensors"])
    assert waiting.isprintable()
    assert superseded.isprintable()
    assert r"v2\nrolled back" in waiting
    assert r"v3\nrolled back" in superseded


TRANSIENT = [
    StagingBusy("busy"),
    WaitTimeout("pinned"),
    OutOfMemory("full"),
    ModelFailed("half-way"),
    RuntimeError("unforeseen"),
    WeightFileError("cannot be read"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_transient_failures_are_retried_after_growing_pauses(error: Exception, rig: FileQueueRig) -> None:
    rig.poll()
    rig.write("v1", 1)
    rig.errors["v1"] = [error] * 10
    tries: list[float] = []
    for _ in range(400):
        before = len(rig.attempts)
        rig.poll()
        tries += [rig.now] * (len(rig.attempts) - before)
    gaps = [later - sooner for sooner, later in pairwise(tries)]
    assert gaps == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(10)]
    assert rig.committed == ["v1"]
    assert rig.reports == []
    assert rig.file_queue.last_error is None


def test_a_file_that_cannot_be_read_does_not_keep_a_later_one(rig: FileQueueRig) -> None:
    rig.poll()
    rig.write("v1", 1)
    rig.write("v2", 2)
    rig.errors["v1"] = [WeightFileError("cannot be read")]
    rig.poll()
    assert (rig.attempts, rig.committed) == (["v1", "v2"], ["v2"])
    assert rig.reports == [("skipped v1", "superseded")]


def test_a_busy_model_is_tried_once_per_poll(rig: FileQueueRig) -> None:
    rig.poll()
    for seed in (1, 2, 3):
        rig.write(f"v{seed}", seed)
        rig.errors[f"v{seed}"] = [StagingBusy("busy")]
    rig.poll()
    assert rig.attempts == ["v1"]
    for _ in range(3):
        rig.poll()
    assert rig.attempts == ["v1", "v1", "v2", "v2", "v3", "v3"]
    assert (rig.committed, rig.reports) == (["v1", "v2", "v3"], [])


def test_a_file_that_cannot_be_opened_is_waited_for(rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.poll()
    path = rig.write("v1", 1)
    original = os.open

    def refuse(name: object, *args: int, **kwargs: int) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(name, *args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(3):
        rig.poll()
    monkeypatch.undo()
    rig.poll(60)
    assert rig.committed == ["v1"]
    assert rig.reports == []


@pytest.mark.parametrize("name", ["v1.goldens.safetensors", "v1.safetensors.sig"])
def test_what_is_beside_a_refused_file_decides_too(name: str, rig: FileQueueRig) -> None:
    beside = rig.folder / name
    rig.poll()
    rig.write("v1", 1)
    rig.errors["v1"] = [SwapError("refused") for _ in range(3)]
    for step in (lambda: None, lambda: beside.write_bytes(b"wrong"), lambda: beside.write_bytes(b"as wrong")):
        step()
        before = len(rig.attempts)
        for _ in range(3):
            rig.poll()
        assert len(rig.attempts) == before + 1
    beside.unlink()
    rig.poll()
    assert (rig.committed, rig.reports) == (["v1"], [("skipped v1", "SwapError")])
    assert rig.file_queue.skipped == {}


@pytest.mark.parametrize("name", ["goldens.safetensors", "safetensors.sig"])
def test_what_comes_beside_a_file_that_was_taken_or_passed_over_is_not_told_of(name: str, rig: FileQueueRig) -> None:
    rig.errors["v2"] = [SwapError("refused")]
    for seed in (1, 2, 3):
        rig.write(f"v{seed}", seed)
        rig.poll()
    told, tries = list(rig.reports), len(rig.attempts)
    for seed in (1, 2, 3):
        (rig.folder / f"v{seed}.{name}").write_bytes(b"late")
        rig.poll()
    assert (rig.committed, rig.reports, len(rig.attempts)) == (["v1", "v3"], told, tries)


def test_a_file_that_waits_for_its_next_try_is_tried_at_once_when_its_signature_comes(rig: FileQueueRig) -> None:
    rig.poll()
    rig.errors["v1"] = [WeightFileError("cannot be read")] * 5
    rig.write("v1", 1)
    for _ in range(5):
        rig.poll(400)
    (rig.folder / "v1.safetensors.sig").write_bytes(b"now")
    rig.poll(0.1)
    assert rig.committed == ["v1"]


def other_graph(rig: FileQueueRig) -> None:
    rig.tiny.write(rig.folder / "v1.safetensors", rig.tiny.values(1), graph_id="0" * 64)


def other_tensors(rig: FileQueueRig) -> None:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"nothing": torch.zeros(2)}, rig.folder / "v1.safetensors")


def no_header(rig: FileQueueRig) -> None:
    (rig.folder / "v1.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0none" + bytes(64))


@pytest.mark.parametrize(
    ("write", "why"), [(other_graph, "GraphMismatch"), (other_tensors, "WeightsMismatch"), (no_header, "damaged")]
)
def test_what_never_fits_is_skipped(write: Callable[[FileQueueRig], None], why: str, rig: FileQueueRig) -> None:
    rig.poll()
    write(rig)
    for _ in range(10):
        rig.poll(100)
    assert rig.attempts == ["v1"]
    assert rig.reports == [("skipped v1", why)]


def test_an_unreachable_directory_is_told_once_and_asked_ever_more_rarely(rig: FileQueueRig) -> None:
    rig.unlisted = True
    delays = [rig.poll() for _ in range(9)]
    assert delays == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(9)]
    assert rig.reports == [("unreachable run", "unreadable")]
    assert isinstance(rig.file_queue.last_error, WeightFileError)
    rig.unlisted = False
    rig.write("v1", 1)
    assert rig.poll() == INTERVAL
    assert (rig.committed, rig.file_queue.last_error) == (["v1"], None)
    rig.unlisted = True
    assert rig.poll() == INTERVAL
    assert len(rig.reports) == 2


def test_an_interval_above_the_longest_delay_stays(rig: FileQueueRig) -> None:
    file_queue = FileQueue("run", rig._list, 1000.0, "all", lambda: rig.now)
    rig.unlisted = True
    assert {file_queue.poll(rig) for _ in range(2000)} == {1000.0}


def test_nothing_is_opened_after_the_stop(rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write("v1", 1)
    rig.stopped = True
    opened: list[str | Path] = []
    monkeypatch.setattr(directory, "open_weights", lambda path, *_: opened.append(path))
    rig.poll()
    assert (opened, rig.reports, rig.file_queue.last_error) == ([], [], None)


def test_a_stop_while_a_header_is_waited_for_ends_the_poll(rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.poll()
    rig.write("v1", 1)
    rig.write("v2", 2)

    def stalled(path: str | Path, check: Callable[[], None], most: int) -> None:
        rig.stopped = True
        check()

    monkeypatch.setattr(directory, "open_weights", stalled)
    rig.poll()
    assert (rig.attempts, rig.reports, rig.file_queue.last_error) == ([], [], None)
    monkeypatch.undo()
    rig.stopped = False
    rig.poll()
    assert rig.committed == ["v1", "v2"]


def test_a_cancelled_staging_ends_the_poll(rig: FileQueueRig) -> None:
    rig.poll()
    rig.write("v1", 1)
    rig.write("v2", 2)
    rig.errors["v1"] = [StageCancelled("stopped")]
    rig.poll()
    assert (rig.attempts, rig.reports, rig.file_queue.last_error) == (["v1"], [], None)
