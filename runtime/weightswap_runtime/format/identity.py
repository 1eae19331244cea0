"""The identity of a set of weights, and which of its values are not finite.

NaN and infinities are counted while weights are read, beside their digests. Whether they are refused depends on the
served weights: a kind that these have, too, such as the infinities of a mask, is there on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from weightswap_runtime import native
from weightswap_runtime.errors import NonFiniteWeights, Unsupported, plural
from weightswap_runtime.native import address
from weightswap_runtime.tensors import DTYPES, Blocks, TensorBytes, as_float64, tensor_digest

from .cuts import SharedChange
from .manifest import Manifest, NamedTensor
from .names import part_of, patterns
from .safetensors import weights_id

STEP = 1 << 20  # bytes that are inspected at a time: they stay in the cache
Allowed = bool | frozenset[str] | None  # all, none, or the names of some weights
_ADVICE = (
    "Do not serve them; check the training that wrote them. If they are intended, allow_nonfinite=True where they are "
    "staged or received accepts them, and patterns such as allow_nonfinite='*.mask' accept those of some weights."
)


@dataclass(frozen=True, eq=False)
class Identity:
    """Identity of a full set of weights."""

    weights_id: str
    digests: dict[str, Blocks]  # FQN -> the digests of the blocks of row-major bytes
    labels: Mapping[str, str]
    nonfinite: Mapping[str, Counts] = field(default_factory=dict)  # the weights with NaN or infinities
    # FQN -> a change of a delta that ranks share: until they have told each other, the id is what the delta claims, and
    # the digests of the changed blocks are not known
    unproven: dict[str, SharedChange] = field(default_factory=dict)


def identify(
    weights: Iterable[NamedTensor],
    digests: Mapping[str, Blocks],
    labels: Mapping[str, str],
    nonfinite: Mapping[str, Counts] = MappingProxyType({}),
) -> Identity:
    """Compute the weights id from the digests of every weight's blocks."""
    computed_id = weights_id((weight.row, tensor_digest(digests[weight.name])) for weight in weights)
    return Identity(computed_id, dict(digests), dict(labels), dict(nonfinite))


class Counts(NamedTuple):
    """Numbers of NaN and infinite values. A complex number may count as both."""

    nan: int
    infinite: int

    def plus(self, other: Counts | None, sign: int = 1) -> Counts:
        nan, infinite = other or (0, 0)
        return Counts(self.nan + sign * nan, self.infinite + sign * infinite)

    def __str__(self) -> str:
        kinds = ((self.nan, "NaN"), (self.infinite, "infinite"))
        return " and ".join(f"{number} {kind}" for number, kind in kinds if number)


@dataclass(frozen=True)
class Nonfinite:
    """Numbers of NaN and infinite values of a weight."""

    nan: int
    infinite: int
    of: int  # all values

    def __str__(self) -> str:
        return f"{Counts(self.nan, self.infinite)} of {plural(self.of, 'value')}"


class BitPattern(NamedTuple):
    """Bits by which the elements of a dtype are told that are not finite: in the mask they are those of the value."""

    bytes: int  # of an element
    mask: int
    value: int


def _ieee(size: int, exponent: int) -> BitPattern:
    """Return the pattern of a dtype whose infinities and NaN have the largest exponent."""
    return BitPattern(size, exponent, exponent)


# OCP's F6 and F4 have no non-finite values
NONFINITE: dict[str, BitPattern] = {
    "F16": _ieee(2, 0x7C00),
    "BF16": _ieee(2, 0x7F80),
    "F32": _ieee(4, 0x7F800000),
    "C64": _ieee(4, 0x7F800000),
    "F64": _ieee(8, 0x7FF << 52),
    "F8_E5M2": _ieee(1, 0x7C),
    "F8_E4M3": BitPattern(1, 0x7F, 0x7F),
    "F8_E8M0": BitPattern(1, 0xFF, 0xFF),
    "F8_E4M3FNUZ": BitPattern(1, 0xFF, 0x80),
    "F8_E5M2FNUZ": BitPattern(1, 0xFF, 0x80),
}


def count_nonfinite(dtype: str, data: memoryview) -> Counts | None:
    """Count the non-finite values of whole elements; return None if all are finite.

    That is found out many times faster than the bytes are hashed, without the interpreter's lock.
    """
    pattern = NONFINITE.get(dtype)
    if pattern is None:
        return None
    counts = Counts(0, 0)
    for start in range(0, len(data), STEP):
        part = data[start : start + STEP]
        if _has(pattern, part):
            counts = counts.plus(_count(dtype, part))
    return counts if any(counts) else None


def _has(pattern: BitPattern, part: memoryview) -> bool:
    if native.library is not None:
        return bool(native.library.has_pattern(address(part), len(part), *pattern))
    elements = np.frombuffer(part, f"<u{pattern.bytes}")
    return bool(((elements & pattern.mask) == pattern.value).any())


def _count(dtype: str, part: memoryview) -> Counts:
    values = as_float64(TensorBytes(dtype, (len(part) * 8 // DTYPES[dtype].bits,), part))
    return Counts(int(np.isnan(values).sum()), int(np.isinf(values).sum()))


def element_bytes(dtype: str) -> int:
    """Return the size of an element in bytes; 0 for dtypes whose values are always finite."""
    return DTYPES[dtype].bits // 8 if dtype in NONFINITE else 0


def newly_nonfinite(
    weights: Iterable[NamedTensor], counts: Mapping[str, Counts], served: Mapping[str, Counts] | None
) -> dict[str, Nonfinite]:
    """Return the weights with a kind of non-finite value that they do not have in the served weights.

    If no weights are served, NaN counts in every weight, and infinity in those that require a gradient: these are
    trained, and not masks.
    """
    if not counts:
        return {}
    size = {weight.name: weight.nbytes * 8 // DTYPES[weight.dtype].bits for weight in weights if weight.name in counts}
    trained = {weight.name for weight in weights if weight.requires_grad}

    def is_new(name: str) -> bool:
        nan, infinite = counts[name]
        before = Counts(0, name not in trained) if served is None else served.get(name, Counts(0, 0))
        return bool((nan and not before.nan) or (infinite and not before.infinite))

    return {name: Nonfinite(*counts[name], size[name]) for name in sorted(size) if is_new(name)}


def refuse_nonfinite(nonfinite: Mapping[str, Nonfinite], allowed: Allowed, where: str) -> None:
    """Raise NonFiniteWeights for values that are not allowed. None and True allow all."""
    if allowed is None or allowed is True:
        return
    if problems := [f"{name}: {counts}" for name, counts in nonfinite.items() if name not in (allowed or ())]:
        raise NonFiniteWeights(where, problems, _ADVICE)


def as_allowed(value: bool | str | Sequence[str] | None, manifest: Manifest) -> Allowed:
    """Convert a user's value of `allow_nonfinite=`: patterns become names. Raises Unsupported for invalid values."""
    if value is None or isinstance(value, bool):
        return value
    try:
        return frozenset(weight.name for weight in part_of(manifest, patterns(value)).weights)
    except Unsupported as error:
        raise Unsupported(str(error).replace("only=", "allow_nonfinite=", 1)) from None
