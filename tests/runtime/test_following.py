"""Which files a follower takes, when, and in which order; with a clock that the tests turn."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tiny import TinyArtifact, serves
from weightswap_runtime import (
    DamagedFile,
    DigestMismatch,
    GraphMismatch,
    LeaseTimeout,
    Model,
    ModelFailed,
    OutOfMemory,
    StageCancelled,
    StagingBusy,
    TruncatedFile,
    WeightFileError,
    WeightsMismatch,
    following,
    glances,
    load,
    write_delta,
)
from weightswap_runtime.directory import UNKNOWN, Entry, open_directory
from weightswap_runtime.following import LONGEST_DELAY, PATIENCE, Follower, Start

INTERVAL = 5.0


class Desk:
    """A directory, the model behind which its files are put, and a clock. It is the follower's target."""

    def __init__(self, tiny: TinyArtifact, folder: Path) -> None:
        self.tiny = tiny
        self.folder = folder
        self.model: Model = load(tiny.path)
        self.now = 1000.0
        self.listings = self.outages = 0
        self.tries: list[str] = []
        self.taken: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.errors: dict[str, list[BaseException]] = {}  # raised instead of the next swaps of a file
        self.unlisted = False
        self.stopped = False
        folder.mkdir()
        self.follow("newest")

    def follow(self, start: Start) -> None:
        self.follower = Follower(str(self.folder), self._list, INTERVAL, start, lambda: self.now)

    def _list(self) -> list[Entry]:
        self.listings += 1
        if self.unlisted:
            self.outages = 1
            raise WeightFileError("unreachable")
        return open_directory(self.folder)()

    def check(self) -> None:
        if self.stopped:
            raise StageCancelled("stopped")

    def serves(self, weights_id: str) -> bool:
        return self.model.weights_id == weights_id

    def swap(self, path: str | Path, weights_id: str | None) -> None:
        name = Path(path).stem
        self.tries.append(name)
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.model.swap(path)
        self.taken.append(name)

    def tell(self, kind: str, source: str, error: BaseException) -> None:
        self.told.append((f"{kind} {Path(source).stem}", type(error).__name__))

    def look(self, after: float = INTERVAL) -> float:
        self.now += after
        return self.follower.look(self)

    def write(self, name: str, seed: int) -> Path:
        """Renamed into place, as weightswap writes files."""
        return self.tiny.write(self.folder / f"{name}.safetensors", self.tiny.values(seed))

    def delta(self, name: str, base: int, new: int) -> Path:
        files = [self.tiny.write(self.folder.parent / f"{seed}", self.tiny.values(seed)) for seed in (base, new)]
        out = self.folder / f"{name}.safetensors"
        write_delta(*files, out)
        return out

    def damage(self, path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        replacement = path.with_name("damaged")
        replacement.write_bytes(raw)
        replacement.replace(path)


@pytest.fixture
def desk(tiny: TinyArtifact, tmp_path: Path) -> Desk:
    return Desk(tiny, tmp_path / "run")


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
    desk.follower._list = list


def cut_short(desk: Desk) -> None:
    entries = [entry for entry in desk._list() if entry.name != "v2.safetensors"]
    desk.follower._list = lambda: entries


def without_status(desk: Desk) -> None:
    entries = [entry._replace(fingerprint=UNKNOWN, modified=0.0) for entry in desk._list()]
    desk.follower._list = lambda: entries


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
    listing = desk.follower._list
    flicker(desk)
    for _ in range(looks):
        desk.look()
    desk.follower._list, desk.unlisted = listing, False
    for _ in range(3):
        desk.look()
    assert (desk.tries, serves(desk.model, 1)) == (["v0", "v1", "v2"], True)
    assert [what for what in desk.told if what not in told] == [("unreachable run", "WeightFileError")] * desk.outages
    assert list(desk.follower.skipped) == ["v0.safetensors"]
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
    monkeypatch.setattr(following, "MOST_REMEMBERED", 3)
    desk.look()
    for seed in range(9):
        desk.write("latest", seed)
        desk.look()
    assert len(desk.follower._gone) == 3
    assert len(desk.taken) == 9


def test_a_new_file_of_which_nothing_is_known_is_left_for_the_next_look(desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    entries = desk._list()
    desk.follower._list = lambda: [entry._replace(fingerprint=UNKNOWN) for entry in entries]
    desk.look()
    assert desk.tries == []
    desk.follower._list = desk._list
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
    assert isinstance(desk.follower.last_error, DigestMismatch)
    assert list(desk.follower.skipped) == ["v1.safetensors"]
    desk.write("v1", 1)
    desk.look()
    assert desk.taken == ["v1"]
    assert (desk.follower.last_error, desk.follower.skipped) == (None, {})
    path.unlink()
    desk.look()
    assert desk.tries == ["v1", "v1"]


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
    assert "passed over, as v3.safetensors comes later" in str(desk.follower.skipped["v1.safetensors"])
    (desk.folder / "v1.safetensors").unlink()
    desk.look()
    assert list(desk.follower.skipped) == ["v2.safetensors"]


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


def plain(desk: Desk, name: str, seed: int) -> Path:
    """A file without digests, as safetensors itself writes it."""
    import safetensors.torch

    path = desk.folder / f"{name}.safetensors"
    safetensors.torch.save_file({key: value.clone() for key, value in desk.tiny.values(seed).items()}, path)
    return path


def test_a_file_without_digests_is_taken_when_two_looks_found_it_the_same(desk: Desk) -> None:
    desk.look()
    path = plain(desk, "v1", 1)
    desk.look()
    path.write_bytes(plain(desk, "other", 2).read_bytes())
    (desk.folder / "other.safetensors").unlink()
    desk.look()
    assert desk.tries == []
    desk.look()
    desk.look()
    assert (desk.taken, serves(desk.model, 2)) == (["v1"], True)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing yet": lambda raw: b"",
    "half a length": lambda raw: raw[:5],
    "half a header": lambda raw: raw[:100],
    "half of the data": lambda raw: raw[:-40],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_file_that_is_being_copied_is_waited_for(cut: Callable[[bytes], bytes], desk: Desk) -> None:
    desk.look()
    raw = desk.write("v1", 1).read_bytes()
    path = desk.folder / "v1.safetensors"
    path.write_bytes(cut(raw))
    for _ in range(int(PATIENCE / INTERVAL)):
        desk.look()
    assert (desk.tries, desk.told) == ([], [])
    path.write_bytes(raw)
    desk.look()
    assert (desk.taken, desk.told) == (["v1"], [])


def test_a_file_that_stays_cut_off_is_skipped(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    desk.look()
    desk.look(PATIENCE)
    desk.look(PATIENCE)
    assert (desk.tries, desk.told) == (["v1"], [("skipped v1", "TruncatedFile")])
    assert isinstance(desk.follower.last_error, TruncatedFile)


def test_a_file_that_is_being_copied_does_not_keep_a_later_one(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    path.write_bytes(path.read_bytes()[:-1])
    desk.look()
    desk.write("v2", 2)
    desk.look()
    assert desk.taken == ["v2"]
    assert desk.told == [("skipped v1", "Superseded")]
    assert "it is truncated" in str(desk.follower.skipped["v1.safetensors"])


def test_deltas_in_order(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.delta("v2", 1, 2)
    desk.delta("v3", 2, 3)
    desk.look()
    assert (desk.taken, serves(desk.model, 3)) == (["v1", "v2", "v3"], True)


def test_a_delta_waits_for_what_it_starts_from(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v3", 2, 3)
    desk.look()
    desk.look()
    assert (desk.tries, desk.told, desk.follower.last_error) == (["v1"], [("waiting v3", "BaseMismatch")], None)
    assert list(desk.follower.waiting) == ["v3.safetensors"]
    assert "which are not served yet" in str(desk.follower.waiting["v3.safetensors"])
    desk.delta("v2", 1, 2)
    desk.look()
    assert desk.taken == ["v1", "v2", "v3"]
    assert (len(desk.told), desk.follower.waiting) == (1, {})


def test_a_delta_is_taken_after_a_swap_by_hand(desk: Desk, tmp_path: Path) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v3", 2, 3)
    desk.look()
    desk.model.swap(desk.tiny.write(tmp_path / "hand", desk.tiny.values(2)))
    desk.look()
    assert desk.taken == ["v1", "v3"]


def test_a_delta_that_waits_is_passed_over_with_a_later_file(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v2", 8, 9)
    desk.look()
    desk.write("v3", 3)
    desk.look()
    assert desk.taken == ["v1", "v3"]
    assert desk.told == [("waiting v2", "BaseMismatch"), ("skipped v2", "Superseded")]
    assert desk.follower.waiting == {}
    assert "it is a delta from the weights" in str(desk.follower.skipped["v2.safetensors"])


def test_a_delta_whose_base_changes_between_the_look_and_the_swap_waits(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v2", 1, 2)
    original, base = desk.serves, desk.model.weights_id
    desk.model.swap(desk.tiny.write(desk.folder.parent / "hand", desk.tiny.values(5)))
    desk.serves = lambda weights_id: weights_id == base  # type: ignore[method-assign]
    desk.look()
    desk.serves = original  # type: ignore[method-assign]
    desk.model.rollback()
    desk.look()
    assert (desk.tries, desk.told) == (["v1", "v2", "v2"], [])
    assert serves(desk.model, 2)


FORGED = "v2\nrolled back for operator: x\x1b[2J"


def test_names_with_line_ends_are_escaped_in_texts(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta(FORGED, 8, 9)
    desk.look()
    waiting = str(desk.follower.waiting[f"{FORGED}.safetensors"])
    desk.write(FORGED.replace("2", "3", 1), 3)
    desk.look()
    superseded = str(desk.follower.skipped[f"{FORGED}.safetensors"])
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
def test_what_another_try_may_mend_is_tried_again_and_again_later(error: Exception, desk: Desk) -> None:
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
    assert desk.follower.last_error is None


def test_a_file_that_cannot_be_read_does_not_keep_a_later_one(desk: Desk) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.write("v2", 2)
    desk.errors["v1"] = [WeightFileError("cannot be read")]
    desk.look()
    assert (desk.tries, desk.taken) == (["v1", "v2"], ["v2"])
    assert desk.told == [("skipped v1", "Superseded")]


def test_a_model_that_is_busy_is_not_asked_for_each_file(desk: Desk) -> None:
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
    assert isinstance(desk.follower.last_error, WeightFileError)
    desk.unlisted = False
    desk.write("v1", 1)
    assert desk.look() == INTERVAL
    assert (desk.taken, desk.follower.last_error) == (["v1"], None)
    desk.unlisted = True
    assert desk.look() == INTERVAL
    assert len(desk.told) == 2


def test_an_interval_above_the_longest_delay_stays(desk: Desk) -> None:
    follower = Follower("run", desk._list, 1000.0, "all", lambda: desk.now)
    desk.unlisted = True
    assert {follower.look(desk) for _ in range(2000)} == {1000.0}


def test_nothing_is_opened_after_the_stop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("v1", 1)
    desk.stopped = True
    opened: list[str | Path] = []
    monkeypatch.setattr(glances, "open_weights", lambda path, check: opened.append(path))
    desk.look()
    assert (opened, desk.told, desk.follower.last_error) == ([], [], None)


def test_a_stop_while_a_header_is_waited_for_ends_the_look(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.look()
    desk.write("v1", 1)
    desk.write("v2", 2)

    def stalled(path: str | Path, check: Callable[[], None]) -> None:
        desk.stopped = True
        check()

    monkeypatch.setattr(glances, "open_weights", stalled)
    desk.look()
    assert (desk.tries, desk.told, desk.follower.last_error) == ([], [], None)
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
    assert (desk.tries, desk.told, desk.follower.last_error) == (["v1"], [], None)


@pytest.mark.parametrize("start", ["newest", "new", "all"])
def test_a_file_is_opened_only_when_it_is_new(start: Start, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = desk.write("v0", 0).read_bytes()
    for number in range(1, 1000):
        (desk.folder / f"v{number}.safetensors").write_bytes(raw)
    opened: Counter[str] = Counter()
    original = glances.open_weights

    def count(path: str | Path, check: Callable[[], None]) -> object:
        opened[Path(path).stem] += 1
        return original(path, check)

    monkeypatch.setattr(glances, "open_weights", count)
    monkeypatch.setattr(desk, "swap", lambda path, _: desk.taken.append(Path(path).stem))
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
    error = desk.follower.skipped["v1.safetensors"]
    assert error.__traceback__ is None
