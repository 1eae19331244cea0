"""Writes that set the time of modification back: only ctime tells of them, and other names excuse no ctime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from tests.desk import in_place
from tests.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import WeightFileError, load, read_weights, write_delta
from weightswap_runtime.sources import CLOCK_TICK_NS, LocalFile

Meanwhile = Callable[[Path], None]


def plain(tiny: TinyArtifact, path: Path, seed: int) -> Path:
    """Without digests."""
    safetensors.torch.save_file(tiny.values(seed), path)
    return path


def names(path: Path) -> None:
    """Another hard link of it is removed, and nothing else."""
    path.with_name("link").unlink()


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def mode(path: Path) -> None:
    path.chmod(0o640)


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Meanwhile], None]:
    """Do something to a file between the first and the second read of tensors' bytes from it."""

    def arrange(path: Path, meanwhile: Meanwhile) -> None:
        path.with_name("link").hardlink_to(path)
        time.sleep(2 * CLOCK_TICK_NS / 1e9)
        original, done = LocalFile.read_into, list[bool]()

        def read_into(source: LocalFile, buffers: list[memoryview], offset: int) -> None:
            original(source, buffers, offset)
            if source.where == str(path) and offset > 8 and not done:  # 8: the header
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
    with pytest.raises(WeightFileError, match=r"changed while it was read \(from 2 to 1 names\).* Try again"):
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
    """A file is read only when a later write would show, and that is a matter of ctime."""
    path = plain(tiny, tmp_path / "plain.safetensors", 1)
    os.utime(path, ns=(1 << 62, 1 << 62))
    source = LocalFile(path)
    source.settle()
    assert time.time_ns() - path.stat().st_ctime_ns >= CLOCK_TICK_NS
    in_place(path, plain(tiny, tmp_path / "other.safetensors", 2).read_bytes())
    with pytest.raises(WeightFileError, match="changed while it was read"):
        source.check_unchanged()
    source.close()
