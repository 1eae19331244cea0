"""Comparison of two tensors: equality within a tolerance, and the element that differs most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .content import TensorBytes, as_array, as_float64
from .dtypes import DTYPES, describe, has_fractions, same_type

Tolerance = tuple[float, float]  # relative, absolute
EXACT: Tolerance = (0.0, 0.0)
# https://docs.pytorch.org/docs/stable/testing.html#torch.testing.assert_close; every other dtype is compared exactly
DEFAULT_TOLERANCES: dict[str, Tolerance] = {
    "F16": (1e-3, 1e-5),
    "BF16": (1.6e-2, 1e-5),
    "F32": (1.3e-6, 1e-5),
    "F64": (1e-7, 1e-7),
    "C64": (1.3e-6, 1e-5),
}


def difference(expected: TensorBytes, found: TensorBytes, tolerance: Tolerance | None) -> str | None:
    """Describe where two tensors differ most; return None if they do not.

    tolerance: (rtol, atol), as in `torch.isclose` with `expected` as its second operand. None means bit for bit,
    where any NaN equals any other, but 0.0 is not -0.0: the same operations in the same order give the same sign, so
    another sign shows that something else was computed. Tensors that are neither floating nor complex are always
    compared exactly. Another dtype or shape is a difference.
    """
    if not same_type(expected, found):
        return f": expected {describe(expected)}, found {describe(found)}"
    differ = differing(expected, found, tolerance)
    count = int(differ.sum())
    if not count:
        return None
    return f"{_worst(expected, found, differ)}; {count} of {differ.size} elements differ{_beyond(tolerance, found)}"


def differing(expected: TensorBytes, found: TensorBytes, tolerance: Tolerance | None) -> NDArray[np.bool_]:
    """Return a mask, flat and row-major, of the elements that differ between tensors of one type. See `difference`."""
    if tolerance is None or not has_fractions(found.dtype):
        return _differ_in_bits(expected, found)
    return ~_close(as_float64(expected), as_float64(found), *tolerance)


def furthest(expected: TensorBytes, found: TensorBytes, differ: NDArray[np.bool_]) -> int:
    """Return the row-major position of the element furthest from the expected one, among those that `differ`."""
    gaps = np.nan_to_num(_gaps(as_float64(expected), as_float64(found)), nan=np.inf)
    return int(np.where(differ, gaps, -1).argmax())


def number(tensor: TensorBytes, position: int) -> Any:
    """Return the element at a row-major position, as a Python number."""
    values = as_float64(tensor) if has_fractions(tensor.dtype) else as_array(tensor).reshape(-1)
    return values[position].item()


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a row-major position."""
    return tuple(int(part) for part in np.unravel_index(position, shape))


def not_finite(recorded: TensorBytes | None, found: TensorBytes) -> str | None:
    """Describe where `found` is not finite although `recorded`, if given, is; return None if there is no such element.

    If the shapes differ, as they may where they depend on the weights, all of `found` must be finite if all of
    `recorded` is.
    """
    if not has_fractions(found.dtype):
        return None
    values = as_float64(found)
    wrong: NDArray[np.bool_] = ~np.isfinite(values)
    if recorded is not None:
        expected = np.isfinite(as_float64(recorded))
        wrong &= expected if recorded.shape == found.shape else expected.all()
    count = int(wrong.sum())
    if not count:
        return None
    index = int(wrong.argmax())
    value = values[index].item()
    return f"{_index_text(index, found.shape)}: expected a finite value, found {value}; {count} of {wrong.size} are not"


def _beyond(tolerance: Tolerance | None, found: TensorBytes) -> str:
    if tolerance is None or not has_fractions(found.dtype):
        return ", compared bit for bit"
    rtol, atol = tolerance
    return f" by more than rtol={rtol:g}, atol={atol:g}"


def _differ_in_bits(expected: TensorBytes, found: TensorBytes) -> NDArray[Any]:
    differ: NDArray[Any] = _bits(expected) != _bits(found)
    if has_fractions(found.dtype) and differ.any():
        differ &= ~(np.isnan(as_float64(expected)) & np.isnan(as_float64(found)))
    return differ


def _bits(tensor: TensorBytes) -> NDArray[Any]:
    """Return the bits of each element as an unsigned integer."""
    return np.frombuffer(tensor.data, f"u{DTYPES[tensor.dtype].bits // 8}")


def _close(expected: NDArray[Any], found: NDArray[Any], rtol: float, atol: float) -> NDArray[Any]:
    """Do as `torch.isclose(found, expected, ..., equal_nan=True)`; an infinity is close to itself alone."""
    equal = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gaps = _gaps(expected, found)
    with np.errstate(all="ignore"):
        near = np.isfinite(gaps) & (gaps <= atol + np.abs(rtol * expected))
    close: NDArray[Any] = equal | near
    return close


def _gaps(expected: NDArray[Any], found: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # between infinities the gap is NaN, between large numbers it may be infinite
        gaps: NDArray[Any] = np.abs(found - expected)
    return gaps


def _worst(expected: TensorBytes, found: TensorBytes, differ: NDArray[np.bool_]) -> str:
    position = furthest(expected, found, differ)
    expected_value, value = number(expected, position), number(found, position)
    gap = _gap_text(expected_value, value)
    return f"{_index_text(position, found.shape)}: expected {expected_value}, found {value}{gap}"


def _gap_text(expected: Any, found: Any) -> str:
    absolute = abs(found - expected)
    relative = absolute / abs(expected) if expected else float("inf") if absolute else 0.0
    return f", absolute difference {absolute:.6g}, relative {relative:.6g}"


def _index_text(position: int, shape: Sequence[int]) -> str:
    """Format an index as `[1, 2]`; for a scalar, as nothing."""
    return str(list(index_of(position, shape))) if shape else ""
