"""Inputs that a signature allows, and weights of a manifest, made from random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.format.conditions import all_hold
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.signature import (
    Integer,
    Leaf,
    Literal,
    Signature,
    Sizes,
    Tensor,
    input_leaves,
    size_at,
)
from weightswap_runtime.format.weight_file import canonical_order, write_weight_file
from weightswap_runtime.tensors.content import TensorBytes, array_content, is_numpys, numpy_dtype
from weightswap_runtime.tensors.dtypes import has_fractions

COMMON = (2, 3, 5)  # sizes that dynamic dimensions have, one after another
MOST_ELEMENTS = 1 << 18  # of all inputs together, where a range has no end or one that is far away
MOST_INTEGERS = 1 << 11  # the same: tokens give outputs, and each has a row of them
UNBOUNDED = 64  # the largest size of a range without an end
_INTEGERS = 2  # random integers are below this where nothing tells more


def common_sizes(signature: Signature) -> list[Sizes]:
    """Small, uneven sizes for the dynamic dimensions, as far as the signature allows them; at least one set of them.

    Without dynamic dimensions that is one empty set. With conditions that none of them meets, there is none.
    """
    starts = range(len(COMMON) if signature.dims else 1)
    return _allowed(signature, (_turned(signature, start) for start in starts))


def edge_sizes(signature: Signature, most: int = MOST_ELEMENTS) -> list[Sizes]:
    """The ends of the ranges: all dimensions at their least size from 1, then each in turn at its largest, and at 0
    where the range has it.

    A range without an end is taken to end at UNBOUNDED. A largest size that would give the inputs more than `most`
    elements, or MOST_INTEGERS integers, is halved until it does not.
    """
    least = {name: max(1, limits.min) for name, limits in signature.dims.items()}
    largest = [least | {name: _largest(signature, least, name, most)} for name in least]
    empty = [least | {name: 0} for name, limits in signature.dims.items() if limits.min == 0]
    return _allowed(signature, [least, *largest, *empty])


def random_values(
    signature: Signature, sizes: Sizes, rng: np.random.Generator, bounds: Mapping[str, int] | None = None
) -> list[Any]:
    """Flat inputs of one call in the graph's order, tensors as contents.

    Fractions are normally distributed; integers are from 0 up to the bound of the input of that name, 2 without one,
    which is not among them.
    """
    return [_value(leaf, sizes, rng, (bounds or {}).get(leaf.name, _INTEGERS)) for leaf in input_leaves(signature)]


def write_random_weights(manifest: Manifest, path: Path, rng: np.random.Generator, group: str | None = None) -> None:
    """A weight file for an artifact, or for a group of its variants. Matrices keep the scale of what is multiplied;
    vectors, which may be variances, are positive. One tensor is in memory at a time."""
    rows = canonical_order(row.row for row in (manifest.weights if group is None else manifest.variants[group]))
    data = ((row.name, [_weight(row.dtype, row.shape, rng).data]) for row in rows)
    write_weight_file(path, rows, data, graph_id=manifest.graph_id)


def _turned(signature: Signature, start: int) -> Sizes:
    sizes = {}
    for index, (name, limits) in enumerate(signature.dims.items()):
        size = max(limits.min, COMMON[(start + index) % len(COMMON)])
        sizes[name] = size if limits.max is None else min(size, limits.max)
    return sizes


def _allowed(signature: Signature, candidates: Iterator[Sizes] | Sequence[Sizes]) -> list[Sizes]:
    """Those that meet the conditions, each once."""
    unique = {tuple(sizes.items()): sizes for sizes in candidates}
    return [sizes for sizes in unique.values() if all_hold(signature.conditions, sizes)]


def _largest(signature: Signature, least: Sizes, name: str, most: int) -> int:
    limits = signature.dims[name]
    size = UNBOUNDED if limits.max is None else limits.max
    while size > least[name] and _is_much(signature, {**least, name: size}, most):
        size //= 2
    return max(size, least[name])


def _is_much(signature: Signature, sizes: Sizes, most: int) -> bool:
    tensors = [leaf for leaf in input_leaves(signature) if isinstance(leaf, Tensor)]
    counts = [(leaf.dtype, math.prod(size_at(size, sizes) for size in leaf.shape)) for leaf in tensors]
    integers = sum(count for dtype, count in counts if not has_fractions(dtype))
    return sum(count for _, count in counts) > most or integers > MOST_INTEGERS


def _value(leaf: Leaf, sizes: Sizes, rng: np.random.Generator, bound: int) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    shape = [size_at(size, sizes) for size in leaf.shape]
    drawn = rng.normal(0, 1, shape) if has_fractions(leaf.dtype) else rng.integers(0, bound, shape)
    return encoded(np.asarray(drawn), leaf.dtype)


def _weight(dtype: str, shape: Sequence[int], rng: np.random.Generator) -> TensorBytes:
    if not has_fractions(dtype):
        return encoded(np.asarray(rng.integers(0, _INTEGERS, shape)), dtype)
    if len(shape) < 2:
        return encoded(np.asarray(rng.uniform(0.5, 1.5, shape)), dtype)
    return encoded(rng.normal(0, 1 / math.sqrt(max(1, shape[-1])), shape), dtype)


def encoded(values: NDArray[Any], dtype: str) -> TensorBytes:
    """Numbers as a tensor of any dtype whose elements fill whole bytes, rounded and clipped to what it has."""
    kind = numpy_dtype(dtype)
    if not is_numpys(dtype):
        limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
        values = np.clip(values, float(limits.min), float(limits.max))
    return array_content(values.astype(kind))
