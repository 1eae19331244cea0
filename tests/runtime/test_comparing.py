"""Comparison of tensors, with torch as the oracle, and descriptions of differences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing._comparison import default_tolerances

from weightswap_runtime.tensors import DEFAULT_TOLERANCES, EXACT, TORCH_NAMES, Tolerance, difference, not_finite
from weightswap_runtime.torch_tensors import tensor_content


def differ(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance | None) -> str | None:
    return difference(tensor_content(expected), tensor_content(found), tolerance)


def finite(recorded: torch.Tensor, found: torch.Tensor) -> str | None:
    return not_finite(tensor_content(recorded), tensor_content(found))


DTYPES = [getattr(torch, name) for name in TORCH_NAMES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    one, other = torch.tensor([[1.0, 0, 1]]).to(dtype), torch.tensor([[1.0, 0, 0]]).to(dtype)
    for tolerance in (None, (0.0, 0.0)):
        assert differ(one, one.clone(), tolerance) is None
        text = differ(one, other, tolerance)
        assert text is not None
        assert text.startswith("[0, 2]: expected ")
        assert "1 of 3 elements differ" in text
    assert finite(one, other) is None
    name = TORCH_NAMES[str(dtype).removeprefix("torch.")]
    assert differ(one, torch.ones(1), None) == f": expected {name}[1, 3], found F32[1]"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tolerances_are_those_of_torch(dtype: torch.dtype) -> None:
    name = TORCH_NAMES[str(dtype).removeprefix("torch.")]
    assert DEFAULT_TOLERANCES.get(name, EXACT) == default_tolerances(dtype)


NAN, INF = float("nan"), float("inf")


def test_bit_for_bit() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differ(nans[0], nans[1], None) is None
    text = differ(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), None)
    assert text == (
        "[1]: expected 0.0, found -0.0, absolute difference 0, relative 0; 1 of 2 elements differ, compared bit for bit"
    )
    assert differ(torch.tensor(0.0), torch.tensor(-0.0), (0.0, 0.0)) is None
    assert differ(torch.empty(0, 3), torch.empty(0, 3), None) is None


@pytest.mark.parametrize(
    ("expected", "found", "index"),
    [([1.0, 2.0, 3.0], [1.5, 2.0, NAN], 2), ([INF, 0.0], [INF, 1.0], 1), ([INF, 0.0], [-INF, 1.0], 0)],
)
def test_the_worst_element_is_named(expected: list[float], found: list[float], index: int) -> None:
    for tolerance in (None, (0.1, 0.1)):
        text = differ(torch.tensor(expected), torch.tensor(found), tolerance)
        assert text is not None
        assert text.startswith(f"[{index}]: expected {expected[index]}, found {found[index]}")


def test_integers_are_exact_beyond_the_precision_of_floats() -> None:
    text = differ(torch.tensor([2**60, 7]), torch.tensor([2**60 + 1, 7]), (1.0, 1.0))
    assert text is not None
    assert f"[0]: expected {2**60}, found {2**60 + 1}, absolute difference 1," in text


def test_a_shape_that_depends_on_the_weights_must_be_finite_where_all_was() -> None:
    assert finite(torch.ones(2), torch.ones(3)) is None
    assert finite(torch.ones(2), torch.tensor([1.0, NAN, 1.0])) == (
        "[1]: expected a finite value, found nan; 1 of 3 are not"
    )
    assert finite(torch.tensor([INF, 1.0]), torch.tensor([1.0, NAN, 1.0])) is None


PARTS = (0.0, -0.0, 1.0, 1.0009765625, 1.25, -1.0, 3e38, INF, -INF, NAN)
TOLERANCES = ((0.0, 0.0), (1e-2, 0.0), (0.0, 0.3), (1.0, 1e-5))


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_closeness_is_as_in_torch(dtype: torch.dtype, tolerance: Tolerance) -> None:
    parts = [complex(*pair) for pair in itertools.product(PARTS, PARTS)] if dtype.is_complex else PARTS
    values = torch.tensor(parts).to(dtype)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    rtol, atol = tolerance
    for one, number in zip(values, wide, strict=True):
        close = torch.isclose(wide, number.expand_as(wide), rtol, atol, equal_nan=True)
        told = differ(one.expand_as(values), values, tolerance)
        count = f"; {int((~close).sum())} of {len(values)} elements differ by more than"
        assert count in told if told else bool(close.all())


def test_the_largest_unsigned_integers_are_exact() -> None:
    one, other = (torch.tensor([number], dtype=torch.uint64) for number in (2**64 - 1, 2**64 - 2))
    assert differ(one, one.clone(), (1.0, 1.0)) is None
    text = differ(one, other, (1.0, 1.0))
    assert text is not None
    assert text.startswith(f"[0]: expected {2**64 - 1}, found {2**64 - 2}, absolute difference 1,")


def test_signalling_nans_are_compared_without_a_warning() -> None:
    nans = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert differ(nans, torch.tensor([NAN]), None) is None
    assert finite(nans, nans) is None
