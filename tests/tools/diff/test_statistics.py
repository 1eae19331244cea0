"""The statistics of a pair of tensors, with torch, numpy and exact arithmetic as oracles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightswap_runtime.tensors import DTYPES as TABLE
from weightswap_runtime.tensors import TORCH_NAMES, TensorBytes, as_float64, block_digests, tensor_digest
from weightswap_runtime.torch_tensors import tensor_content
from weightswap_tools.diff import Change, Values, statistics, streaming
from weightswap_tools.diff.statistics import EXACT_INTEGERS, Summary, merged
from weightswap_tools.diff.streaming import Reader, Scan

DTYPES = [getattr(torch, name) for name in TORCH_NAMES]
DTYPES_OF_BYTES = {name: row.bits // 8 for name, row in TABLE.items() if row.bits % 8 == 0}
NAN, INF = math.nan, math.inf
MOST = np.finfo(np.float64).max


def scan(*tensors: torch.Tensor) -> Summary:
    """The summary of one tensor, or of a pair."""
    return scanned([TensorBytes(*tensor_content(tensor)) for tensor in tensors]).summary  # type: ignore[return-value]


def scanned(contents: list[TensorBytes], *, hashed: bool = False) -> Scan:
    scan = Scan(contents, hashed=hashed)
    Reader(0, None).run([scan])
    return scan


def compare(before: torch.Tensor, after: torch.Tensor) -> tuple[Values, Values, Change]:
    (old, new), change = scan(before, after)
    assert change is not None
    return old, new, change


def largest(before: torch.Tensor, after: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """Return where the largest change is, and how large it is."""
    found = compare(before, after)[2].largest
    assert found is not None
    return found.index, found.change


def random(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values, torch.randn(shape, generator=generator)).to(dtype)
    return values.to(dtype)


def wide(tensor: torch.Tensor) -> np.ndarray:
    """Elements as 64-bit floats, complex ones as two."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).double().numpy().reshape(-1)
    return as_float64(tensor_content(tensor))


def expected_change(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Expected statistics of the finite values, computed by numpy at once."""
    gaps = new - old
    ratios = np.abs(gaps[old != 0] / old[old != 0])
    return {
        "elements": old.size,
        "changed": int((gaps != 0).sum()),
        "norm": float(np.linalg.norm(gaps)),
        "rel_change": float(np.linalg.norm(gaps) / np.linalg.norm(old)),
        "max_rel_change": float(ratios.max(initial=0)),
        "cosine": float(old @ new / np.linalg.norm(old) / np.linalg.norm(new)),
        "sign_flips": int((np.sign(old) * np.sign(new) < 0).sum()),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    before, after = random(dtype, (70, 30), 1), random(dtype, (70, 30), 2)
    old, new, change = compare(before, after)
    one, other = wide(before), wide(after)
    for name, value in expected_change(one, other).items():
        assert getattr(change, name) == pytest.approx(value, rel=1e-12), name
    for values, numbers in ((old, one), (new, other)):
        assert values.mean == pytest.approx(numbers.mean(), rel=1e-12)
        assert values.std == pytest.approx(numbers.std(), rel=1e-12)
        assert values.norm == pytest.approx(np.linalg.norm(numbers), rel=1e-12)
    assert change.largest is not None
    assert change.largest.change == np.abs(other - one).max()
    shape = (70, 30, 2) if dtype.is_complex else (70, 30)
    place = np.ravel_multi_index(change.largest.index, shape)
    assert (change.largest.before, change.largest.after) == (one[place], other[place])
    assert sum(change.histogram.counts) == change.changed


@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.float16, torch.float64)], ids=str)
def test_a_cast_costs_what_torch_says(pair: tuple[torch.dtype, torch.dtype]) -> None:
    before = random(pair[0], (200, 50), 3)
    after = before.to(pair[1])
    change = compare(before, after)[2]
    norm = (after.double() - before.double()).norm() / before.double().norm()
    assert change.rel_change == pytest.approx(norm.item(), rel=1e-12)
    assert change.changed == int((after.double() != before.double()).sum())


def test_a_complex_number_beside_a_real_one() -> None:
    before, after = torch.tensor([1.0, 2.0]), torch.tensor([1.0 + 0j, 2.0 + 3j])
    change = compare(before, after)[2]
    assert (change.elements, change.changed) == (4, 1)
    assert largest(before, after)[0] == (1, 1)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_results_do_not_depend_on_pieces(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 8)
    before, after = random(dtype, (size, 3), 1), random(dtype, (size, 3), 2)
    before[size // 2 : size // 2 + 3] = 0
    after[: size // 3] = 0
    found = []
    for piece in (8, 16, 24, 1 << 20):
        monkeypatch.setattr(streaming, "PIECE", piece)
        found.append(scan(before, after))
    assert all(other == found[0] for other in found[1:])
    assert found[0].change is not None
    assert found[0].change.elements == size * 3 * (2 if dtype.is_complex else 1)


def test_the_largest_change_is_found_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 8)
    for place in range(30):
        after = torch.zeros(5, 6)
        after.view(-1)[place] = 2.0
        assert largest(torch.zeros(5, 6), after) == ((place // 6, place % 6), 2.0)


@settings(max_examples=300)
@given(st.sampled_from(sorted(DTYPES_OF_BYTES)), st.binary(max_size=96), st.binary(max_size=96))
def test_any_bits_of_any_dtype(dtype: str, one: bytes, other: bytes) -> None:
    size = DTYPES_OF_BYTES[dtype]
    count = min(len(one), len(other)) // size
    contents = [TensorBytes(dtype, (count,), memoryview(side[: count * size])) for side in (one, other)]
    if dtype == "BOOL":
        contents = [content._replace(data=memoryview(bytes(code & 1 for code in content.data))) for content in contents]
    scan = scanned(contents, hashed=True)
    assert scan.summary is not None
    (old, new), change = scan.summary
    assert change is not None
    before, after = (np.ascontiguousarray(as_float64(content)).view(np.float64) for content in contents)
    both = np.isfinite(before) & np.isfinite(after)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    assert scan.equal == (contents[0].data == contents[1].data)
    assert scan.digests == tuple(tensor_digest(block_digests(content.data)) for content in contents)
    assert (old.nan, new.nan) == (np.isnan(before).sum(), np.isnan(after).sum())
    assert (old.inf, new.inf) == (np.isinf(before).sum(), np.isinf(after).sum())
    assert change.new_nan == (~np.isnan(before) & np.isnan(after)).sum()
    assert change.new_inf == (np.isinf(after) & (before != after)).sum()
    assert change.sign_flips == (np.sign(before[both]) * np.sign(after[both]) < 0).sum()
    if dtype not in EXACT_INTEGERS:
        assert change.changed == (~same).sum()
        assert sum(change.histogram.counts) == (both & ~same).sum()
    if dtype not in (*EXACT_INTEGERS, "F64"):
        assert change.norm == pytest.approx(np.linalg.norm(after[both] - before[both]), rel=1e-12)
        assert old.norm == pytest.approx(np.linalg.norm(before[np.isfinite(before)]), rel=1e-12)


SCALARS = st.floats(allow_nan=False, allow_infinity=False, width=32)
DOUBLES = st.floats(-1e150, 1e150)


def exact_norm(values: Sequence[float]) -> float:
    """The Euclidean norm to about 60 digits, rounded."""
    squares = sum((Fraction(value) ** 2 for value in values), Fraction())
    scale = 10**60 * 2**2200
    return float(Fraction(math.isqrt(squares.numerator * scale**2 // squares.denominator), scale))


@settings(max_examples=150)
@given(st.lists(st.tuples(DOUBLES, DOUBLES), min_size=1, max_size=20))
def test_norms_of_64_bit_floats_are_exact_to_twelve_digits(pairs: list[tuple[float, float]]) -> None:
    one, other = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    old, new, change = compare(one, other)
    gaps = [Fraction(after) - Fraction(before) for before, after in pairs]
    for found, numbers in ((old.norm, one.tolist()), (new.norm, other.tolist()), (change.norm, gaps)):
        assert found == pytest.approx(exact_norm(numbers), rel=1e-12, abs=1e-150)
    assert change.largest is None or change.largest.change == float(max(map(abs, gaps)))
    assert change.changed == sum(gap != 0 for gap in gaps) == sum(change.histogram.counts)


def test_overflow_is_infinite_and_raises_no_warning() -> None:
    most = torch.tensor([MOST, MOST, 1.0], dtype=torch.float64)
    old, new, change = compare(most, -most)
    assert (old.norm, new.norm, old.mean, new.mean, change.norm) == (INF, INF, INF, -INF, INF)
    assert (change.rel_change, change.max_rel_change, change.cosine) == (INF, INF, None)
    assert (largest(most, -most), change.changed, change.sign_flips) == (((0,), INF), 3, 3)
    assert compare(most, most + torch.tensor([0.0, 0.0, 1.0]))[2].rel_change == 0.0


@settings(max_examples=150)
@given(st.lists(SCALARS, min_size=1, max_size=50), st.sampled_from([0.0, 1.0, 1e6, -1e30]))
def test_mean_and_deviation_are_those_of_exact_arithmetic(values: list[float], shift: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float32) + shift
    tensor = torch.where(torch.isfinite(tensor), tensor, 0.0)
    exact = [Fraction(value) for value in tensor.double().tolist()]
    mean = sum(exact, Fraction()) / len(exact)
    variance = sum(((value - mean) ** 2 for value in exact), Fraction()) / len(exact)
    ((found,), _) = scan(tensor)
    size = float(sum(map(abs, exact), Fraction()) / len(exact))
    assert found.mean == pytest.approx(float(mean), abs=1e-14 * size)
    assert found.std == pytest.approx(exact_norm([1.0]) * math.sqrt(variance), rel=1e-10, abs=1e-14 * size)


def test_a_small_spread_about_a_large_mean_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 64)
    values = 1e6 + torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e-3
    ((found,), _) = scan(values)
    exact = [Fraction(value) for value in values.tolist()]
    mean = sum(exact, Fraction()) / len(exact)
    variance = sum(((value - mean) ** 2 for value in exact), Fraction()) / len(exact)
    assert found.std == pytest.approx(math.sqrt(variance), rel=1e-10, abs=1e-16 * 1e6)


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    before = torch.tensor([1.0, NAN, INF, 4.0, 5.0, -INF])
    after = torch.tensor([2.0, NAN, 3.0, NAN, INF, -INF])
    old, new, change = compare(before, after)
    assert (old.nan, old.inf, new.nan, new.inf) == (1, 2, 2, 2)
    assert (change.new_nan, change.new_inf, change.changed) == (1, 1, 4)
    assert (change.norm, largest(before, after)[0], new.mean, change.share_changed) == (1.0, (0,), 2.5, 4 / 6)
    assert old.mean == pytest.approx(10 / 3)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        (1.0, NAN, (1, 0)),
        (INF, NAN, (1, 0)),
        (NAN, NAN, (0, 0)),
        (1.0, -INF, (0, 1)),
        (NAN, INF, (0, 1)),
        (-INF, INF, (0, 1)),
        (INF, INF, (0, 0)),
        (NAN, 1.0, (0, 0)),
    ],
)
def test_each_new_kind_of_nonfinite_value_is_counted(before: float, after: float, new: tuple[int, int]) -> None:
    change = compare(torch.tensor([2.0, before]), torch.tensor([3.0, after]))[2]
    assert (change.new_nan, change.new_inf) == new


def test_tensors_without_finite_values() -> None:
    old, _, change = compare(torch.tensor([NAN, INF]), torch.tensor([NAN, INF]))
    assert (old.mean, old.std, old.norm) == (None, None, 0.0)
    assert (change.changed, change.norm, change.rel_change, change.cosine, change.largest) == (0, 0.0, 0.0, 1.0, None)


def test_scalars_and_empty_tensors() -> None:
    change = compare(torch.tensor(3.0), torch.tensor(4.5))[2]
    assert (change.rel_change, change.elements) == (0.5, 1)
    assert largest(torch.tensor(3.0), torch.tensor(4.5)) == ((), 1.5)
    for shape in ((0,), (0, 4), (4, 0)):
        old, _, change = compare(torch.empty(shape), torch.empty(shape))
        assert (old.elements, old.mean, old.dead_rows, change.elements, change.share_changed) == (0, None, 0, 0, 0.0)


def test_relative_change_of_zero() -> None:
    zero = torch.zeros(2)
    assert compare(zero, zero)[2].rel_change == 0.0
    assert compare(zero, torch.ones(2))[2].rel_change == INF
    assert compare(zero, torch.ones(2))[2].max_rel_change == 0.0
    assert compare(zero, torch.ones(2))[2].cosine is None
    assert compare(zero, zero)[2].cosine == compare(zero, -zero)[2].cosine == 1.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_large_integers_are_subtracted_exactly(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    before = torch.tensor([most, 2**60, 7], dtype=dtype)
    after = torch.tensor([most - 1, 2**60 + 1, 7], dtype=dtype)
    change = compare(before, after)[2]
    assert change.changed == 2
    assert largest(before, after) == ((0,), 1.0)
    assert change.norm == pytest.approx(math.sqrt(2))
    far = compare(torch.tensor([torch.iinfo(dtype).min], dtype=dtype), torch.tensor([most], dtype=dtype))[2]
    assert far.norm == pytest.approx(2.0**64)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int16], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 3), (3, 40), (7,), (2, 1)], ids=str)
def test_dead_rows_whatever_the_pieces(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 4)
    rows = shape[0]
    for dead_before, dead_after in itertools.product(range(0, 2**rows, 3), range(0, 2**rows, 5)):
        before, after = torch.ones(shape), torch.ones(shape)
        before.view(rows, -1)[:, 0] = after.view(rows, -1)[:, 0] = 0  # the first element alone tells nothing
        before.view(rows, -1)[:, -1] = after.view(rows, -1)[:, -1] = 1
        gone = [[bool(mask >> row & 1) for row in range(rows)] for mask in (dead_before, dead_after)]
        before[torch.tensor(gone[0])] = 0
        after[torch.tensor(gone[1])] = -0.0
        monkeypatch.setattr(streaming, "PIECE", 4 * (1 + (dead_before + dead_after) % 4))
        old, new, change = compare(before.to(dtype), after.to(dtype))
        counted = len(shape) > 1
        assert old.dead_rows == counted * sum(gone[0])
        assert new.dead_rows == counted * sum(gone[1])
        assert change.new_dead_rows == counted * sum(is_new and not was for was, is_new in zip(*gone, strict=True))
        if dead_before > 20:
            break


def test_histograms_are_by_powers_of_two_and_can_be_added() -> None:
    first = compare(torch.zeros(4), torch.tensor([0.0, 1.0, 1.5, 2.0]))[2].histogram
    assert (first.exponent, first.counts, first.edges) == (0, (2, 1), (1.0, 2.0, 4.0))
    second = compare(torch.zeros(2), torch.tensor([0.25, -3.0]))[2].histogram
    both = merged([first, second])
    assert (both.exponent, both.counts) == (-2, (1, 0, 2, 2))
    assert merged([]).counts == ()


def test_histograms_of_the_largest_and_the_smallest_changes() -> None:
    far = compare(torch.tensor([MOST, 1.0], dtype=torch.float64), torch.tensor([-MOST, 2.0], dtype=torch.float64))[2]
    assert far.histogram.exponent + len(far.histogram.counts) - 1 == 1023
    assert far.histogram.edges[-1] == MOST
    assert sum(far.histogram.counts) == 2
    near = compare(torch.tensor([0.0], dtype=torch.float64), torch.tensor([5e-324], dtype=torch.float64))[2].histogram
    assert (near.exponent, near.counts) == (-1023, (1,))


def test_a_block_of_equal_bytes_is_taken_as_one() -> None:
    values = torch.tensor([1.0, NAN, -2.0, INF])
    old, new, change = compare(values, values.clone())
    assert old == new
    assert (change.changed, change.new_nan, change.new_inf, change.cosine) == (0, 0, 0, 1.0)


def test_elements_that_do_not_fill_bytes_are_compared_by_their_bytes() -> None:
    found = []
    for codes in (b"\x12\x34", b"\x12\x35"):
        pair = scanned([TensorBytes("F4", (4,), memoryview(data)) for data in (b"\x12\x34", codes)], hashed=True)
        assert pair.summary is None
        found.append(pair.equal)
    assert found == [True, False]
