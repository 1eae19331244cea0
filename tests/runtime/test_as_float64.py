"""Every code of the small floating types, with torch as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.tensors import DTYPES, TORCH_NAMES, TensorBytes, as_array, as_float64, has_fractions
from weightswap_runtime.torch_tensors import as_tensor, tensor_content

SMALL = [name for name, row in DTYPES.items() if row.torch and row.bits <= 16 and has_fractions(name)]


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_is_what_torch_says(dtype: str) -> None:
    bits = DTYPES[dtype].bits
    codes = np.arange(2**bits, dtype=f"<u{bits // 8}")
    found = as_float64(TensorBytes(dtype, codes.shape, codes.view(np.uint8).data))
    expected = as_tensor(bytearray(codes.tobytes()), dtype, codes.shape).to(torch.float64).numpy()
    nan = np.isnan(expected)
    assert found.dtype == np.float64
    assert (np.isnan(found) == nan).all()
    assert (
        as_array(TensorBytes(dtype, codes.shape, codes.view(np.uint8).data))[~nan].astype(float) == expected[~nan]
    ).all()
    assert (found.view(np.uint64) == expected.view(np.uint64))[~nan].all()  # the sign of zero, too


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_dtype_is_read_as_float64_and_has_fractions_as_torch_says(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert has_fractions(TORCH_NAMES[name]) == (dtype.is_floating_point or dtype.is_complex)
    assert as_float64(tensor_content(tensor)).tolist() == tensor.to(wide).flatten().tolist()
    assert as_float64(tensor_content(torch.empty(0, 3, dtype=dtype))).shape == (0,)


def test_elements_smaller_than_a_byte_are_refused() -> None:
    with pytest.raises(Unsupported, match="dtype F4: numpy has no such type"):
        as_float64(TensorBytes("F4", (2,), memoryview(b"x")))
