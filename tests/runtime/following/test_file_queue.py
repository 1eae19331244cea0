"""The files that a file queue takes, when, and in which order, with a clock that the tests control."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.damage import damaged
from tests.support.file_queue_rig import INTERVAL, FileQueueRig
from tests.support.tiny import serves
from weightswap_runtime import DigestMismatch, GoldenMismatch
from weightswap_runtime.following import directory
from weightswap_runtime.following import file_queue as taking
from weightswap_runtime.following.directory import UNKNOWN
from weightswap_runtime.following.file_queue import Start


def test_new_files_are_taken_in_order_each_once(rig: FileQueueRig) -> None:
    assert rig.poll() == INTERVAL
    for name in ("v9", "v10", "v11"):
        rig.write(name, int(name[1:]))
    rig.poll()
    rig.poll()
    rig.write("v12", 12)
    rig.poll()
    rig.poll()
    assert rig.attempts == ["v9", "v10", "v11", "v12"]
    assert serves(rig.model, 12)
    assert rig.reports == []


@pytest.mark.parametrize(
    ("start", "first"), {"newest": ["v3"], "all": ["v1", "v2", "v3"], "new": []}.items(), ids=["newest", "all", "new"]
)
def test_what_is_there_at_the_start(start: Start, first: list[str], rig: FileQueueRig) -> None:
    for seed in (1, 2, 3):
        rig.write(f"v{seed}", seed)
    rig.follow(start)
    rig.poll()
    assert rig.committed == first
    rig.write("v4", 4)
    rig.poll()
    assert rig.committed == [*first, "v4"]
    assert rig.reports == []


def test_weights_that_are_served_are_not_taken(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.model.swap(rig.write("v2", 2))
    rig.poll()
    assert rig.attempts == []
    rig.write("v3", 2)  # the same weights in a new file
    rig.poll()
    assert (rig.attempts, rig.reports) == ([], [])
    rig.write("v2", 5)
    rig.poll()
    assert rig.reports == [("skipped v2", "superseded")]  # v3 counts as taken


def test_weights_of_a_model_that_has_failed_are_taken(rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.model.swap(rig.write("v1", 1))
    monkeypatch.setattr(rig, "serves", lambda weights_id: False)
    rig.poll()
    assert rig.committed == ["v1"]


def away(rig: FileQueueRig) -> None:
    rig.unlisted = True


def empty(rig: FileQueueRig) -> None:
    rig.altered = lambda entries: []


def cut_short(rig: FileQueueRig) -> None:
    rig.altered = lambda entries: [entry for entry in entries if entry.name != "v2.safetensors"]


def without_status(rig: FileQueueRig) -> None:
    rig.altered = lambda entries: [entry._replace(fingerprint=UNKNOWN, modified=0.0) for entry in entries]


@pytest.mark.parametrize("flicker", [away, empty, cut_short, without_status])
@pytest.mark.parametrize("polls", [1, 3])
def test_after_a_flicker_nothing_is_taken_again(
    flicker: Callable[[FileQueueRig], None], polls: int, rig: FileQueueRig
) -> None:
    rig.follow("all")
    damaged(rig.write("v0", 0))
    for seed in (1, 2):
        rig.write(f"v{seed}", seed)
    rig.poll()
    rig.model.rollback(by="operator")
    told = list(rig.reports)
    listed = rig.altered
    flicker(rig)
    for _ in range(polls):
        rig.poll()
    rig.altered, rig.unlisted = listed, False
    for _ in range(3):
        rig.poll()
    assert (rig.attempts, serves(rig.model, 1)) == (["v0", "v1", "v2"], True)
    assert [what for what in rig.reports if what not in told] == [("unreachable run", "unreadable")] * rig.outages
    assert list(rig.file_queue.skipped) == ["v0.safetensors"]
    rig.write("v3", 3)
    rig.poll()
    assert rig.committed == ["v1", "v2", "v3"]


def test_a_file_that_is_moved_away_and_back_is_the_same(rig: FileQueueRig) -> None:
    rig.poll()
    first = rig.write("latest", 1)
    rig.poll()
    first.rename(rig.folder.parent / "kept")
    rig.write("latest", 2)
    rig.poll()
    (rig.folder.parent / "kept").rename(first)
    rig.poll()
    assert (rig.committed, serves(rig.model, 2)) == (["latest", "latest"], True)


def test_files_that_have_gone_are_remembered_up_to_a_number(rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "MOST_REMEMBERED", 3)
    rig.poll()
    for seed in range(9):
        rig.write("latest", seed)
        rig.poll()
    assert len(rig.file_queue._removed) == 3
    assert len(rig.committed) == 9


def test_a_new_file_of_which_nothing_is_known_is_left_for_the_next_poll(rig: FileQueueRig) -> None:
    rig.poll()
    rig.write("v1", 1)
    listed = rig.altered
    rig.altered = lambda entries: [entry._replace(fingerprint=UNKNOWN) for entry in entries]
    rig.poll()
    assert rig.attempts == []
    rig.altered = listed
    rig.poll()
    assert rig.committed == ["v1"]


@pytest.mark.parametrize("start", ["newest", "all", "new"])
def test_a_directory_that_is_made_later_has_only_new_files(start: Start, rig: FileQueueRig) -> None:
    rig.folder.rmdir()
    rig.follow(start)
    assert {rig.poll() for _ in range(20)} == {INTERVAL}
    assert rig.reports == [("unreachable run", "unreadable")]
    rig.folder.mkdir()
    for seed in (1, 2):
        rig.write(f"v{seed}", seed)
    rig.poll()
    assert rig.committed == ["v1", "v2"]


def test_the_newest_that_can_be_taken_begins(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.write("v2", 2)
    damaged(rig.write("v3", 3))
    rig.poll()
    assert (rig.attempts, rig.committed) == (["v3", "v2"], ["v2"])
    assert rig.reports == [("skipped v3", "DigestMismatch")]
    rig.write("v4", 4)
    rig.poll()
    assert rig.committed == ["v2", "v4"]


def test_files_that_come_after_others_could_not_be_taken_are_taken_in_order(rig: FileQueueRig) -> None:
    damaged(rig.write("v1", 1))
    rig.poll()
    rig.write("v2", 2)
    rig.write("v3", 3)
    rig.poll()
    assert rig.committed == ["v2", "v3"]


def test_a_damaged_file_is_skipped_once_until_it_changes(rig: FileQueueRig) -> None:
    rig.poll()
    path = rig.write("v1", 1)
    damaged(path)
    for _ in range(5):
        rig.poll()
    assert (rig.attempts, rig.reports) == (["v1"], [("skipped v1", "DigestMismatch")])
    assert isinstance(rig.file_queue.last_error, DigestMismatch)
    assert rig.file_queue.last_error.__traceback__ is None  # it keeps no frames
    assert list(rig.file_queue.skipped) == ["v1.safetensors"]
    rig.write("v1", 1)
    rig.poll()
    assert rig.committed == ["v1"]
    assert (rig.file_queue.last_error, rig.file_queue.skipped) == (None, {})
    path.unlink()
    rig.poll()
    assert rig.attempts == ["v1", "v1"]


def test_what_was_skipped_and_is_swapped_by_hand_is_not_skipped_any_more(rig: FileQueueRig) -> None:
    rig.poll()
    path = rig.write("v1", 1)
    rig.errors["v1"] = [GoldenMismatch("v1", ["it is not that"], "Look at it.")]
    rig.poll()
    assert list(rig.file_queue.skipped) == ["v1.safetensors"]
    rig.model.swap(path, verify="off")
    rig.poll()
    assert (rig.file_queue.skipped, rig.file_queue.last_error) == ({}, None)
    assert rig.attempts == ["v1"]


def test_what_comes_before_a_file_that_was_taken_is_passed_over(rig: FileQueueRig) -> None:
    rig.poll()
    damaged(rig.write("v2", 2))
    rig.write("v3", 3)
    rig.poll()
    rig.write("v2", 2)
    rig.write("v1", 1)
    rig.poll()
    assert rig.committed == ["v3"]
    assert rig.reports[1:] == [("skipped v1", "superseded"), ("skipped v2", "superseded")]
    assert "passed over, because v3.safetensors comes later" in str(rig.file_queue.skipped["v1.safetensors"])
    (rig.folder / "v1.safetensors").unlink()
    rig.poll()
    assert list(rig.file_queue.skipped) == ["v2.safetensors"]


def test_a_replaced_file_is_taken_again(rig: FileQueueRig) -> None:
    path = rig.write("latest", 1)
    rig.poll()
    rig.write("latest", 2)
    os.utime(path, ns=(1, 1))  # older than the one before it
    rig.poll()
    assert (rig.committed, serves(rig.model, 2)) == (["latest", "latest"], True)
    os.utime(path, ns=(2, 2))
    rig.poll()
    assert rig.committed == ["latest", "latest"]  # the same weights


@pytest.mark.parametrize("ends", [("", ""), (".delta", ".delta"), ("", ".delta")], ids=str)
def test_of_one_published_step_the_later_file_is_taken_last(ends: tuple[str, str], rig: FileQueueRig) -> None:
    rig.poll()
    late = rig.write(f"step-000000007-{'0' * 12}{ends[0]}", 1)
    early = rig.write(f"step-000000007-{'f' * 12}{ends[1]}", 2)
    os.utime(early, (100, 100))
    os.utime(late, (200, 200))
    rig.poll()
    assert rig.committed == [early.stem, late.stem]


@pytest.mark.parametrize("start", ["newest", "new", "all"])
def test_a_file_is_opened_only_when_it_is_new(start: Start, rig: FileQueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = rig.write("v0", 0).read_bytes()
    for number in range(1, 200):
        (rig.folder / f"v{number}.safetensors").write_bytes(raw)
    opened: Counter[str] = Counter()
    original = directory.open_weights

    def count(path: str | Path, check: Callable[[], None], most: int) -> object:
        opened[Path(path).stem] += 1
        return original(path, check, most)

    monkeypatch.setattr(directory, "open_weights", count)
    monkeypatch.setattr(rig, "swap", lambda path, *_: rig.committed.append(Path(path).stem))
    rig.follow(start)
    for _ in range(3):
        rig.poll()
    assert rig.listings == 3
    assert opened == dict.fromkeys(rig.committed, 1)
    assert len(rig.committed) == {"newest": 1, "new": 0, "all": 200}[start]
    (rig.folder / "v200.safetensors").write_bytes(raw)
    rig.poll()
    assert rig.committed[-1] == "v200"
    assert len(opened) == len(rig.committed)


@pytest.mark.parametrize(
    ("name", "index", "report"),
    [
        ("model-0000{}-of-00003", False, ("skipped model-00001-of-00003", "WeightsMismatch")),
        ("model-0000{}-of-00003", True, ("skipped model.safetensors.index", "Unsupported")),
        (
            "shard-0000{}-model-00001-of-00001",
            False,
            ("skipped shard-00001-model-00001-of-00001", "WeightsMismatch"),
        ),
    ],
    ids=["shards", "an index", "parts of ranks"],
)
def test_a_set_of_several_files_is_reported_once(
    name: str, index: bool, report: tuple[str, str], rig: FileQueueRig
) -> None:
    """By its index; by its first file, if the index comes later or never."""
    if index:
        (rig.folder / "model.safetensors.index.json").write_text("{}")
    for number in (1, 2, 3):
        save_file({"weight": torch.ones(3, 5)}, rig.folder / f"{name.format(number)}.safetensors")
        rig.poll()
        rig.poll()
    rig.write("v1", 1)
    rig.poll()
    assert (rig.committed, rig.reports, len(rig.file_queue.skipped)) == (["v1"], [report], 1)
