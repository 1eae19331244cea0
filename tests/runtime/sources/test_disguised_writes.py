"""Writes that set the modification time back, or that are slow: ctime reveals the first, a lease the others."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import safetensors.torch

from tests.support.file_queue_rig import in_place
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_runtime import WeightFileError, load, read_weights, write_delta
from weightswap_runtime.sources.byte_source import CLOCK_TICK_NS, LocalFile, has_writer

Meanwhile = Callable[[Path], None]


def plain(tiny: TinyArtifact, path: Path, seed: int) -> Path:
    """Write a file without digests."""
    safetensors.torch.save_file(tiny.values(seed), path)
    return path


def names(path: Path) -> None:
    """Remove a hard link of the file, and change nothing else."""
    path.with_name("link").unlink()


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def mode(path: Path) -> None:
    path.chmod(0o640)


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Meanwhile], None]:
    """Do something to a file between the first and the second read of its tensors."""

    def arrange(path: Path, meanwhile: Meanwhile) -> None:
        path.with_name("link").hardlink_to(path)
        time.sleep(2 * CLOCK_TICK_NS / 1e9)
        original, done = LocalFile.read_into, list[bool]()

        def read_into(source: LocalFile, buffers: list[memoryview], offset: int) -> None:
            original(source, buffers, offset)
            if source.where == str(path) and offset > 8 and not done:  # the first 8 bytes are the header's length
                done.append(True)
                meanwhile(path)

        monkeypatch.setattr(LocalFile, "read_into", read_into)

    return arrange


def test_a_file_that_is_half_rewritten_in_disguise_is_refused(
    tiny: TinyArtifact, tmp_path: Path, weight_file: WriteWeights, while_read: Callable[[Path, Meanwhile], None]
) -> None:
    model = load(tiny.path, weight_file(0))
    path = plain(tiny, tmp_path / "plain.safetensors", 1)
    other = plain(tiny, tmp_path / "other.safetensors", 2).read_bytes()

    def meanwhile(path: Path) -> None:
        in_place(path, other)
        names(path)

    while_read(path, meanwhile)
    with pytest.raises(WeightFileError, match=r"changed while it was read \(from 2 to 1 links\).* Try again"):
        model.swap(path)
    assert serves(model, 0)
    model.swap(path)
    assert serves(model, 2)


@pytest.mark.parametrize("meanwhile", [names, replaced, mode])
def test_without_digests_nothing_may_change(
    meanwhile: Meanwhile,
    tiny: TinyArtifact,
    tmp_path: Path,
    weight_file: WriteWeights,
    while_read: Callable[[Path, Meanwhile], None],
) -> None:
    model = load(tiny.path, weight_file(0))
    path = plain(tiny, tmp_path / "plain.safetensors", 1)
    while_read(path, meanwhile)
    with pytest.raises(WeightFileError, match="cannot be told from a write"):
        model.swap(path)
    assert serves(model, 0)
    model.swap(path)
    assert serves(model, 1)


@pytest.mark.parametrize("meanwhile", [names, replaced, mode])
@pytest.mark.parametrize("way", ["full", "part", "delta", "read_weights"])
def test_with_digests_names_and_modes_may_change(
    way: str,
    meanwhile: Meanwhile,
    tiny: TinyArtifact,
    tmp_path: Path,
    weight_file: WriteWeights,
    while_read: Callable[[Path, Meanwhile], None],
) -> None:
    model = load(tiny.path, weight_file(0))
    path = weight_file(1)
    if way == "delta":
        path = write_delta(weight_file(0), path, tmp_path / "delta.safetensors").path
    while_read(path, meanwhile)
    if way == "read_weights":
        assert read_weights(path).keys() == tiny.values(1).keys()
    else:
        model.swap(path, only="*" if way == "part" else None)
        assert serves(model, 1)
    assert not path.with_name("link").exists() or meanwhile is not names


def test_a_time_of_modification_in_the_future_does_not_hide_a_write(tiny: TinyArtifact, tmp_path: Path) -> None:
    """A file is read only once a later write would show, which depends on ctime."""
    path = plain(tiny, tmp_path / "plain.safetensors", 1)
    os.utime(path, ns=(1 << 62, 1 << 62))
    source = LocalFile(path)
    source.await_stable_mtime()
    assert time.time_ns() - path.stat().st_ctime_ns >= CLOCK_TICK_NS
    in_place(path, plain(tiny, tmp_path / "other.safetensors", 2).read_bytes())
    with pytest.raises(WeightFileError):
        source.check_unchanged()
    source.close()


WRITER = """
import sys
with open(sys.argv[1], "r+b") as file:
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(path: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield
    assert process.returncode == 0


@contextmanager
def this_process(path: Path) -> Iterator[None]:
    with path.open("ab"):
        yield


@contextmanager
def mapping(path: Path) -> Iterator[None]:
    """Map the file writable, and close it: its memory can still be written to."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    with memory:
        yield


Writer = Callable[[Path], AbstractContextManager[None]]
WRITERS = [another_process, this_process, mapping]


@pytest.fixture
def _leases(tmp_path: Path) -> None:
    """Skip on file systems without leases."""
    path = tmp_path / "probe"
    with path.open("wb"), path.open("rb") as file:
        if not has_writer(file.fileno()):
            pytest.skip("no leases here")


@pytest.fixture
def unstamped(tiny: TinyArtifact, tmp_path: Path) -> Path:
    """Weight file of seed 1 without digests."""
    return plain(tiny, tmp_path / "plain.safetensors", 1)


@pytest.mark.usefixtures("_leases")
@pytest.mark.parametrize("writer", WRITERS)
def test_without_digests_a_file_is_refused_until_its_writer_has_closed_it(
    writer: Writer, tiny: TinyArtifact, unstamped: Path, weight_file: WriteWeights
) -> None:
    """A slow write sets the times when it begins, so a later reader would see no change."""
    model = load(tiny.path, weight_file(0))
    with writer(unstamped):
        for _ in range(2):
            with pytest.raises(WeightFileError, match=r"is being written to: .*in this process or another\. Try again"):
                model.swap(unstamped)
    assert serves(model, 0)
    model.swap(unstamped)
    assert serves(model, 1)


@pytest.mark.parametrize("writer", WRITERS)
def test_with_digests_a_writer_does_not_matter(writer: Writer, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with writer(weight_file(1)):
        model.swap(weight_file(1))
    assert serves(model, 1)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_replaces_one_that_is_written_to_is_taken(
    writer: Writer, tiny: TinyArtifact, unstamped: Path, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0))
    with writer(unstamped):
        plain(tiny, unstamped.with_name("new"), 2).replace(unstamped)
        model.swap(unstamped)
    assert serves(model, 2)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.ENOLCK])
def test_where_there_are_no_leases_files_are_taken(
    code: int, tiny: TinyArtifact, unstamped: Path, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none for files of other users, and on some file systems."""
    original = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(code, os.strerror(code))
        return original(fd, command, argument)

    model = load(tiny.path, weight_file(0))
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    model.swap(unstamped)
    assert serves(model, 1)


@pytest.mark.usefixtures("_leases")
def test_a_writer_that_comes_while_it_is_asked_for_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel signals the holder of a lease, and lets the writer wait until the lease is released."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    original, writers = fcntl.fcntl, list[subprocess.Popen[bytes]]()

    def granted(fd: int, command: int, argument: int) -> int:
        result = original(fd, command, argument)
        if argument == fcntl.F_RDLCK and command == fcntl.F_SETLEASE:
            writers.append(
                subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            # the kernel asks for the lease back
            assert eventually(lambda: original(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK)
        return result

    monkeypatch.setattr(fcntl, "fcntl", granted)
    with path.open("rb") as file:
        assert not has_writer(file.fileno())
        (writer,) = writers
        with writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"open\n"
            monkeypatch.undo()
            assert has_writer(file.fileno())
        assert not has_writer(file.fileno())
