"""A live model never reads a file, and a file that changes while it is read never becomes live."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.tiny import TinyArtifact, WriteWeights, plain, serves
from weightswap_runtime import WeightFileError, load


def test_a_live_model_never_reads_its_file(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    path = weight_file(0)
    model = load(tiny.path, path, residency=residency)
    path.write_bytes(b"")
    assert serves(model, 0)


def test_a_file_rewritten_while_it_is_read_is_refused(
    tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0))
    victim = plain(tiny, tmp_path / "victim.safetensors")
    original = os.preadv

    def rewriting(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = original(fd, buffers, offset)
        os.utime(victim, ns=(1, 1))
        return got

    monkeypatch.setattr(os, "preadv", rewriting)
    with pytest.raises(WeightFileError, match="written to while it was read"):
        model.swap(victim)
    monkeypatch.undo()
    assert serves(model, 0)
