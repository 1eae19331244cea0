"""Strides, validity and names of types."""

from __future__ import annotations

import pytest
import torch

from weightswap_runtime.tensors import TensorType, describe, is_valid, row_major


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (0, 4), (1, 5, 1)])
def test_row_major_strides_are_those_that_torch_gives(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


def test_a_tensor_has_at_most_as_many_dimensions_as_torch_has() -> None:
    """The product of very many sizes takes minutes, and a message would have all of them."""
    assert is_valid(TensorType("F32", (1,) * 63 + (3,)))
    assert not is_valid(TensorType("F32", (3,) * 64)), "2^63 bytes or more"
    assert not is_valid(TensorType("F32", (3,) * 1_000_000))
    assert describe(TensorType("F32", (3,) * 1_000_000)) == "F32[1000000 dimensions]"
