"""Row-major strides."""

from __future__ import annotations

import pytest
import torch

from weightswap_runtime.tensors.dtypes import row_major


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (0, 4), (1, 5, 1)])
def test_row_major_strides_are_those_that_torch_gives(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()
