"""Values that are not finite: found on the pass that hashes weights, counted where there are any, and judged.

Masks of -inf are common, and so are observers that begin with them. What alarms is therefore a kind of value, NaN or
infinity, that a weight has and did not have in the weights that are served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightswap_runtime.errors import NonFiniteWeights, Unsupported
from weightswap_runtime.messages import plural
from weightswap_runtime.tensors.content import TensorBytes, as_float64
from weightswap_runtime.tensors.dtypes import DTYPES

from .manifest import Manifest, NamedTensor
from .name_patterns import part_of, patterns

STEP = 1 << 20  # bytes that are looked at together: they stay in the cache
Allowed = bool | frozenset[str] | None  # names
_ADVICE = (
    "Do not serve them, and look at the training that wrote them. If they are meant, allow_nonfinite=True lets them "
    "in, and patterns such as allow_nonfinite='*.mask' those of some weights."
)


class Counts(NamedTuple):
    """How many of some values are not finite. A complex number may count as both."""

    nan: int
    infinite: int

    def plus(self, other: Counts | None, sign: int = 1) -> Counts:
        nan, infinite = other or (0, 0)
        return Counts(self.nan + sign * nan, self.infinite + sign * infinite)


@dataclass(frozen=True)
class Nonfinite:
    """How many of the `of` values of a weight are NaN, and how many infinite."""

    nan: int
    infinite: int
    of: int

    def __str__(self) -> str:
        kinds = [f"{number} {kind}" for number, kind in ((self.nan, "NaN"), (self.infinite, "infinite")) if number]
        return f"{' and '.join(kinds)} of {plural(self.of, 'value')}"


class _Codes(NamedTuple):
    """How bits tell that a value is not finite: as signed or unsigned integers they reach a limit.

    `signed` and `unsigned` are the least of the positive codes and of those with a sign that are not finite, `lowest`
    is the one code of a type that has no other; None where a type has no such codes.
    """

    bytes: int
    signed: int | None = None
    unsigned: int | None = None
    lowest: int | None = None


def _ieee(size: int, first: int) -> _Codes:
    """Types whose codes rise with their magnitude, and end with infinity and NaN."""
    return _Codes(size, first, first | 1 << (8 * size - 1))


# OCP's F6 and F4 have no such values
_CODES: dict[str, _Codes] = {
    "F16": _ieee(2, 0x7C00),
    "BF16": _ieee(2, 0x7F80),
    "F32": _ieee(4, 0x7F800000),
    "C64": _ieee(4, 0x7F800000),
    "F64": _ieee(8, 0x7FF << 52),
    "F8_E5M2": _ieee(1, 0x7C),
    "F8_E4M3": _ieee(1, 0x7F),
    "F8_E8M0": _Codes(1, unsigned=0xFF),
    "F8_E4M3FNUZ": _Codes(1, lowest=-0x80),
    "F8_E5M2FNUZ": _Codes(1, lowest=-0x80),
}


def count_nonfinite(dtype: str, data: memoryview) -> Counts | None:
    """How many of some whole elements are not finite; None where all are. At several times the speed of hashing.

    Looking at them takes two reductions of integers, which vectorise for every size and let other threads run.
    """
    codes = _CODES.get(dtype)
    if codes is None or not len(data):
        return None
    counts = Counts(0, 0)
    for start in range(0, len(data), STEP):
        part = data[start : start + STEP]
        if _alarms(codes, part):
            counts = counts.plus(_count(dtype, part))
    return counts if any(counts) else None


def _alarms(codes: _Codes, part: memoryview) -> bool:
    signed, unsigned = (np.frombuffer(part, f"<{kind}{codes.bytes}") for kind in "iu")
    return bool(
        (codes.signed is not None and signed.max() >= codes.signed)
        or (codes.unsigned is not None and unsigned.max() >= codes.unsigned)
        or (codes.lowest is not None and signed.min() <= codes.lowest)
    )


def _count(dtype: str, part: memoryview) -> Counts:
    values = as_float64(TensorBytes(dtype, (len(part) * 8 // DTYPES[dtype].bits,), part))
    return Counts(int(np.isnan(values).sum()), int(np.isinf(values).sum()))


def element_bytes(dtype: str) -> int:
    """Of how many bytes only whole multiples may be counted; 0 for types whose values are always finite."""
    return DTYPES[dtype].bits // 8 if dtype in _CODES else 0


def newly_nonfinite(
    weights: Iterable[NamedTensor], counts: Mapping[str, Counts], served: Mapping[str, Counts] | None
) -> dict[str, Nonfinite]:
    """The weights that have a kind of value that is not finite, and did not have it in those that are served.

    With nothing served, NaN is such a kind in every weight, and infinity in those that require a gradient: these are
    trained, and no masks.
    """
    size = {weight.name: weight.nbytes * 8 // DTYPES[weight.dtype].bits for weight in weights if weight.name in counts}
    trained = {weight.name for weight in weights if weight.requires_grad}

    def is_new(name: str) -> bool:
        nan, infinite = counts[name]
        before = Counts(0, name not in trained) if served is None else served.get(name, Counts(0, 0))
        return bool((nan and not before.nan) or (infinite and not before.infinite))

    return {name: Nonfinite(*counts[name], size[name]) for name in sorted(size) if is_new(name)}


def refuse_nonfinite(found: Mapping[str, Nonfinite], allowed: Allowed, where: str) -> None:
    """Raise NonFiniteWeights for what is not allowed. None allows everything, and so does True."""
    if allowed is None or allowed is True:
        return
    if problems := [f"{name}: {some}" for name, some in found.items() if name not in (allowed or ())]:
        raise NonFiniteWeights(where, problems, _ADVICE)


def as_allowed(given: bool | str | Sequence[str] | None, manifest: Manifest) -> Allowed:
    """`allow_nonfinite=` as users give it: patterns become names. Raises Unsupported for what it cannot be."""
    if given is None or isinstance(given, bool):
        return given
    try:
        return frozenset(weight.name for weight in part_of(manifest, patterns(given)).weights)
    except Unsupported as error:
        raise Unsupported(str(error).replace("only=", "allow_nonfinite=", 1)) from None
