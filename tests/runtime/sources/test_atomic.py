"""Temporary files are removed after a writer's error or death, and left alone while the writer lives."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.tiny import WriteWeights
from weightswap_runtime import write_delta
from weightswap_runtime.sources import writing as files
from weightswap_runtime.sources.writing import PendingFile, new_file, remove_abandoned


def abandoned(folder: Path, name: str = "step-1.safetensors") -> Path:
    path = folder / f".{name}.tmp-0123abcd"
    path.write_bytes(b"half")
    return path


def test_only_abandoned_files_with_the_prefix_are_removed(tmp_path: Path) -> None:
    kept = [tmp_path / ".step-1.safetensors", tmp_path / "step-1.tmp-0123abcd"]
    for path in kept:
        path.write_bytes(b"whole")
    kept.append(abandoned(tmp_path, "other.safetensors"))
    removed = abandoned(tmp_path)
    with new_file(tmp_path / "step-2.safetensors") as file:
        assert remove_abandoned(tmp_path, "step-") == [removed]
        file.write(b"data")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "step-2.safetensors"])
    assert remove_abandoned(tmp_path / "nowhere", "step-") == []


@pytest.mark.parametrize("given", ["d.safetensors", "link.safetensors"])
def test_weights_are_written_where_killed_writers_of_the_same_name_have_left_nothing(
    given: str, weight_file: WriteWeights, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "link.safetensors").symlink_to(folder / "d.safetensors")
    abandoned(folder, "d.safetensors")
    other = abandoned(folder, "other.safetensors")
    write_delta(weight_file(0), weight_file(1), (folder if given == "d.safetensors" else tmp_path) / given)
    assert sorted(folder.iterdir()) == [other, folder / "d.safetensors"]


def test_a_file_may_get_its_name_at_the_end(tmp_path: Path) -> None:
    with PendingFile(tmp_path / "a") as new:
        new.file.write(b"data")
        assert [path.name[:6] for path in tmp_path.iterdir()] == [".a.tmp"]
        new.rename(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_file_that_gets_no_name_is_removed(tmp_path: Path) -> None:
    with PendingFile(tmp_path / "a") as new:
        new.file.write(b"data")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_file_that_shall_be_new_replaces_nothing(
    tmp_path: Path, has_links: bool, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    with new_file(tmp_path / "a", only_new=True) as file:
        file.write(b"data")
    with PendingFile(tmp_path / "b") as new:
        (tmp_path / "b").symlink_to("a") if is_link else (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(FileExistsError):
            new.rename_new(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"data"
    assert [path.name for path in sorted(tmp_path.iterdir())] == (["a", "b"] if is_link else ["b"])


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = files._lock, []

    def late(file: BinaryIO) -> bool | None:
        if not removed:
            removed.append(Path(file.name))
            removed[0].unlink()
        return lock(file)

    monkeypatch.setattr(files, "_lock", late)
    with new_file(tmp_path / "a") as file:
        file.write(b"data")
    assert removed
    assert (tmp_path / "a").read_bytes() == b"data"


def test_a_lock_of_somebody_who_only_reads_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    lock = files._lock

    def late(file: BinaryIO) -> bool | None:
        if not held:
            held.append(os.open(file.name, os.O_RDONLY))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return lock(file)

    monkeypatch.setattr(files, "_lock", late)
    with new_file(tmp_path / "a") as file:
        file.write(b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    os.close(held[0])


def test_where_there_are_no_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with new_file(tmp_path / "a") as file:
        file.write(b"data")
    abandoned(tmp_path)
    assert remove_abandoned(tmp_path, "step-") == []
