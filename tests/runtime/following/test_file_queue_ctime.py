"""Files of which only the ctime changes: a rewrite with its times restored, a new mode, a new hard link."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import safetensors.torch

from tests.support.damage import damaged
from tests.support.file_queue_rig import FileQueueRig, in_place
from tests.support.tiny import serves
from weightswap_runtime.following.file_queue import Start
from weightswap_runtime.sources.byte_source import CLOCK_TICK_NS


def touch(path: Path) -> None:
    """Change a file's ctime, but neither its content nor the time of its modification."""
    before = path.stat()
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    path.chmod(0o640)
    path.with_name(f"kept-{path.stem}").hardlink_to(path)
    path.rename(path.with_name("hidden"))
    path.with_name("hidden").rename(path)
    assert path.stat().st_ctime_ns != before.st_ctime_ns
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def plain(rig: FileQueueRig, name: str, seed: int) -> Path:
    """Write a file without digests."""
    path = rig.folder / f"{name}.safetensors"
    safetensors.torch.save_file(rig.tiny.values(seed), path.with_suffix(".new"))
    return path.with_suffix(".new").replace(path)


def polls(rig: FileQueueRig) -> None:
    for _ in range(4):
        rig.poll()


@pytest.mark.parametrize("stamped", [True, False])
def test_a_rewrite_in_place_is_taken(stamped: bool, rig: FileQueueRig) -> None:
    path = rig.write("latest", 1) if stamped else plain(rig, "latest", 1)
    polls(rig)
    assert serves(rig.model, 1)
    other = rig.write("other", 2) if stamped else plain(rig, "other", 2)
    content = other.read_bytes()
    other.unlink()
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(path, content)
    polls(rig)
    assert (rig.committed, serves(rig.model, 2), rig.reports) == (["latest", "latest"], True, [])


@pytest.mark.parametrize("stamped", [True, False])
def test_what_was_taken_is_not_taken_again(stamped: bool, rig: FileQueueRig) -> None:
    path = rig.write("v1", 1) if stamped else plain(rig, "v1", 1)
    polls(rig)
    rig.model.swap(rig.write("../by-hand", 7))
    touch(path)
    polls(rig)
    assert (rig.committed, serves(rig.model, 7), rig.reports) == (["v1"], True, [])


def test_what_was_rolled_back_is_not_taken_again(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    path = rig.write("v2", 2)
    polls(rig)
    rig.model.rollback()
    touch(path)
    polls(rig)
    assert (rig.committed, serves(rig.model, 1), rig.reports) == (["v1", "v2"], True, [])


def test_old_files_are_not_told_of_again(rig: FileQueueRig) -> None:
    """A retention job may keep some checkpoints as hard links."""
    paths = [rig.write(f"v{seed}", seed) for seed in (1, 2)]
    polls(rig)
    rig.write("v3", 3)
    polls(rig)
    rig.write("v0", 0)
    polls(rig)
    told = list(rig.reports)
    for path in paths:
        touch(path)
    touch(rig.folder / "v0.safetensors")
    polls(rig)
    assert (rig.committed, serves(rig.model, 3)) == (["v2", "v3"], True)
    assert rig.reports == told == [("skipped v0", "superseded")]


def test_what_was_there_before_a_start_with_new_files_stays(rig: FileQueueRig) -> None:
    path = rig.write("v1", 1)
    rig.follow("new")
    polls(rig)
    touch(path)
    polls(rig)
    assert rig.attempts == []
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(path, rig.write("../other", 2).read_bytes())  # once its header was looked at, a rewrite is noticed
    polls(rig)
    assert rig.committed == ["v1"]


def test_what_was_skipped_is_told_of_once(rig: FileQueueRig) -> None:
    rig.poll()
    bad = rig.write("v1", 1)
    foreign = rig.tiny.write(rig.folder / "v2.safetensors", rig.tiny.values(2), "0" * 64)
    damaged(bad)
    polls(rig)
    told = list(rig.reports)
    assert told == [("skipped v1", "DigestMismatch"), ("skipped v2", "GraphMismatch")]
    tries = len(rig.attempts)
    touch(bad)
    touch(foreign)
    polls(rig)
    assert (rig.committed, rig.reports) == ([], told)
    assert rig.attempts[tries:] == ["v1"]  # other bytes might mend it, and would not show in its header
    assert list(rig.file_queue.skipped) == ["v1.safetensors", "v2.safetensors"]
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(bad, rig.write("../whole", 1).read_bytes())
    polls(rig)
    assert (rig.committed, serves(rig.model, 1)) == (["v1"], True)


def test_a_delta_that_waits_is_told_of_once(rig: FileQueueRig) -> None:
    rig.write("v0", 0)
    rig.poll()
    path = rig.delta("v2", 1, 2)
    polls(rig)
    assert rig.reports == [("waiting v2", "BaseMismatch")]
    touch(path)
    polls(rig)
    assert rig.reports == [("waiting v2", "BaseMismatch")]
    rig.model.swap(rig.write("../base", 1))
    polls(rig)
    assert rig.committed == ["v0", "v2"]


def test_a_file_that_could_not_be_read_is_tried_at_once_when_its_mode_changes(rig: FileQueueRig) -> None:
    rig.poll()
    rig.errors["v1"] = [OSError(), OSError(), OSError()]
    path = rig.write("v1", 1)
    for _ in range(3):
        rig.poll(400)
    touch(path)
    rig.poll(0.1)
    assert rig.committed == ["v1"]


@pytest.mark.parametrize("start", ["newest", "all"])
def test_the_first_files_may_change_before_they_are_taken(start: Start, rig: FileQueueRig) -> None:
    paths = [plain(rig, f"v{seed}", seed) for seed in (1, 2)]
    rig.follow(start)
    rig.poll()
    touch(paths[1])
    polls(rig)
    assert rig.committed[-1] == "v2"
    assert (rig.committed.count("v2"), rig.reports) == (1, [])
