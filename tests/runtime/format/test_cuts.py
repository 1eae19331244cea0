"""What ranks have of a weight, against torch's chunk."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime.format.cuts import Share, part_of_rank
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


def _groups(whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, ...]:
    return whole.split(max(1, whole.shape[cut.dim] // cut.groups), cut.dim)
