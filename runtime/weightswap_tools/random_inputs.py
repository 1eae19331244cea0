"""Random inputs that fit a signature, and random weights that fit a manifest."""

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

COMMON = (2, 3, 5)  # sizes of dynamic dimensions, in turn
MOST_ELEMENTS = 1 << 18  # of all inputs together, for the largest sizes of dimensions
MOST_INTEGERS = 1 << 11  # likewise for integers: each token adds a row of outputs
UNBOUNDED = 64  # the largest size of a dimension without a maximum
_INTEGERS = 2  # the exclusive bound of random integers, unless the caller gives one


def common_sizes(signature: Signature) -> list[Sizes]:
    """Return sets of small, different sizes for the dynamic dimensions, within the limits of the signature.

    Without dynamic dimensions, returns one empty set. Returns none if no set meets the signature's conditions.
    """
    starts = range(len(COMMON) if signature.dims else 1)
    return _allowed(signature, (_rotated_sizes(signature, start) for start in starts))


def edge_sizes(signature: Signature, most: int = MOST_ELEMENTS) -> list[Sizes]:
    """Return sets of sizes at the ends of the ranges.

    The first has all dimensions at their minimum, but at least 1. The others have one dimension each at its maximum, or
    at 0 where its range includes 0. A dimension without a maximum ends at UNBOUNDED. A maximum that would give the
    inputs more than `most` elements, or more than MOST_INTEGERS integers, is halved until it does not.
    """
    least = {name: max(1, limits.min) for name, limits in signature.dims.items()}
    largest = [least | {name: _largest(signature, least, name, most)} for name in least]
    empty = [least | {name: 0} for name, limits in signature.dims.items() if limits.min == 0]
    return _allowed(signature, [least, *largest, *empty])


def random_values(
    signature: Signature, sizes: Sizes, rng: np.random.Generator, bounds: Mapping[str, int] | None = None
) -> list[Any]:
    """Return flat inputs of one call in the graph's order, tensors as contents.

    Floats are normally distributed. Integers are uniform from 0 to the exclusive bound of the input of that name, by
    default 2.
    """
    return [_value(leaf, sizes, rng, (bounds or {}).get(leaf.name, _INTEGERS)) for leaf in input_leaves(signature)]


def write_random_weights(manifest: Manifest, path: Path, rng: np.random.Generator, group: str | None = None) -> None:
    """Write a weight file of random values for an artifact, or for a group of its variants.

    Matrices preserve the scale of their inputs. Vectors are positive, as they may be variances. One tensor is in memory
    at a time.
    """
    rows = canonical_order(row.row for row in (manifest.weights if group is None else manifest.variants[group]))
    data = ((row.name, [_weight(row.dtype, row.shape, rng).data]) for row in rows)
    write_weight_file(path, rows, data, graph_id=manifest.graph_id)


def _rotated_sizes(signature: Signature, start: int) -> Sizes:
    sizes = {}
    for index, (name, limits) in enumerate(signature.dims.items()):
        size = max(limits.min, COMMON[(start + index) % len(COMMON)])
        sizes[name] = size if limits.max is None else min(size, limits.max)
    return sizes


def _allowed(signature: Signature, candidates: Iterator[Sizes] | Sequence[Sizes]) -> list[Sizes]:
    """Return the distinct sets that meet the signature's conditions."""
    unique = {tuple(sizes.items()): sizes for sizes in candidates}
    return [sizes for sizes in unique.values() if all_hold(signature.conditions, sizes)]


def _largest(signature: Signature, least: Sizes, name: str, most: int) -> int:
    limits = signature.dims[name]
    size = UNBOUNDED if limits.max is None else limits.max
    while size > least[name] and _is_too_large(signature, {**least, name: size}, most):
        size //= 2
    return max(size, least[name])


def _is_too_large(signature: Signature, sizes: Sizes, most: int) -> bool:
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
    values = rng.normal(0, 1, shape) if has_fractions(leaf.dtype) else rng.integers(0, bound, shape)
    return encoded(np.asarray(values), leaf.dtype)


def _weight(dtype: str, shape: Sequence[int], rng: np.random.Generator) -> TensorBytes:
    if not has_fractions(dtype):
        return encoded(np.asarray(rng.integers(0, _INTEGERS, shape)), dtype)
    if len(shape) < 2:
        return encoded(np.asarray(rng.uniform(0.5, 1.5, shape)), dtype)
    return encoded(rng.normal(0, 1 / math.sqrt(max(1, shape[-1])), shape), dtype)


def encoded(values: NDArray[Any], dtype: str) -> TensorBytes:
    """Return numbers as a tensor of a dtype with elements of whole bytes, rounded and clipped to its range."""
    kind = numpy_dtype(dtype)
    if not is_numpys(dtype):
        limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
        values = np.clip(values, float(limits.min), float(limits.max))
    return array_content(values.astype(kind))
