"""Listings of directories: which files count, their order, and their fingerprints."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from tests.support.file_queue_rig import in_place
from weightswap_runtime import Unsupported, WeightFileError
from weightswap_runtime.following.directory import UNKNOWN, Entry, fingerprint, open_directory, order
from weightswap_runtime.sources.byte_source import CLOCK_TICK_NS

IN_ORDER = [
    "best.safetensors",
    "step-000000009-ffffffffffff.safetensors",
    "step-000000010-000000000000.safetensors",
    "step-1000-000000000000.safetensors",
    "v1.safetensors",
    "v1-1.safetensors",
    "v1-2.safetensors",
    "v1-10.safetensors",
    "v2.safetensors",
    "v10.safetensors",
]

BESIDE = ("v1.goldens.safetensors", "v1.safetensors.sig")


def entry(name: str, modified: float = 0.0) -> Entry:
    return Entry(name, Path(name), modified, modified)


def test_numbers_in_names_count_by_their_value() -> None:
    entries = [entry(name) for name in IN_ORDER]
    random.Random(3).shuffle(entries)
    assert [each.name for each in sorted(entries, key=order)] == IN_ORDER


@pytest.mark.parametrize("url", [False, True], ids=["path", "url"])
@pytest.mark.parametrize("name", BESIDE)
def test_what_is_beside_a_file_is_listed_with_it(name: str, url: bool, tmp_path: Path) -> None:
    folder = tmp_path
    if url:
        memory = fsspec.filesystem("memory")
        folder = f"memory://{tmp_path.name}"  # type: ignore[assignment]
    (tmp_path / "v1.safetensors").write_bytes(b"x")
    found: list[Entry] = []
    for content in (None, b"half", b"a whole one"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        if url:
            for path in tmp_path.iterdir():
                memory.pipe(f"/{tmp_path.name}/{path.name}", path.read_bytes())
        found += open_directory(folder)()
    assert [file.name for file in found] == ["v1.safetensors"] * 3
    assert len({file.beside for file in found}) == 3


def test_a_local_directory(tmp_path: Path) -> None:
    (tmp_path / "v1.safetensors").write_bytes(b"one")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "v1.safetensors")
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("v1.goldens.safetensors", ".v1.safetensors", ".v1.safetensors.tmp-01234567", "v1.safetensors.part"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("v1.safetensors.sig", "v1.safetensors.index.json", "v1.bin"):
        (tmp_path / name).write_bytes(b"x")
    found = {each.name: each for each in open_directory(tmp_path)()}
    assert found.keys() == {"v1.safetensors", "link.safetensors", "v1.safetensors.index.json"}
    assert found["v1.safetensors"].path == tmp_path / "v1.safetensors"
    assert found["v1.safetensors"].modified == (tmp_path / "v1.safetensors").stat().st_mtime


def test_a_file_whose_status_cannot_be_had_is_listed_as_unknown(tmp_path: Path) -> None:
    path = tmp_path / "v1.safetensors"
    path.symlink_to(path)
    assert open_directory(tmp_path)() == [Entry("v1.safetensors", path, UNKNOWN, 0.0)]


def change_size(path: Path) -> None:
    path.write_bytes(b"another")


def replace(path: Path) -> None:
    times = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [change_size, replace, rewrite])
def test_a_fingerprint_changes_with_the_file(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "v1.safetensors"
    path.write_bytes(b"one")
    listing = open_directory(tmp_path)
    before = listing()
    path.chmod(0o600)
    (tmp_path / "name").hardlink_to(path)
    assert listing()[0]._replace(changed=before[0].changed) == before[0]
    change(path)
    assert [each.name for each in listing()] == ["v1.safetensors"]
    assert listing()[0].fingerprint != before[0].fingerprint


@pytest.mark.parametrize("url", [False, True], ids=["path", "url"])
@pytest.mark.parametrize("written", ["v1.safetensors", *BESIDE])
def test_a_rewrite_that_sets_the_time_back_shows(written: str, url: bool, tmp_path: Path) -> None:
    for name in ("v1.safetensors", *BESIDE):
        (tmp_path / name).write_bytes(b"one")
    listing = open_directory(f"file://{tmp_path}" if url else tmp_path)
    before = listing()
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    in_place(tmp_path / written, b"two")
    (after,) = listing()
    assert after.fingerprint == before[0].fingerprint
    assert (after.changed, after.beside) != (before[0].changed, before[0].beside)


@pytest.mark.parametrize("name", ["9" * 5000, "9" * 5000 + ".safetensors", "a\0b.safetensors", "a\0b"])
def test_a_path_that_cannot_be_has_no_fingerprint(name: str, tmp_path: Path) -> None:
    found = fingerprint(tmp_path / name, lambda: None)
    assert found is UNKNOWN or {entry.fingerprint for entry in found} == {UNKNOWN}  # type: ignore[attr-defined]


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "box").mkdir(parents=True)
        (tmp_path / folder / "box" / f"{folder}.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "one")
    listing = open_directory("box")
    monkeypatch.chdir(tmp_path / "two")
    assert [each.path for each in listing()] == [tmp_path / "one" / "box" / "one.safetensors"]


def test_without_a_working_directory_nothing_can_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(WeightFileError):
        open_directory("box")()


@pytest.mark.parametrize(
    ("where", "says"),
    [("nowhere", "nowhere: no such directory; create it"), ("file", "cannot be listed"), ("a\0b", "cannot be listed")],
)
def test_what_cannot_be_listed(where: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WeightFileError, match=says):
        open_directory(tmp_path / where)()


@pytest.mark.parametrize("url", ["http://host/run/", "HTTPS://me:s3cret@host/run"])
def test_a_web_server_is_not_watched(url: str) -> None:
    with pytest.raises(Unsupported) as refused:
        open_directory(url)
    assert "s3cret" not in str(refused.value)


def test_messages_show_no_secrets() -> None:
    with pytest.raises(WeightFileError) as caught:
        open_directory("memory://me:password@host/nowhere?signature=s3cret")()
    assert str(caught.value).startswith("memory://***@host/nowhere?signature=***: cannot be listed (FileNotFoundError")
    assert not {"password", "s3cret"} & set(re.findall(r"\w+", str(caught.value)))


def test_a_file_url_lists_what_the_path_does(tmp_path: Path) -> None:
    for name in ("v1.safetensors", "v2.safetensors", ".v3.safetensors"):
        (tmp_path / name).write_bytes(b"12345678")
    local, remote = open_directory(tmp_path)(), open_directory(f"file://{tmp_path}")()
    assert {(each.name, each.modified) for each in remote} == {(each.name, each.modified) for each in local}
