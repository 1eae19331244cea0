"""Failures of an intake: what it skips and what it retries, with a clock that the tests control."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.desk import INTERVAL, Desk
from weightswap_runtime import (
    DamagedFile,
    GraphMismatch,
    LeaseTimeout,
    ModelFailed,
    OutOfMemory,
    StageCancelled,
    StagingBusy,
    WeightFileError,
    WeightsMismatch,
)
from weightswap_runtime.live.watching import header_peek
from weightswap_runtime.live.watching.intake import LONGEST_DELAY, Intake

FORGED = "v2\nrolled back for operator: x\x1b[2J"


def test_names_with_line_ends_are_escaped_in_texts(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta(FORGED, 8, 9)
    desk.look()
    waiting = str(desk.intake.waiting[f"{FORGED}.safetensors"])
    desk.write(FORGED.replace("2", "3", 1), 3)
    desk.look()
    superseded = str(desk.intake.skipped[f"{FORGED}.safetensors"])
    assert waiting.isprintable()
    assert superseded.isprintable()
    assert r"v2\nrolled back" in waiting
    assert r"v3\nrolled back" in superseded


TRANSIENT = [
    StagingBusy("busy"),
    LeaseTimeout("pinned"),
    OutOfMemory("full"),
    ModelFailed("half-way"),
    RuntimeError("unforeseen"),
    WeightFileError("cannot be read"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_transient_failures_are_retried_after_growing_pauses(error: Exception, desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.errors["v1"] = [error] * 10
    tries: list[float] = []
    for _ in range(400):
        before = len(desk.tries)
        desk.look()
        tries += [desk.now] * (len(desk.tries) - before)
    gaps = [later - sooner for sooner, later in pairwise(tries)]
    assert gaps == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(10)]
    assert desk.taken == ["v1"]
    assert desk.told == []
    assert desk.intake.last_error is None


def test_a_file_that_cannot_be_read_does_not_keep_a_later_one(desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.write("v2", 2)
    desk.errors["v1"] = [WeightFileError("cannot be read")]
    desk.look()
    assert (desk.tries, desk.taken) == (["v1", "v2"], ["v2"])
    assert desk.told == [("skipped v1", "Superseded")]


def test_a_busy_model_is_tried_once_per_look(desk: Desk) -> None:
    desk.look()
    for seed in (1, 2, 3):
        desk.write(f"v{seed}", seed)
        desk.errors[f"v{seed}"] = [StagingBusy("busy")]
    desk.look()
    assert desk.tries == ["v1"]
    for _ in range(3):
        desk.look()
    assert desk.tries == ["v1", "v1", "v2", "v2", "v3", "v3"]
    assert (desk.taken, desk.told) == (["v1", "v2", "v3"], [])


def test_a_file_that_cannot_be_opened_is_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.look()
    path = desk.write("v1", 1)
    original = os.open

    def refuse(name: object, *args: int, **kwargs: int) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(name, *args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(3):
        desk.look()
    monkeypatch.undo()
    desk.look(60)
    assert desk.taken == ["v1"]
    assert desk.told == []


def other_graph(desk: Desk) -> None:
    desk.tiny.write(desk.folder / "v1.safetensors", desk.tiny.values(1), graph_id="0" * 64)


def other_tensors(desk: Desk) -> None:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"nothing": torch.zeros(2)}, desk.folder / "v1.safetensors")


def no_header(desk: Desk) -> None:
    (desk.folder / "v1.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0none" + bytes(64))


@pytest.mark.parametrize(
    ("write", "error"), [(other_graph, GraphMismatch), (other_tensors, WeightsMismatch), (no_header, DamagedFile)]
)
def test_what_never_fits_is_skipped(write: Callable[[Desk], None], error: type, desk: Desk) -> None:
    desk.look()
    write(desk)
    for _ in range(10):
        desk.look(100)
    assert desk.tries == ["v1"]
    assert desk.told == [("skipped v1", error.__name__)]


def test_an_unreachable_directory_is_told_once_and_asked_ever_more_rarely(desk: Desk) -> None:
    desk.unlisted = True
    delays = [desk.look() for _ in range(9)]
    assert delays == [min(INTERVAL * 2**attempt, LONGEST_DELAY) for attempt in range(9)]
    assert desk.told == [("unreachable run", "WeightFileError")]
    assert isinstance(desk.intake.last_error, WeightFileError)
    desk.unlisted = False
    desk.write("v1", 1)
    assert desk.look() == INTERVAL
    assert (desk.taken, desk.intake.last_error) == (["v1"], None)
    desk.unlisted = True
    assert desk.look() == INTERVAL
    assert len(desk.told) == 2


def test_an_interval_above_the_longest_delay_stays(desk: Desk) -> None:
    intake = Intake("run", desk._list, 1000.0, "all", lambda: desk.now)
    desk.unlisted = True
    assert {intake.look(desk) for _ in range(2000)} == {1000.0}


def test_nothing_is_opened_after_the_stop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("v1", 1)
    desk.stopped = True
    opened: list[str | Path] = []
    monkeypatch.setattr(header_peek, "open_weights", lambda path, check: opened.append(path))
    desk.look()
    assert (opened, desk.told, desk.intake.last_error) == ([], [], None)


def test_a_stop_while_a_header_is_waited_for_ends_the_look(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.write("v2", 2)

    def stalled(path: str | Path, check: Callable[[], None]) -> None:
        desk.stopped = True
        check()

    monkeypatch.setattr(header_peek, "open_weights", stalled)
    desk.look()
    assert (desk.tries, desk.told, desk.intake.last_error) == ([], [], None)
    monkeypatch.undo()
    desk.stopped = False
    desk.look()
    assert desk.taken == ["v1", "v2"]


def test_a_cancelled_staging_ends_the_look(desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.write("v2", 2)
    desk.errors["v1"] = [StageCancelled("stopped")]
    desk.look()
    assert (desk.tries, desk.told, desk.intake.last_error) == (["v1"], [], None)
