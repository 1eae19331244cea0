"""The files that an intake takes, when, and in which order, with a clock that the tests control."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.desk import INTERVAL, Desk
from tests.support.tiny import serves
from weightswap_runtime import DigestMismatch, GoldenMismatch
from weightswap_runtime.live.watching import header_peek
from weightswap_runtime.live.watching import intake as taking
from weightswap_runtime.live.watching.directory import UNKNOWN
from weightswap_runtime.live.watching.intake import Start


def test_new_files_are_taken_in_order_each_once(desk: Desk) -> None:
    assert desk.look() == INTERVAL
    for name in ("v9", "v10", "v11"):
        desk.write(name, int(name[1:]))
    desk.look()
    desk.look()
    desk.write("v12", 12)
    desk.look()
    desk.look()
    assert desk.tries == ["v9", "v10", "v11", "v12"]
    assert serves(desk.model, 12)
    assert desk.told == []


@pytest.mark.parametrize(
    ("start", "first"), {"newest": ["v3"], "all": ["v1", "v2", "v3"], "new": []}.items(), ids=["newest", "all", "new"]
)
def test_what_is_there_at_the_start(start: Start, first: list[str], desk: Desk) -> None:
    for seed in (1, 2, 3):
        desk.write(f"v{seed}", seed)
    desk.follow(start)
    desk.look()
    assert desk.taken == first
    desk.write("v4", 4)
    desk.look()
    assert desk.taken == [*first, "v4"]
    assert desk.told == []


def test_weights_that_are_served_are_not_taken(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.model.swap(desk.write("v2", 2))
    desk.look()
    assert desk.tries == []
    desk.write("v3", 2)  # the same weights in a new file
    desk.look()
    assert (desk.tries, desk.told) == ([], [])
    desk.write("v2", 5)
    desk.look()
    assert desk.told == [("skipped v2", "Superseded")]  # v3 counts as taken


def test_weights_of_a_model_that_has_failed_are_taken(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.model.swap(desk.write("v1", 1))
    monkeypatch.setattr(desk, "serves", lambda weights_id: False)
    desk.look()
    assert desk.taken == ["v1"]


def away(desk: Desk) -> None:
    desk.unlisted = True


def empty(desk: Desk) -> None:
    desk.intake._list = list


def cut_short(desk: Desk) -> None:
    entries = [entry for entry in desk._list() if entry.name != "v2.safetensors"]
    desk.intake._list = lambda: entries


def without_status(desk: Desk) -> None:
    entries = [entry._replace(fingerprint=UNKNOWN, modified=0.0) for entry in desk._list()]
    desk.intake._list = lambda: entries


@pytest.mark.parametrize("flicker", [away, empty, cut_short, without_status])
@pytest.mark.parametrize("looks", [1, 3])
def test_after_a_flicker_nothing_is_taken_again(flicker: Callable[[Desk], None], looks: int, desk: Desk) -> None:
    desk.follow("all")
    desk.damage(desk.write("v0", 0))
    for seed in (1, 2):
        desk.write(f"v{seed}", seed)
    desk.look()
    desk.model.rollback(by="operator")
    told = list(desk.told)
    listing = desk.intake._list
    flicker(desk)
    for _ in range(looks):
        desk.look()
    desk.intake._list, desk.unlisted = listing, False
    for _ in range(3):
        desk.look()
    assert (desk.tries, serves(desk.model, 1)) == (["v0", "v1", "v2"], True)
    assert [what for what in desk.told if what not in told] == [("unreachable run", "WeightFileError")] * desk.outages
    assert list(desk.intake.skipped) == ["v0.safetensors"]
    desk.write("v3", 3)
    desk.look()
    assert desk.taken == ["v1", "v2", "v3"]


def test_a_file_that_is_moved_away_and_back_is_the_same(desk: Desk) -> None:
    desk.look()
    first = desk.write("latest", 1)
    desk.look()
    first.rename(desk.folder.parent / "kept")
    desk.write("latest", 2)
    desk.look()
    (desk.folder.parent / "kept").rename(first)
    desk.look()
    assert (desk.taken, serves(desk.model, 2)) == (["latest", "latest"], True)


def test_files_that_have_gone_are_remembered_up_to_a_number(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "MOST_REMEMBERED", 3)
    desk.look()
    for seed in range(9):
        desk.write("latest", seed)
        desk.look()
    assert len(desk.intake._removed) == 3
    assert len(desk.taken) == 9


def test_a_new_file_of_which_nothing_is_known_is_left_for_the_next_look(desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    entries = desk._list()
    desk.intake._list = lambda: [entry._replace(fingerprint=UNKNOWN) for entry in entries]
    desk.look()
    assert desk.tries == []
    desk.intake._list = desk._list
    desk.look()
    assert desk.taken == ["v1"]


@pytest.mark.parametrize("start", ["newest", "all", "new"])
def test_a_directory_that_is_made_later_has_only_new_files(start: Start, desk: Desk) -> None:
    desk.folder.rmdir()
    desk.follow(start)
    assert {desk.look() for _ in range(20)} == {INTERVAL}
    assert desk.told == [("unreachable run", "WeightFileError")]
    desk.folder.mkdir()
    for seed in (1, 2):
        desk.write(f"v{seed}", seed)
    desk.look()
    assert desk.taken == ["v1", "v2"]


def test_the_newest_that_can_be_taken_begins(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.write("v2", 2)
    desk.damage(desk.write("v3", 3))
    desk.look()
    assert (desk.tries, desk.taken) == (["v3", "v2"], ["v2"])
    assert desk.told == [("skipped v3", "DigestMismatch")]
    desk.write("v4", 4)
    desk.look()
    assert desk.taken == ["v2", "v4"]


def test_files_that_come_after_others_could_not_be_taken_are_taken_in_order(desk: Desk) -> None:
    desk.damage(desk.write("v1", 1))
    desk.look()
    desk.write("v2", 2)
    desk.write("v3", 3)
    desk.look()
    assert desk.taken == ["v2", "v3"]


def test_a_damaged_file_is_skipped_once_until_it_changes(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    desk.damage(path)
    for _ in range(5):
        desk.look()
    assert (desk.tries, desk.told) == (["v1"], [("skipped v1", "DigestMismatch")])
    assert isinstance(desk.intake.last_error, DigestMismatch)
    assert list(desk.intake.skipped) == ["v1.safetensors"]
    desk.write("v1", 1)
    desk.look()
    assert desk.taken == ["v1"]
    assert (desk.intake.last_error, desk.intake.skipped) == (None, {})
    path.unlink()
    desk.look()
    assert desk.tries == ["v1", "v1"]


def test_what_was_skipped_and_is_swapped_by_hand_is_not_skipped_any_more(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    desk.errors["v1"] = [GoldenMismatch("v1", ["it is not that"], "Look at it.")]
    desk.look()
    assert list(desk.intake.skipped) == ["v1.safetensors"]
    desk.model.swap(path, verify="off")
    desk.look()
    assert (desk.intake.skipped, desk.intake.last_error) == ({}, None)
    assert desk.tries == ["v1"]


def test_what_comes_before_a_file_that_was_taken_is_passed_over(desk: Desk) -> None:
    desk.look()
    desk.damage(desk.write("v2", 2))
    desk.write("v3", 3)
    desk.look()
    desk.write("v2", 2)
    desk.write("v1", 1)
    desk.look()
    assert desk.taken == ["v3"]
    assert desk.told[1:] == [("skipped v1", "Superseded"), ("skipped v2", "Superseded")]
    assert "passed over, as v3.safetensors comes later" in str(desk.intake.skipped["v1.safetensors"])
    (desk.folder / "v1.safetensors").unlink()
    desk.look()
    assert list(desk.intake.skipped) == ["v2.safetensors"]


def test_a_replaced_file_is_taken_again(desk: Desk) -> None:
    path = desk.write("latest", 1)
    desk.look()
    desk.write("latest", 2)
    os.utime(path, ns=(1, 1))  # older than the one before it
    desk.look()
    assert (desk.taken, serves(desk.model, 2)) == (["latest", "latest"], True)
    os.utime(path, ns=(2, 2))
    desk.look()
    assert desk.taken == ["latest", "latest"]  # the same weights


def test_of_one_published_step_the_later_file_is_taken_last(desk: Desk) -> None:
    desk.look()
    late, early = desk.write("step-000000007-000000000000", 1), desk.write("step-000000007-ffffffffffff", 2)
    os.utime(early, (100, 100))
    os.utime(late, (200, 200))
    desk.look()
    assert desk.taken == [early.stem, late.stem]


@pytest.mark.parametrize("start", ["newest", "new", "all"])
def test_a_file_is_opened_only_when_it_is_new(start: Start, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = desk.write("v0", 0).read_bytes()
    for number in range(1, 1000):
        (desk.folder / f"v{number}.safetensors").write_bytes(raw)
    opened: Counter[str] = Counter()
    original = header_peek.open_weights

    def count(path: str | Path, check: Callable[[], None]) -> object:
        opened[Path(path).stem] += 1
        return original(path, check)

    monkeypatch.setattr(header_peek, "open_weights", count)
    monkeypatch.setattr(desk, "swap", lambda path, *_: desk.taken.append(Path(path).stem))
    desk.follow(start)
    for _ in range(3):
        desk.look()
    assert desk.listings == 3
    assert opened == dict.fromkeys(desk.taken, 1)
    assert len(desk.taken) == {"newest": 1, "new": 0, "all": 1000}[start]
    (desk.folder / "v1000.safetensors").write_bytes(raw)
    desk.look()
    assert desk.taken[-1] == "v1000"
    assert len(opened) == len(desk.taken)


def test_errors_that_are_kept_hold_no_frames(desk: Desk) -> None:
    desk.look()
    desk.damage(desk.write("v1", 1))
    desk.look()
    error = desk.intake.skipped["v1.safetensors"]
    assert error.__traceback__ is None
