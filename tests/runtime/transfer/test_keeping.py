"""What was served is kept as files, for a process that starts again."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from tests.support.sessions import live
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_exporter import export
from weightswap_runtime import DigestMismatch, KeptFiles, Unsupported, WeightFileError, load
from weightswap_runtime.transfer import keeping


def kept_ids(kept: KeptFiles) -> list[str]:
    return [path.stem[-12:] for path in kept.files]


def test_the_last_sets_are_kept(tiny: TinyArtifact, tmp_path: Path, residency: Any) -> None:
    model = load(tiny.path, residency=residency, keep_previous="host")
    kept, ids = model.keep(tmp_path / "kept", last=2), []
    for seed in (1, 2, 3):
        ids.append(model.swap(tiny.values(seed), labels={"step": str(seed)}).weights_id)
        assert eventually(lambda: kept_ids(kept)[-1:] == [ids[-1][:12]])
    assert eventually(lambda: kept_ids(kept) == [each[:12] for each in ids[1:]])
    for seed, path in zip((2, 3), kept.files, strict=True):
        again = load(tiny.path, path)
        assert serves(again, seed)
        assert again.weights_id == ids[seed - 1]
        assert again.labels == {"step": str(seed)}
    model.rollback()
    assert eventually(lambda: kept_ids(kept)[-1] == ids[1][:12])
    assert kept.last_error is None


def test_what_was_committed_last_is_written_before_the_model_is_closed(tiny: TinyArtifact, tmp_path: Path) -> None:
    model = load(tiny.path)
    kept = model.keep(tmp_path)
    for seed in range(20):
        model.swap(tiny.values(seed))
    last = model.weights_id
    assert last is not None
    model.close()
    assert not kept.alive
    assert kept_ids(kept)[-1] == last[:12]
    assert len(kept.files) <= 3


def test_what_is_kept_already_is_not_written_again(tiny: TinyArtifact, tmp_path: Path) -> None:
    with load(tiny.path, tiny.values(1)) as model:
        model.keep(tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    before = path.stat().st_mtime_ns
    with load(tiny.path, path) as model, model.keep(path.parent):
        pass
    assert path.stat().st_mtime_ns == before
    assert list(path.parent.iterdir()) == [path]


def test_other_files_stay(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    other = weight_file(9)
    with load(tiny.path) as model:
        model.keep(other.parent, last=1)
        for seed in (1, 2):
            model.swap(tiny.values(seed))
    assert other.exists()
    assert len(list(other.parent.glob("served-*"))) == 1


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_rows_are_kept_whatever_the_order_in_memory(tmp_path: Path) -> None:
    module, x = Strided().eval(), torch.randn(1, 3, 5, 5)
    artifact = export(module, (x,), out=tmp_path / "a.artifact")
    with load(artifact, module) as model:
        model.keep(tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    with torch.no_grad():
        assert torch.equal(load(artifact, path)(x), module(x))


def test_a_full_disk_changes_nothing(tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny.path)
    kept = model.keep(tmp_path / "kept")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        model.swap(tiny.values(1))
        assert eventually(lambda: kept.last_error is not None)
    assert kept.files == ()
    assert serves(model, 1)
    model.swap(tiny.values(2))
    assert eventually(lambda: len(kept.files) == 1 and kept.last_error is None)
    model.close()


def test_memory_that_changed_is_not_kept(tiny: TinyArtifact, tmp_path: Path) -> None:
    """A file whose weights are not those that were verified would be served after a restart."""
    model = load(tiny.path, tiny.values(1))
    arena = live(model).session.arena
    arena.write(0, memoryview(bytearray(b"\7")))
    kept = model.keep(tmp_path)
    assert eventually(lambda: kept.last_error is not None)
    assert "were served; it is not kept" in str(kept.last_error)
    assert kept.files == ()
    assert not isinstance(kept.last_error, DigestMismatch)


@pytest.mark.parametrize("last", [0, -1, 1.5, None])
def test_a_number_that_makes_no_sense_is_refused(last: Any, tiny: TinyArtifact, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="expected a number of files"):
        load(tiny.path).keep(tmp_path, last=last)


def test_a_directory_that_cannot_be_made_is_refused(tiny: TinyArtifact, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightFileError, match="cannot be made"):
        load(tiny.path).keep(tmp_path / "file")


def test_the_newest_stays_the_newest_when_the_clock_is_set_back(
    tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what comes next would be removed at once as the oldest, and a restart would begin with older weights."""
    with load(tiny.path) as model:
        model.keep(tmp_path, last=2)
        for seed in (1, 2):
            model.swap(tiny.values(seed))
            assert eventually(lambda: serves_after_restart(tiny, tmp_path, seed))  # noqa: B023

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) - timedelta(hours=1)

    monkeypatch.setattr(keeping, "datetime", Earlier)
    for seed in (3, 4, 5):
        with load(tiny.path) as model:
            kept = model.keep(tmp_path, last=2)
            model.swap(tiny.values(seed))
        assert serves_after_restart(tiny, tmp_path, seed)
        assert len(kept.files) == 2


def serves_after_restart(tiny: TinyArtifact, directory: Path, seed: int) -> bool:
    newest = keeping.newest_kept(directory)
    return newest is not None and serves(load(tiny.path, newest), seed)
