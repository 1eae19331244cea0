"""Failures of an intake: what it skips and what it retries, with a clock that the tests control."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.intake_rig import INTERVAL, IntakeRig
from weightswap_runtime import (
    ModelFailed,
    OutOfMemory,
    StageCancelled,
    StagingBusy,
    SwapError,
    WaitTimeout,
    WeightFileError,
)
from weightswap_runtime.following import directory as header_peek
from weightswap_runtime.following.intake import LONGEST_DELAY, Intake

FORGED = "v2\nrolled back for operator: x\x1b[2J"


def test_names_with_line_ends_are_escaped_in_texts(rig: IntakeRig) -> None:
    rig.write("v1", 1)
    rig.look()
    rig.delta(FORGED, 8, 9)
    rig.look()
    waiting = str(rig.intake.waiting[f"{FORGED}.safetensors"])
    rig.write(FORGED.replace("2", "3", 1), 3)
    rig.look()
    superseded = str(rig.intake.skipped[f"{FORGED}.safetensors"])
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
def test_transient_failures_are_retried_after_growing_pauses(error: Exception, rig: IntakeRig) -> None:
    rig.look()
    rig.write("v1", 1)
    rig.errors["v1"] = [error] * 10
    tries: list[float] = []
    for _ in range(400):
        before = len(rig.attempts)
        rig.look()
        tries += [rig.now] * (len(rig.attempts) - before)
    gaps = [later - sooner for sooner, later in pairwise(tries)]
    assert gaps == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(10)]
    assert rig.committed == ["v1"]
    assert rig.reports == []
    assert rig.intake.last_error is None


def test_a_file_that_cannot_be_read_does_not_keep_a_later_one(rig: IntakeRig) -> None:
    rig.look()
    rig.write("v1", 1)
    rig.write("v2", 2)
    rig.errors["v1"] = [WeightFileError("cannot be read")]
    rig.look()
    assert (rig.attempts, rig.committed) == (["v1", "v2"], ["v2"])
    assert rig.reports == [("skipped v1", "superseded")]


def test_a_busy_model_is_tried_once_per_look(rig: IntakeRig) -> None:
    rig.look()
    for seed in (1, 2, 3):
        rig.write(f"v{seed}", seed)
        rig.errors[f"v{seed}"] = [StagingBusy("busy")]
    rig.look()
    assert rig.attempts == ["v1"]
    for _ in range(3):
        rig.look()
    assert rig.attempts == ["v1", "v1", "v2", "v2", "v3", "v3"]
    assert (rig.committed, rig.reports) == (["v1", "v2", "v3"], [])


def test_a_file_that_cannot_be_opened_is_waited_for(rig: IntakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.look()
    path = rig.write("v1", 1)
    original = os.open

    def refuse(name: object, *args: int, **kwargs: int) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(name, *args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(3):
        rig.look()
    monkeypatch.undo()
    rig.look(60)
    assert rig.committed == ["v1"]
    assert rig.reports == []


@pytest.mark.parametrize("name", ["v1.goldens.safetensors", "v1.safetensors.sig"])
def test_what_is_beside_a_refused_file_decides_too(name: str, rig: IntakeRig) -> None:
    beside = rig.folder / name
    rig.look()
    rig.write("v1", 1)
    rig.errors["v1"] = [SwapError("refused") for _ in range(3)]
    for step in (lambda: None, lambda: beside.write_bytes(b"wrong"), lambda: beside.write_bytes(b"as wrong")):
        step()
        before = len(rig.attempts)
        for _ in range(3):
            rig.look()
        assert len(rig.attempts) == before + 1
    beside.unlink()
    rig.look()
    assert (rig.committed, rig.reports) == (["v1"], [("skipped v1", "SwapError")])
    assert rig.intake.skipped == {}


@pytest.mark.parametrize("name", ["goldens.safetensors", "safetensors.sig"])
def test_what_comes_beside_a_file_that_was_taken_or_passed_over_is_not_told_of(name: str, rig: IntakeRig) -> None:
    rig.errors["v2"] = [SwapError("refused")]
    for seed in (1, 2, 3):
        rig.write(f"v{seed}", seed)
        rig.look()
    told, tries = list(rig.reports), len(rig.attempts)
    for seed in (1, 2, 3):
        (rig.folder / f"v{seed}.{name}").write_bytes(b"late")
        rig.look()
    assert (rig.committed, rig.reports, len(rig.attempts)) == (["v1", "v3"], told, tries)


def test_a_file_that_waits_for_its_next_try_is_tried_at_once_when_its_signature_comes(rig: IntakeRig) -> None:
    rig.look()
    rig.errors["v1"] = [WeightFileError("cannot be read")] * 5
    rig.write("v1", 1)
    for _ in range(5):
        rig.look(400)
    (rig.folder / "v1.safetensors.sig").write_bytes(b"now")
    rig.look(0.1)
    assert rig.committed == ["v1"]


def other_graph(rig: IntakeRig) -> None:
    rig.tiny.write(rig.folder / "v1.safetensors", rig.tiny.values(1), graph_id="0" * 64)


def other_tensors(rig: IntakeRig) -> None:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"nothing": torch.zeros(2)}, rig.folder / "v1.safetensors")


def no_header(rig: IntakeRig) -> None:
    (rig.folder / "v1.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0none" + bytes(64))


@pytest.mark.parametrize(
    ("write", "why"), [(other_graph, "GraphMismatch"), (other_tensors, "WeightsMismatch"), (no_header, "damaged")]
)
def test_what_never_fits_is_skipped(write: Callable[[IntakeRig], None], why: str, rig: IntakeRig) -> None:
    rig.look()
    write(rig)
    for _ in range(10):
        rig.look(100)
    assert rig.attempts == ["v1"]
    assert rig.reports == [("skipped v1", why)]


def test_an_unreachable_directory_is_told_once_and_asked_ever_more_rarely(rig: IntakeRig) -> None:
    rig.unlisted = True
    delays = [rig.look() for _ in range(9)]
    assert delays == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(9)]
    assert rig.reports == [("unreachable run", "unreadable")]
    assert isinstance(rig.intake.last_error, WeightFileError)
    rig.unlisted = False
    rig.write("v1", 1)
    assert rig.look() == INTERVAL
    assert (rig.committed, rig.intake.last_error) == (["v1"], None)
    rig.unlisted = True
    assert rig.look() == INTERVAL
    assert len(rig.reports) == 2


def test_an_interval_above_the_longest_delay_stays(rig: IntakeRig) -> None:
    intake = Intake("run", rig._list, 1000.0, "all", lambda: rig.now)
    rig.unlisted = True
    assert {intake.look(rig) for _ in range(2000)} == {1000.0}


def test_nothing_is_opened_after_the_stop(rig: IntakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write("v1", 1)
    rig.stopped = True
    opened: list[str | Path] = []
    monkeypatch.setattr(header_peek, "open_weights", lambda path, *_: opened.append(path))
    rig.look()
    assert (opened, rig.reports, rig.intake.last_error) == ([], [], None)


def test_a_stop_while_a_header_is_waited_for_ends_the_look(rig: IntakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.look()
    rig.write("v1", 1)
    rig.write("v2", 2)

    def stalled(path: str | Path, check: Callable[[], None], most: int) -> None:
        rig.stopped = True
        check()

    monkeypatch.setattr(header_peek, "open_weights", stalled)
    rig.look()
    assert (rig.attempts, rig.reports, rig.intake.last_error) == ([], [], None)
    monkeypatch.undo()
    rig.stopped = False
    rig.look()
    assert rig.committed == ["v1", "v2"]


def test_a_cancelled_staging_ends_the_look(rig: IntakeRig) -> None:
    rig.look()
    rig.write("v1", 1)
    rig.write("v2", 2)
    rig.errors["v1"] = [StageCancelled("stopped")]
    rig.look()
    assert (rig.attempts, rig.reports, rig.intake.last_error) == (["v1"], [], None)
