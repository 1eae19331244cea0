"""Files of which only the ctime changes: a rewrite with its times restored, a new mode, a new hard link."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from tests.support.desk import Desk, in_place
from tests.support.tiny import serves
from weightswap_runtime.live.watching.intake import Start
from weightswap_runtime.sources.local import CLOCK_TICK_NS


def mode(path: Path) -> None:
    path.chmod(0o640)


def other_name(path: Path) -> None:
    path.with_name(f"kept-{path.stem}").hardlink_to(path)


def there_and_back(path: Path) -> None:
    path.rename(path.with_name("hidden"))
    path.with_name("hidden").rename(path)


@pytest.fixture(params=[mode, other_name, there_and_back], ids=lambda touch: touch.__name__)
def touch(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """A function that changes a file's ctime but not its content."""

    def work(path: Path) -> None:
        before = path.stat()
        time.sleep(2 * CLOCK_TICK_NS / 1e9)
        request.param(path)
        assert path.stat().st_ctime_ns != before.st_ctime_ns
        assert path.stat().st_mtime_ns == before.st_mtime_ns

    return work


def plain(desk: Desk, name: str, seed: int) -> Path:
    """Write a file without digests."""
    path = desk.folder / f"{name}.safetensors"
    safetensors.torch.save_file(desk.tiny.values(seed), path.with_suffix(".new"))
    return path.with_suffix(".new").replace(path)


def looks(desk: Desk) -> None:
    for _ in range(4):
        desk.look()


@pytest.mark.parametrize("stamped", [True, False])
def test_a_rewrite_in_place_is_taken(stamped: bool, desk: Desk) -> None:
    path = desk.write("latest", 1) if stamped else plain(desk, "latest", 1)
    looks(desk)
    assert serves(desk.model, 1)
    other = desk.write("other", 2) if stamped else plain(desk, "other", 2)
    content = other.read_bytes()
    other.unlink()
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(path, content)
    looks(desk)
    assert (desk.taken, serves(desk.model, 2), desk.told) == (["latest", "latest"], True, [])


@pytest.mark.parametrize("stamped", [True, False])
def test_what_was_taken_is_not_taken_again(stamped: bool, desk: Desk, touch: Callable[[Path], None]) -> None:
    path = desk.write("v1", 1) if stamped else plain(desk, "v1", 1)
    looks(desk)
    desk.model.swap(desk.write("../by-hand", 7))
    touch(path)
    looks(desk)
    assert (desk.taken, serves(desk.model, 7), desk.told) == (["v1"], True, [])


def test_what_was_rolled_back_is_not_taken_again(desk: Desk, touch: Callable[[Path], None]) -> None:
    desk.write("v1", 1)
    desk.look()
    path = desk.write("v2", 2)
    looks(desk)
    desk.model.rollback()
    touch(path)
    looks(desk)
    assert (desk.taken, serves(desk.model, 1), desk.told) == (["v1", "v2"], True, [])


def test_old_files_are_not_told_of_again(desk: Desk, touch: Callable[[Path], None]) -> None:
    """A retention job may keep some checkpoints as hard links."""
    paths = [desk.write(f"v{seed}", seed) for seed in (1, 2)]
    looks(desk)
    desk.write("v3", 3)
    looks(desk)
    desk.write("v0", 0)
    looks(desk)
    told = list(desk.told)
    for path in paths:
        touch(path)
    touch(desk.folder / "v0.safetensors")
    looks(desk)
    assert (desk.taken, serves(desk.model, 3)) == (["v2", "v3"], True)
    assert desk.told == told == [("skipped v0", "Superseded")]


def test_what_was_there_before_a_start_with_new_files_stays(desk: Desk, touch: Callable[[Path], None]) -> None:
    path = desk.write("v1", 1)
    desk.follow("new")
    looks(desk)
    touch(path)
    looks(desk)
    assert desk.tries == []
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(path, desk.write("../other", 2).read_bytes())  # once its header was looked at, a rewrite is noticed
    looks(desk)
    assert desk.taken == ["v1"]


def test_what_was_skipped_is_told_of_once(desk: Desk, touch: Callable[[Path], None]) -> None:
    desk.look()
    damaged = desk.write("v1", 1)
    foreign = desk.tiny.write(desk.folder / "v2.safetensors", desk.tiny.values(2), "0" * 64)
    desk.damage(damaged)
    looks(desk)
    told = list(desk.told)
    assert told == [("skipped v1", "DigestMismatch"), ("skipped v2", "GraphMismatch")]
    tries = len(desk.tries)
    touch(damaged)
    touch(foreign)
    looks(desk)
    assert (desk.taken, desk.told) == ([], told)
    assert desk.tries[tries:] == ["v1"]  # other bytes might mend it, and would not show in its header
    assert list(desk.intake.skipped) == ["v1.safetensors", "v2.safetensors"]
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(damaged, desk.write("../whole", 1).read_bytes())
    looks(desk)
    assert (desk.taken, serves(desk.model, 1)) == (["v1"], True)


def test_a_delta_that_waits_is_told_of_once(desk: Desk, touch: Callable[[Path], None]) -> None:
    desk.write("v0", 0)
    desk.look()
    path = desk.delta("v2", 1, 2)
    looks(desk)
    assert desk.told == [("waiting v2", "BaseMismatch")]
    touch(path)
    looks(desk)
    assert desk.told == [("waiting v2", "BaseMismatch")]
    desk.model.swap(desk.write("../base", 1))
    looks(desk)
    assert desk.taken == ["v0", "v2"]


def test_a_file_that_could_not_be_read_is_tried_at_once_when_its_mode_changes(
    desk: Desk, touch: Callable[[Path], None]
) -> None:
    desk.look()
    desk.errors["v1"] = [OSError(), OSError(), OSError()]
    path = desk.write("v1", 1)
    for _ in range(3):
        desk.look(400)
    touch(path)
    desk.look(0.1)
    assert desk.taken == ["v1"]


@pytest.mark.parametrize("start", ["newest", "all"])
def test_the_first_files_may_change_before_they_are_taken(
    start: Start, desk: Desk, touch: Callable[[Path], None]
) -> None:
    paths = [plain(desk, f"v{seed}", seed) for seed in (1, 2)]
    desk.follow(start)
    desk.look()
    touch(paths[1])
    looks(desk)
    assert desk.taken[-1] == "v2"
    assert (desk.taken.count("v2"), desk.told) == (1, [])
