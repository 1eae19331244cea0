"""Comparing two tensors: whether they are the same within a tolerance, and where they differ most."""

from __future__ import annotations

from typing import Any

import torch

from .dtypes import TORCH_NAMES, describe
from .goldens import Tolerance

EXACT: Tolerance = (0.0, 0.0)
# https://docs.pytorch.org/docs/stable/testing.html#torch.testing.assert_close; every other dtype is compared exactly
DEFAULT_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
}


def difference(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance | None) -> str | None:
    """Where two tensors differ most, in words; None where they do not.

    tolerance: (rtol, atol), as `torch.isclose` has them with `expected` as its second operand. None means bit for bit,
    where any NaN equals any other, but 0.0 is not -0.0: the same operations in the same order give the same sign, so
    another one tells that something else was computed. Tensors that are neither floating nor complex are always
    compared exactly. Another dtype or shape is a difference.
    """
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f": expected {_type(expected)}, found {_type(found)}"
    differ = _differ_in_bits(expected, found) if tolerance is None else _differ_in_value(expected, found, tolerance)
    count = int(differ.sum())
    if not count:
        return None
    return f"{_worst(expected, found, differ)}; {count} of {differ.numel()} elements differ{_beyond(tolerance, found)}"


def not_finite(recorded: torch.Tensor, found: torch.Tensor) -> str | None:
    """Where `found` is not finite although `recorded` is, in words; None where it is.

    An output of another shape than the recorded one, which depends on the weights, must be finite throughout if
    `recorded` is.
    """
    if not _has_fractions(found):
        return None
    wrong = ~torch.isfinite(_wide(found))
    expected = torch.isfinite(_wide(recorded))
    wrong &= expected if recorded.shape == found.shape else expected.all()
    count = int(wrong.sum())
    if not count:
        return None
    index = int(wrong.flatten().int().argmax())
    value = found.flatten()[index].item()
    return f"{_place(index, found)}: expected a finite value, found {value}; {count} of {wrong.numel()} are not"


def _type(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return describe(TORCH_NAMES.get(name, name), tuple(tensor.shape))


def _beyond(tolerance: Tolerance | None, found: torch.Tensor) -> str:
    if tolerance is None or not _has_fractions(found):
        return ", compared bit for bit"
    rtol, atol = tolerance
    return f" by more than rtol={rtol:g}, atol={atol:g}"


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a dtype for which every operator exists and in which differences are not rounded."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _differ_in_bits(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    differ = (_bytes(expected) != _bytes(found)).any(1).view(found.shape)
    if _has_fractions(found) and differ.any():
        differ &= ~(torch.isnan(_wide(expected)) & torch.isnan(_wide(found)))
    return differ


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes for each element."""
    rows = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    return rows.view(torch.uint8).view(tensor.numel(), tensor.dtype.itemsize)


def _differ_in_value(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    if not _has_fractions(found):
        return _differ_in_bits(expected, found)
    rtol, atol = tolerance
    return ~torch.isclose(_wide(found), _wide(expected), rtol=rtol, atol=atol, equal_nan=True)


def _worst(expected: torch.Tensor, found: torch.Tensor, differ: torch.Tensor) -> str:
    gaps = (_wide(found) - _wide(expected)).abs().nan_to_num(nan=torch.inf)
    index = int(gaps.masked_fill(~differ, -1).argmax())
    wanted, got = expected.flatten()[index].item(), found.flatten()[index].item()
    return f"{_place(index, found)}: expected {wanted}, found {got}{_gap(wanted, got)}"


def _gap(wanted: Any, got: Any) -> str:
    """The absolute and the relative difference of two numbers."""
    absolute = abs(got - wanted)
    relative = absolute / abs(wanted) if wanted else float("inf") if absolute else 0.0
    return f", absolute difference {absolute:.6g}, relative {relative:.6g}"


def _place(index: int, tensor: torch.Tensor) -> str:
    """`[1, 2]`: the index of an element, from its position in row-major order. Empty for a scalar."""
    position = []
    for size in reversed(tensor.shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return str(position[::-1]) if position else ""
