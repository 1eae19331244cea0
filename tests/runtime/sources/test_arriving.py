"""Content that comes once and in order: what is read of it, and in which pieces it comes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arriving import arriving, in_pieces
from tests.support.tiny import TinyArtifact, WriteWeights, plain, serves
from weightswap_runtime import (
    BaseMismatch,
    StageCancelled,
    UnexpectedWeights,
    WeightFileError,
    load,
)
from weightswap_runtime.format.delta import write_delta
from weightswap_runtime.jobs import Job
from weightswap_runtime.sources.arriving import Arriving

CONTENT = random.Random(0).randbytes(3000)


@settings(max_examples=40)
@given(
    cuts=st.sets(st.integers(0, 3000), max_size=30),
    wanted=st.lists(st.booleans(), min_size=31, max_size=31),
    pieces=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    looked=st.integers(0, 300),
)
def test_every_byte_can_be_read_once(cuts: set[int], wanted: list[bool], pieces: list[int], looked: int) -> None:
    source = Arriving("x", len(CONTENT), in_pieces(CONTENT, *pieces))
    for _ in range(2):  # the begin may be read again
        head = bytearray(looked)
        source.read_into([memoryview(head)], 0)
        assert head == CONTENT[:looked]
    ends = sorted(cuts | {len(CONTENT)})
    parts = [part for part, is_wanted in zip(zip([0, *ends], ends, strict=False), wanted, strict=False) if is_wanted]
    memory = bytearray(len(CONTENT))
    source.start()
    for begin, end in parts:
        middle = (begin + end) // 2
        source.read_into([memoryview(memory)[begin:middle], memoryview(memory)[middle:end]], begin)
    source.check_unchanged()
    for begin, end in parts:
        assert memory[begin:end] == CONTENT[begin:end]
    if CONTENT[: parts[-1][1] if parts else 0]:
        with pytest.raises(WeightFileError, match="byte 0 was read already"):
            source.read_into([memoryview(bytearray(1))], 0)


def test_a_cancelled_job_ends_the_wait() -> None:
    job = Job()
    source = Arriving("x", 100, lambda check: (job.cancel(), check(), memoryview(b""))[2])  # type: ignore[func-returns-value]
    source.check = job.check
    with pytest.raises(StageCancelled):
        source.read_into([memoryview(bytearray(8))], 0)


@pytest.mark.parametrize("sizes", [(1,), (7, 3, 100), (1 << 16,)])
def test_an_arriving_file_is_served_as_the_file_is(
    sizes: tuple[int, ...], tiny: TinyArtifact, weight_file: WriteWeights, residency: Any, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    expected = load(tiny.path, weight_file(7)).weights_id
    keyed = plain(tiny, tmp_path / "keyed.safetensors", tied=None, again=tiny.values(7)["tied"])
    for path in (weight_file(7), plain(tiny, tmp_path / "plain.safetensors"), keyed):
        receipt = model.swap(arriving(path, *sizes), expect=expected)
        assert (receipt.weights_id, receipt.reloadable, receipt.source) == (expected, False, "memory:upload")
        assert serves(model, 7)
        model.stage(arriving(weight_file(0), *sizes), background=True).commit()
        assert serves(model, 0)
    with pytest.raises(UnexpectedWeights):
        model.swap(arriving(weight_file(2), *sizes), expect=expected)
    assert serves(model, 0)


def test_a_delta_and_a_part_arrive_too(
    tiny: TinyArtifact, weight_file: WriteWeights, residency: Any, tmp_path: Path
) -> None:
    write_delta(weight_file(0), weight_file(1), tmp_path / "delta.safetensors")
    model = load(tiny.path, weight_file(0), residency=residency)
    receipt = model.swap(arriving(tmp_path / "delta.safetensors", 11))
    assert (receipt.kind, receipt.reloadable, serves(model, 1)) == ("delta", False, True)
    with pytest.raises(BaseMismatch):
        model.swap(arriving(tmp_path / "delta.safetensors", 11))
    receipt = model.swap(arriving(weight_file(2), 11), only=["weight", "bias"])
    assert receipt.kind == "partial"
    mixed = {**tiny.values(1), "weight": tiny.values(2)["weight"], "bias": tiny.values(2)["bias"]}
    assert receipt.weights_id == load(tiny.path, mixed).weights_id
