"""Measures of the difference between tensors, against torch, numpy and counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightswap_exporter.parity.report import Measure, Worst, measure
from weightswap_runtime.tensors import DTYPES, TensorBytes, difference
from weightswap_runtime.torch_tensors import tensor_content, torch_dtype

FLOATS = ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def content(values: object, dtype: str = "F32") -> TensorBytes:
    return tensor_content(torch.as_tensor(values).to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", [name for name, row in DTYPES.items() if row.torch])
def test_equal_tensors_have_no_distance(dtype: str) -> None:
    values = content([[1, 0, 1], [0, 1, 1]], dtype)
    found = measure(values, values, None)
    assert found.same
    assert found.text == ""
    assert (found.max_abs, found.max_rel, found.scaled, found.elements) == (0, 0, 0, 6)
    assert found.cosine == pytest.approx(1)
    assert found.max_ulp == (0 if dtype.startswith(("F", "B", "C")) and dtype != "BOOL" else None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_counts_the_steps_between_numbers(dtype: str) -> None:
    kind = torch_dtype(dtype)
    bits = DTYPES[dtype].bits
    codes = torch.arange(0, 1 << min(bits, 16), dtype=torch.int32)
    whole = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    every = codes.to(whole).view(kind) if bits <= 16 else codes.to(kind) / 256
    every = every[every.double().isfinite()]
    ordered, _ = every.double().unique().sort()
    if bits > 16:  # far too many to count: one step at a time
        following = torch.nextafter(every, torch.tensor(math.inf, dtype=kind))
        assert measure(tensor_content(every), tensor_content(following), None).max_ulp == 1
        assert measure(tensor_content(every[:1]), tensor_content(following[:1]), None).max_ulp == 1
        return
    first = tensor_content(ordered[:1].expand(len(ordered)).to(kind))
    assert measure(first, tensor_content(ordered.to(kind)), None).max_ulp == len(ordered) - 1


@given(st.lists(st.tuples(F32, F32), min_size=1, max_size=8))
def test_distances_are_those_of_numpy(pairs: list[tuple[float, float]]) -> None:
    one, other = (np.array(side, np.float32).astype(np.float64) for side in zip(*pairs, strict=True))
    found = measure(content([a for a, _ in pairs]), content([b for _, b in pairs]), None)
    gaps = np.abs(other - one)
    assert found.max_abs == gaps.max()
    assert found.mismatches == (one.view(np.int64) != other.view(np.int64)).sum()
    nonzero = one != 0
    with np.errstate(over="ignore"):
        assert found.max_rel == (gaps[nonzero] / np.abs(one[nonzero])).max(initial=0)
    if one.any() and other.any():
        scaled = one / np.abs(one).max(), other / np.abs(other).max()
        cosine = scaled[0] @ scaled[1] / np.linalg.norm(scaled[0]) / np.linalg.norm(scaled[1])
        assert found.cosine == pytest.approx(cosine, abs=1e-12)
    else:
        assert found.cosine is None


@given(st.lists(st.tuples(F32, F32), min_size=1, max_size=8), st.sampled_from([None, (0.0, 0.0), (1e-3, 1e-5)]))
def test_equality_is_that_of_goldens(pairs: list[tuple[float, float]], tolerance: tuple[float, float] | None) -> None:
    one, other = (content(list(side)) for side in zip(*pairs, strict=True))
    assert measure(one, other, tolerance).same == (difference(one, other, tolerance) is None)


def test_not_finite_numbers_are_counted_and_left_out_of_distances() -> None:
    nan, inf = math.nan, math.inf
    found = measure(content([nan, inf, 1.0, 2.0]), content([nan, 1.0, nan, 2.5]), None)
    assert (found.nan, found.infinite, found.mismatches) == ((1, 2), (1, 0), 3)
    assert (found.max_abs, found.max_rel) == (0.5, 0.25)
    assert found.worst is not None
    assert found.worst.index in {(1,), (2,)}


def test_the_worst_element_is_named() -> None:
    found = measure(content([[1.0, 2.0], [3.0, 4.0]]), content([[1.0, 2.5], [3.0, 4.25]]), (0.0, 0.3))
    assert found.worst == Worst((0, 1), 2.0, 2.5)
    assert found.mismatches == 1
    says = "[0, 1]: expected 2.0, found 2.5; 1 of 4 elements differ, by at most 0.5 (0.25 relative"
    assert found.text.startswith(says)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (content([1.0]), content([1.0, 2.0]), "expected F32[1], found F32[2]"),
        (content([1.0]), content([1.0], "F16"), "expected F32[1], found F16[1]"),
        (content(3, "I64"), content(4, "I64"), "expected 3, found 4; 1 of 1 elements differ, by at most 1 (0.333 rel"),
        (content(1j, "C64"), content(2j, "C64"), "expected 1j, found 2j; 1 of 1 elements differ"),
        (content(True, "BOOL"), content(False, "BOOL"), "expected True, found False"),
    ],
)
def test_differences_in_words(one: TensorBytes, other: TensorBytes, says: str) -> None:
    found = measure(one, other, None)
    assert not found.same
    assert says in found.text


def test_numbers_whose_squares_overflow() -> None:
    found = measure(
        *(content(torch.tensor([1e300, sign * 1e300], dtype=torch.float64), "F64") for sign in (-1, 1)), None
    )
    assert found.cosine == pytest.approx(0)
    assert found.max_abs == 2e300


def test_tensors_without_elements() -> None:
    nothing = content(torch.empty(0, 3))
    assert measure(nothing, nothing, None) == Measure(expected="F32[0, 3]", found="F32[0, 3]", max_ulp=0)
