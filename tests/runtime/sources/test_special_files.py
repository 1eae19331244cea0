"""Outputs to names that exist: links are kept, and devices, pipes and sockets are never replaced."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.support.varied import RichFiles
from weightswap_exporter import export, pack, publish
from weightswap_exporter.engines.onnx_external import export_onnx
from weightswap_exporter.parity.checks import record_outputs
from weightswap_runtime import Unsupported, load, merge_deltas, write_delta
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_runtime.sources import writing as files
from weightswap_runtime.sources.writing import new_file, new_folder
from weightswap_runtime.tensors import TensorBytes
from weightswap_tools.inputs import write_tensors
from weightswap_tools.inspect.command import inspect_command
from weightswap_tools.reports.blocks import Report
from weightswap_tools.reports.page import write_report

REPORT = Report("title", "", ())
Write = Callable[[RichFiles, Path], object]
WRITERS: dict[str, Write] = {
    "pack": lambda files, out: pack(files.models[1], files.artifact, out=out),
    "delta": lambda files, out: write_delta(files.full[0], files.full[1], out),
    "merge": lambda files, out: merge_deltas([files.deltas[0, 1]], out),
    "tensors": lambda _, out: write_tensors(out, {"a": TensorBytes("F32", (1,), memoryview(bytes(4)))}),
    "export": lambda _, out: export(nn.Linear(2, 2).eval(), (torch.zeros(2),), out=out),
    "onnx": lambda files, out: export_onnx(files.artifact, files.full[0], out=out),
    "goldens": lambda files, out: record_outputs(out, files.models[1], files.artifact),
    "publish": lambda files, out: publish(files.models[1], out, files.artifact, step=1).wait(),
}


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    return RichFiles(tmp_path_factory.mktemp("special"), 2)


@contextmanager
def pipe(path: Path) -> Iterator[None]:
    os.mkfifo(path)
    yield


@contextmanager
def device(path: Path) -> Iterator[None]:
    """Device node that accepts everything, like /dev/null."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making devices is not allowed")
    yield


@contextmanager
def bound_socket(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        yield


SPECIAL = {"pipe": pipe, "device": device, "socket": bound_socket}


@pytest.mark.pairwise
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_special_files_are_not_replaced(
    write: Write, linked: bool, special: Callable[[Path], Iterator[None]], rich: RichFiles, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    existing = tmp_path / "there" if linked else out
    with special(existing):  # type: ignore[attr-defined]
        if linked:
            out.symlink_to(existing)
        before = existing.lstat()
        with pytest.raises(Unsupported, match=r"is a (named pipe|device|socket), which weightswap never replaces"):
            write(rich, out)
        assert (existing.lstat().st_ino, existing.lstat().st_mode) == (before.st_ino, before.st_mode)
        assert out.is_symlink() == linked
        assert sorted(tmp_path.iterdir()) == sorted({out, existing})


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
def test_special_files_as_goldens_are_not_replaced(
    special: Callable[[Path], Iterator[None]], rich: RichFiles, tmp_path: Path
) -> None:
    out = tmp_path / "v.safetensors"
    with special(goldens_path(out)):  # type: ignore[attr-defined]
        for write in (WRITERS["pack"], WRITERS["delta"]):
            with pytest.raises(Unsupported, match="which weightswap never replaces"):
                write(rich, out)
            assert list(tmp_path.iterdir()) == [goldens_path(out)]


@pytest.mark.parametrize("write", [WRITERS[name] for name in ("pack", "delta")])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_file_is_replaced(write: Write, exists: bool, rich: RichFiles, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, out = tmp_path / "elsewhere" / "real.safetensors", tmp_path / "v.safetensors"
    if exists:
        target.write_bytes(b"old")
    out.symlink_to("hop")
    (tmp_path / "hop").symlink_to(Path("elsewhere", "real.safetensors"))
    write(rich, out)
    assert str(out.readlink()) == "hop"
    assert target.is_file()
    assert target.stat().st_size > 100
    assert [path.name for path in target.parent.iterdir()] == ["real.safetensors"]


def test_a_link_to_an_artifact_stays(tmp_path: Path) -> None:
    link = tmp_path / "net.artifact"
    link.symlink_to("real.artifact")
    for size in (2, 3):
        export(nn.Linear(size, size).eval(), (torch.zeros(size),), out=link)
        assert str(link.readlink()) == "real.artifact"
        assert load(link).artifact.manifest.weights[0].shape[-1] == size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.artifact", "real.artifact"]


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for write in (new_file, new_folder, files.new_report):
        with pytest.raises(OSError, match="symbolic links"), write(tmp_path / "a"):  # type: ignore[operator]
            pass
    assert str((tmp_path / "a").readlink()) == "b"


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_a_report_is_written_through_a_pipe(linked: bool, tmp_path: Path) -> None:
    existing, out = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(existing)
    if linked:
        out.symlink_to(existing)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(existing.read_bytes()))
    reader.start()
    write_report(out if linked else existing, REPORT)
    reader.join(120)
    assert read[0].startswith(b"<!doctype html>")
    assert read[0].rstrip().endswith(b"</html>")
    assert stat.S_ISFIFO(existing.lstat().st_mode)


def test_html_says_at_once_where_it_cannot_go(rich: RichFiles, tmp_path: Path) -> None:
    command = [str(rich.full[0]), "--html"]
    with bound_socket(tmp_path / "socket"):
        done = CliRunner().invoke(inspect_command, [*command, str(tmp_path / "socket")])
    assert done.exit_code == 2
    assert "weightswap never replaces" in " ".join(done.output.replace("│", " ").split())
    with device(tmp_path / "null"):
        done = CliRunner().invoke(inspect_command, [*command, str(tmp_path / "null")])
        assert done.exit_code == 0
        assert stat.S_ISCHR((tmp_path / "null").lstat().st_mode)


def without_sync(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsync fail for folders, but not for files."""
    original = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            fail(code)
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def fail(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_synchronise_folders_are_fine(
    code: int, rich: RichFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_sync(code, monkeypatch)
    WRITERS["pack"](rich, tmp_path / "v.safetensors")
    assert (tmp_path / "v.safetensors").is_file()
