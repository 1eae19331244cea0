"""Writers on a full disk, on a failing device, or killed: there is the old file or the new one, and no other."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests import ROOT
from tests.support import warm
from tests.support.faults import Fault, each_call, failing, raises
from tests.support.varied import RichFiles
from weightswap_exporter import pack, publish
from weightswap_runtime import WeightswapError, merge_deltas, write_delta
from weightswap_runtime.sources import writing
from weightswap_runtime.sources.writing import new_folder

FULL = raises(OSError(errno.ENOSPC, "No space left on device"))
BROKEN = raises(OSError(errno.EIO, "Input/output error"))


class File:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def seek(self, place: int) -> int:
        return self._file.seek(place)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


FAULTS = {
    "no room to write": Fault(File, "write", FULL),
    "no room to flush": Fault(File, "flush", FULL),
    "no seek": Fault(File, "seek", BROKEN),
    "no sync": Fault(os, "fsync", BROKEN),
    "no rename": Fault(Path, "replace", FULL),
    "no temporary file": Fault(Path, "open", FULL),
    "no status": Fault(os, "fstat", BROKEN),
    "no folder": Fault(Path, "mkdir", FULL),
}
Write = Callable[[RichFiles, Path, int], object]


def _chain(files: RichFiles, last: int) -> list[Path]:
    return [files.deltas[0, 3 - last], files.deltas[3 - last, last]]


WRITERS: dict[str, Write] = {
    "pack": lambda files, out, seed: pack(files.models[seed], files.artifact, out=out / "file.safetensors"),
    "delta": lambda files, out, seed: write_delta(files.full[0], files.full[seed], out / "file.safetensors"),
    "merge": lambda files, out, seed: merge_deltas(_chain(files, seed), out / "file.safetensors"),
    "publish": lambda files, out, seed: publish(files.models[seed], out, files.artifact, step=seed).wait(),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    return RichFiles(tmp_path_factory.mktemp("writing"), 3)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_leaves_the_old_file_or_the_new_one(
    fault: Fault, write: Write, files: RichFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = writing._new_temporary

    def wrapped(path: Path) -> tuple[Path, File]:
        temporary, file = original(path)
        return temporary, File(file)

    monkeypatch.setattr(writing, "_new_temporary", wrapped)
    write(files, tmp_path / "new", 2)
    after = contents(tmp_path / "new")
    write(files, tmp_path, 1)
    (tmp_path / "new").rename(tmp_path.with_name(f"{tmp_path.name}-new"))
    before = contents(tmp_path)
    for number in each_call(fault, lambda: write(files, tmp_path.with_name(f"{tmp_path.name}-new"), 2), 6):
        renamed = fault.name == "fsync" and number == 1  # that of the folder, where the new file is already
        expected: AbstractContextManager[object] = (
            pytest.warns(RuntimeWarning, match="a power failure may lose it")
            if renamed
            else pytest.raises((OSError, WeightswapError), match=r"No space|Input/output")
        )
        with failing(fault, number) as calls, expected:
            write(files, tmp_path, 2)
        assert calls.happened
        found = contents(tmp_path)
        assert found == ({**before, **after} if renamed else before)


@pytest.mark.parametrize("fault", [FAULTS["no sync"], FAULTS["no folder"], Fault(Path, "rename", FULL)])
def test_a_folder_is_the_old_one_or_the_new_one(fault: Fault, tmp_path: Path) -> None:
    def write(text: str) -> None:
        with new_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text(text)
            (folder / "b").write_text(text)

    write("old")
    for number in each_call(fault, lambda: write("old"), 6):
        write("old")
        with failing(fault, number), suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            write("new")
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        texts = {path.read_text() for path in (tmp_path / "folder").iterdir()}
        assert texts in ({"old"}, {"new"})


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EROFS, "Read-only file system")], ids=str)
def test_an_old_folder_that_was_moved_aside_is_not_lost(error: BaseException, lasts: bool, tmp_path: Path) -> None:
    def write(text: str) -> None:
        with new_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text(text)

    write("old")
    with failing(Fault(Path, "rename", raises(error), lasts), 1) as calls, suppress(type(error)):
        write("new")
    assert calls.happened
    (left,) = tmp_path.iterdir()
    assert (left / "a").read_text() == ("new" if isinstance(error, OSError) and not lasts else "old")
    assert left.name == "folder" or lasts


@pytest.mark.parametrize("rounds", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_no_half_file(rounds: int, tmp_path: Path) -> None:
    command = [warm.python(), "-m", "tests.runtime.sources.killed", str(tmp_path), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
