"""Ranges of bytes: written, read and copied like slices, with native code and without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightswap_runtime import byte_ranges
from weightswap_runtime.byte_ranges import CHUNK, ByteRanges
from weightswap_runtime.tensors import BLOCK

SIZE = 6000
pytestmark = pytest.mark.usefixtures("_code")


@st.composite
def _ranges(draw: st.DrawFn) -> ByteRanges:
    random = np.random.default_rng(draw(st.integers(0, 999)))
    if draw(st.booleans()):  # rows
        width = draw(st.sampled_from([1, 3, 4, 64, 100, 256, 1024, 3000]))
        count = draw(st.integers(1, SIZE // width))
        ids = np.sort(random.choice(SIZE // width, count, replace=False)).astype(np.int64)
        return ByteRanges.of_rows(ids, width, memoryview(random.bytes(count * width)))
    cuts = np.unique(random.integers(0, SIZE + 1, 2 * draw(st.integers(0, 20))))
    runs = cuts[: len(cuts) // 2 * 2].reshape(-1, 2)
    if len(runs) > 1 and draw(st.booleans()):
        runs[1:, 0] = np.where(random.random(len(runs) - 1) < 0.5, runs[:-1, 1], runs[1:, 0])  # some touch each other
    return ByteRanges.of(runs, memoryview(random.bytes(int((runs[:, 1] - runs[:, 0]).sum()))))


checked = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _after(content: bytes, ranges: ByteRanges) -> bytes:
    """Return a content with the ranges laid over it, by slices."""
    expected = bytearray(content)
    for begin, end, offset in zip(*(side.tolist() for side in ranges[:3]), strict=True):
        expected[begin:end] = ranges.data[offset : offset + end - begin]
    return bytes(expected)


@checked
@given(ranges=_ranges(), most=st.sampled_from([1, 7, 100, 1000, 1 << 20]))
def test_what_is_scattered_is_gathered_and_copied(ranges: ByteRanges, most: int) -> None:
    before = np.random.default_rng(0).bytes(SIZE)
    memory, other = memoryview(bytearray(before)), memoryview(bytearray(before))
    assert ranges.fit(SIZE)
    for part in ranges.split(most):
        assert part.nbytes <= most
        byte_ranges.scatter(memory, part)
    assert memory.tobytes() == _after(before, ranges)
    found = ranges._replace(data=memoryview(bytearray(ranges.nbytes)))
    for part in found.split(most):
        byte_ranges.gather(memory, part)
    assert found.data.tobytes() == ranges.data.tobytes()
    byte_ranges.copy(other, memory, ranges)
    assert other.tobytes() == memory.tobytes()


@checked
@given(ranges=_ranges(), low=st.integers(0, SIZE), size=st.integers(1, SIZE), apart=st.sampled_from([0, 1, 50, SIZE]))
def test_parts_and_places(ranges: ByteRanges, low: int, size: int, apart: int) -> None:
    before = bytes(SIZE)
    after, high = _after(before, ranges), min(SIZE, low + size)
    piece = bytearray(before[low:high])
    for begin, data in ranges.within(low, high):
        piece[begin : begin + len(data)] = data
    assert bytes(piece) == after[low:high]
    touched = np.zeros(SIZE, np.bool_)
    for begin, end in zip(ranges.begins.tolist(), ranges.ends.tolist(), strict=True):
        touched[begin:end] = True
    assert ranges.chunks().tolist() == np.unique(np.flatnonzero(touched) // CHUNK).tolist()
    assert ranges.blocks().tolist() == np.unique(np.flatnonzero(touched) // BLOCK).tolist()
    joined = ranges.joined(apart)
    assert (joined.begins[1:] - joined.ends[:-1] > apart).all()
    covered = np.zeros(SIZE, np.bool_)
    for begin, end in zip(joined.begins.tolist(), joined.ends.tolist(), strict=True):
        covered[begin:end] = True
    assert covered[touched].all()
    assert ranges.moved(10).begins.tolist() == (ranges.begins + 10).tolist()


@pytest.mark.parametrize(
    "runs", [[[4, 24]], [[-4, 16]], [[0, 12], [8, 16]], [[12, 20], [0, 12]], [[0, 0], [0, 20]], [[0, 16]]]
)
def test_ranges_that_do_not_fit(runs: list[list[int]]) -> None:
    assert not ByteRanges.of(np.array(runs, np.int64), memoryview(bytes(20))).fit(20)
