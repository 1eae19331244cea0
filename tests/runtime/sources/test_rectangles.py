"""Tensors that lie in several files as rectangles: any grid over any shape, read from anywhere."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.sources.rectangles import Box, Rectangle, Rectangles, grid_problem

Shape = tuple[int, ...]
SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Cut each dimension somewhere."""
    spans = []
    for size in shape:
        ends = sorted(draw(st.sets(st.integers(1, size))) | {0, size})
        spans.append([(low, high - low) for low, high in pairwise(ends)])
    boxes = [(tuple(low for low, _ in cell), tuple(size for _, size in cell)) for cell in product(*spans)]
    return draw(st.permutations(boxes))


def rectangle(whole: np.ndarray, box: Box, gap: int) -> Rectangle:
    """Return a part of a tensor, behind `gap` bytes of another one."""
    part = whole[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]
    raw = np.frombuffer(b"\xff" * gap + part.tobytes(), np.uint8)
    return Rectangle(*box, MemorySource("part", raw), gap)


@settings(max_examples=50)
@given(st.data())
def test_a_read_of_anything_equals_a_slice_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "<i2", "<i8"])))
    whole = np.arange(1, prod(shape) + 1, dtype=dtype).reshape(shape)
    boxes = data.draw(cuts(shape))
    assert grid_problem(shape, boxes) is None
    source = Rectangles("whole", shape, [rectangle(whole, box, 3) for box in boxes], dtype.itemsize)
    assert source.size == whole.nbytes
    begin = data.draw(st.integers(0, source.size - 1))
    sizes = data.draw(st.lists(st.integers(0, source.size), min_size=1, max_size=4))
    ends = [min(source.size, begin + sum(sizes[: count + 1])) for count in range(len(sizes))]
    buffers = [bytearray(high - low) for low, high in zip([begin, *ends], ends, strict=False)]
    source.read_into([memoryview(buffer) for buffer in buffers], begin)
    assert b"".join(buffers) == whole.tobytes()[begin : ends[-1]]


def test_more_rows_than_one_read_takes_have_a_single_byte_each() -> None:
    whole = np.arange(2 * 3000, dtype=np.uint16).astype(np.uint8).reshape(3000, 2)
    columns = [rectangle(whole, ((0, column), (3000, 1)), 0) for column in (0, 1)]
    read = bytearray(whole.nbytes)
    Rectangles("whole", whole.shape, columns, 1).read_into([memoryview(read)], 0)
    assert read == whole.tobytes()


@settings(max_examples=50)
@given(st.data())
def test_what_has_an_element_twice_or_never_is_no_grid(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes: list[Box] = data.draw(cuts(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1))) if boxes else None
    for _ in range(data.draw(st.integers(0, 2))):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - low)) for low, size in zip(offsets, shape, strict=True))
        boxes.append((offsets, sizes))
    counts = np.zeros(shape, int)
    for offsets, sizes in boxes:
        counts[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))] += 1
    if grid_problem(shape, boxes) is None:
        assert (counts == 1).all()
