"""What ranks have of a weight, against torch's chunk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.format import cuts
from weightswap_runtime.format.cuts import Share, SharedChange, digests_together, part_of_rank
from weightswap_runtime.format.manifest import Cut, NamedTensor


@st.composite
def _cut_weights(draw: st.DrawFn) -> tuple[torch.Tensor, Cut, int]:
    size = draw(st.sampled_from([2, 3, 4, 8]))
    cut = Cut(
        dim=draw(st.integers(0, 3)),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        repeat=draw(st.sampled_from([each for each in (1, 2, 4, 8) if size % each == 0])),
    )
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(cut.dim + 1, 4)))]
    shape[cut.dim] = cut.groups * (size // cut.repeat) * draw(st.integers(0, 3))
    numbers = 1
    for length in shape:
        numbers *= length
    return torch.arange(numbers, dtype=torch.int16).reshape(shape), cut, size


@given(_cut_weights(), st.data())
def test_a_share_is_the_chunk_of_each_group_whatever_ranges_it_is_gathered_from(
    weight: tuple[torch.Tensor, Cut, int], data: st.DataObject
) -> None:
    whole, cut, size = weight
    row = NamedTensor(name="w", dtype="I16", shape=tuple(whole.shape))
    raw = memoryview(whole.numpy().tobytes())
    for rank in range(size):
        parts = [group.chunk(size // cut.repeat, cut.dim)[rank // cut.repeat] for group in _groups(whole, cut)]
        expected = torch.cat(parts, cut.dim)
        assert part_of_rank(row, cut, size).shape == tuple(expected.shape)

        share, found, begin = Share.of(row, cut, size, rank), bytearray(expected.nbytes), 0
        while begin < len(raw):
            end = data.draw(st.integers(begin + 1, len(raw)), "end of a range")
            target = memoryview(found)[share.before(begin) : share.before(end)]
            share.gather(begin, raw[begin:end], target)
            begin = end
        assert bytes(found) == expected.contiguous().numpy().tobytes()


@given(_cut_weights(), st.data())
def test_new_bytes_of_the_whole_are_cut_as_the_whole_is(
    weight: tuple[torch.Tensor, Cut, int], data: st.DataObject
) -> None:
    whole, cut, size = weight
    row = NamedTensor(name="w", dtype="I16", shape=tuple(whole.shape))
    raw = bytearray(whole.numpy().tobytes())
    assume(raw)
    edges = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12), "edges"))
    runs = np.array(list(zip(edges[::2], edges[1::2], strict=False)), np.int64).reshape(-1, 2)
    ranges = ByteRanges.of(runs, memoryview(data.draw(st.binary(min_size=(n := _total(runs)), max_size=n))))
    changed = memoryview(bytearray(raw))
    for begin, new in ranges.pieces():
        changed[begin : begin + len(new)] = new
    for share in (Share.of(row, cut, size, rank) for rank in range(size)):
        part, expected = (memoryview(bytearray(share.before(len(raw)))) for _ in range(2))
        share.gather(0, memoryview(raw), part)
        share.gather(0, changed, expected)
        mine = share.cut(ranges)
        assert mine.fit(len(part))
        for begin, new in mine.pieces():
            part[begin : begin + len(new)] = new
        assert part == expected
        share.spread(0, expected, memoryview(raw))
    assert raw == changed


def _total(runs: np.ndarray) -> int:
    return int((runs[:, 1] - runs[:, 0]).sum())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_cut_weights(), st.integers(1, 40), st.integers(1, 100), st.data())
def test_ranks_find_the_digests_of_blocks_together(
    monkeypatch: pytest.MonkeyPatch,
    weight: tuple[torch.Tensor, Cut, int],
    block: int,
    at_once: int,
    data: st.DataObject,
) -> None:
    whole, cut, size = weight
    row = NamedTensor(name="w", dtype="I16", shape=tuple(whole.shape))
    raw = memoryview(whole.numpy().tobytes())
    assume(raw)
    with monkeypatch.context() as patch:
        patch.setattr(cuts, "BLOCK", block)
        patch.setattr(cuts, "_AT_ONCE", at_once)
        blocks = sorted(data.draw(st.sets(st.integers(0, (len(raw) - 1) // block), max_size=8), "blocks"))
        shares = [Share.of(row, cut, size, rank) for rank in range(size)]
        changes = [SharedChange(shares, rank, len(raw), blocks) for rank in range(size)]
        for share, change in zip(shares, changes, strict=True):
            part = memoryview(bytearray(share.before(len(raw))))
            share.gather(0, raw, part)
            for index in blocks:
                change.note(index, lambda begin, end, part=part: part[begin:end])
        meeting = Meeting(size)
        with ThreadPoolExecutor(size) as pool:
            found = list(
                pool.map(lambda each: digests_together({"w": each[1]}, meeting.of(each[0])), enumerate(changes))
            )
    expected = {index: blake3(raw[index * block : (index + 1) * block]).digest() for index in blocks}
    assert found == [{"w": expected}] * size
    most = max([at_once, min(block, len(raw)), 32])
    assert all(length <= most for length in meeting.lengths)


@pytest.mark.parametrize("dim", [0, 1])  # a block is of one rank, and its twin; of all of them
def test_a_rank_that_has_other_bytes_than_its_twin_finds_another_digest(dim: int) -> None:
    row = NamedTensor(name="w", dtype="U8", shape=(4, 4 if dim else 1 << 20))
    size, raw = 4, memoryview(bytearray(1 << (4 if dim else 22)))
    shares = [Share.of(row, Cut(dim=dim, repeat=2), size, rank) for rank in range(size)]
    changes = [SharedChange(shares, rank, len(raw), [0]) for rank in range(size)]
    for rank, change in enumerate(changes):
        change.note(0, lambda begin, end, odd=rank == 1: memoryview(bytes([odd]) * (end - begin)))
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: digests_together({"w": changes[rank]}, meeting.of(rank)), range(size)))
    right = {"w": {0: blake3(raw[: 1 << 20]).digest()}}
    assert [each == right for each in found] == [True, False, True, True]


class Meeting:
    """An exchange of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._raws = Barrier(size, timeout=30), [b""] * size
        self.lengths: list[int] = []

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(raw: bytes) -> list[bytes]:
            self._raws[rank] = raw
            self._barrier.wait()
            found = list(self._raws)
            self.lengths += map(len, found)
            assert len({len(each) for each in found}) == 1
            self._barrier.wait()
            return found

        return exchange


def _groups(whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, ...]:
    return whole.split(max(1, whole.shape[cut.dim] // cut.groups), cut.dim)
