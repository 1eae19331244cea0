"""Inputs and outputs of calls: from files and into files, and at random in sizes that show what a graph is fixed to."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from typing import Literal as OneOf

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import InputMismatch, Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.format.canonical import canonical_order, encode_tensors, write_weight_file
from weightswap_runtime.format.expressions import all_hold
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.safetensors import parse_file
from weightswap_runtime.format.signature import (
    Integer,
    Leaf,
    Literal,
    Signature,
    Sizes,
    Tensor,
    call_arguments,
    flatten,
    input_leaves,
    size_at,
)
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.sources.writing import new_file
from weightswap_runtime.tensors import (
    TensorBytes,
    array_content,
    as_array,
    describe,
    has_fractions,
    is_numpys,
    numpy_dtype,
)

_COMMON = (2, 3, 5, 8)  # sizes of dynamic dimensions, in turn: unlike each other, and unlike 1, which broadcasts
_MOST_ELEMENTS = 1 << 18  # of all inputs together, for the largest sizes of dimensions
_MOST_INTEGERS = 1 << 11  # likewise for integers: each token adds a row of outputs
_UNBOUNDED = 64  # the largest size of a dimension without a maximum
_INTEGERS = 2  # the exclusive bound of random integers, unless the caller gives one
_MOST_OF_ONE_SIGN = 127  # of integers of one sign with more than 16 bits, which may be sizes
Signs = OneOf["", "positive values", "negative values"]
_SUFFIXES = (".safetensors", ".npz")


# Calls with flat inputs: a list with a value for each leaf of the signature.


def call_flat(model: Model, method: str, flat: Iterable[Any]) -> list[Any]:
    """Call a method with flat inputs and return its flat outputs; tensors are contents."""
    engine, signature = engine_of(model), model.signatures[method]
    args, kwargs = call_arguments(signature, engine_inputs(flat, engine))
    return output_contents(flatten(signature.output, model.method(method)(*args, **kwargs)), engine)


def named_inputs(method: str, signature: Signature, tensors: Mapping[str, TensorBytes]) -> list[Any]:
    """Return flat inputs in the graph's order: tensors as contents, integers and literals as Python values.

    Raises InputMismatch for missing and unknown names, and for an integer input that is not a single whole number.
    """
    expected = input_leaves(signature)
    names = {leaf.name for leaf in expected if not isinstance(leaf, Literal)}
    problems = [f"{name}: missing from the inputs (--input FILE)" for name in sorted(names - tensors.keys())]
    known = ", ".join(sorted(names))
    problems += [f"{name}: not an input (the inputs are {known})" for name in sorted(tensors.keys() - names)]
    integers = {leaf.name for leaf in expected if isinstance(leaf, Integer)} & tensors.keys()
    problems += [
        f"{name}: expected one integer, got {describe(tensors[name])}"
        for name in sorted(integers)
        if math.prod(tensors[name].shape) != 1 or has_fractions(tensors[name].dtype)
    ]
    if problems:
        raise InputMismatch(method, problems)
    values = {name: int(as_array(tensors[name]).item()) if name in integers else tensors[name] for name in names}
    return [leaf.content if isinstance(leaf, Literal) else values[leaf.name] for leaf in expected]


def engine_inputs(flat: Iterable[Any], engine: Engine) -> list[Any]:
    """Return flat inputs with contents converted to the engine's tensors."""
    return [engine.tensor(value) if isinstance(value, TensorBytes) else value for value in flat]


def output_contents(flat: Iterable[Any], engine: Engine) -> list[Any]:
    """Return flat outputs with the engine's tensors converted to contents."""
    return [engine.content(value) if isinstance(value, engine.tensor_type) else value for value in flat]


def describe_value(value: Any) -> Any:
    """Return the type of a tensor as text, such as `F32[2, 10]`, and any other value unchanged."""
    return describe(value) if isinstance(value, TensorBytes) else value


# Files.


def read_tensors(path: Path) -> dict[str, TensorBytes]:
    """Read every tensor of a .safetensors or .npz file. Raises WeightFileError and Unsupported."""
    _check_suffix(path)
    try:
        return _read_npz(path) if path.suffix == ".npz" else parse_file(path.read_bytes(), str(path))[0]
    except WeightswapError:
        raise
    except Exception as error:  # numpy and zipfile raise various ones for other files
        raise WeightFileError(f"{path}: cannot be read ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes]) -> None:
    """Write tensors atomically to a .safetensors or .npz file. Raises Unsupported."""
    _check_suffix(path)
    foreign = next((name for name, tensor in tensors.items() if not is_numpys(tensor.dtype)), None)
    if path.suffix == ".npz" and foreign is not None:  # .npz does not record the type of ml_dtypes
        raise Unsupported(f"{foreign}: numpy has no {tensors[foreign].dtype}; write a .safetensors file")
    with new_file(path) as file:
        if path.suffix == ".npz":
            _write_npz(file, tensors)
        else:
            file.writelines(encode_tensors(tensors))


def _write_npz(file: BinaryIO, tensors: Mapping[str, TensorBytes]) -> None:
    """Write what `np.savez` would, which takes names as arguments beside its own, such as `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, as_array(tensor), allow_pickle=False)


def _check_suffix(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise Unsupported(f"{path}: tensors are read from and written to {' and '.join(_SUFFIXES)} files")


def _read_npz(path: Path) -> dict[str, TensorBytes]:
    contents = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                contents[name] = array_content(arrays[name])
            except Unsupported as error:
                raise WeightFileError(f"{path}: {name}: {error}") from error
    return contents


# Random inputs and weights.


def random_values(
    signature: Signature,
    sizes: Sizes,
    rng: np.random.Generator,
    bounds: Mapping[str, int] | None = None,
    signs: Signs = "",
) -> list[Any]:
    """Return flat inputs of one call in the graph's order, tensors as contents.

    Floats are normally distributed. Integers are uniform from 0 to the exclusive bound of the input of that name, by
    default 2. signs: numbers are all positive or, but for unsigned ones and integers with a bound, all negative.
    Integers of up to 16 bits without a bound then reach the end of their range, others 127 or -127.
    """
    given = bounds or {}
    return [_value(leaf, sizes, rng, given.get(leaf.name), signs) for leaf in input_leaves(signature)]


def signs_of(signature: Signature) -> list[Signs]:
    """Return the signs that a method's numbers can have.

    Values of one sign show what values of both, or among zeros, do not: a reduction that begins with 0 instead of the
    first element, and rounding errors that add up.
    """
    dtypes = {leaf.dtype for leaf in input_leaves(signature) if isinstance(leaf, Tensor)} - {"BOOL"}
    signs: list[Signs] = ["positive values"] if dtypes else []
    return [*signs, "negative values"] if any(dtype[0] != "U" for dtype in dtypes) else signs


def write_random_weights(manifest: Manifest, path: Path, rng: np.random.Generator, group: str | None = None) -> None:
    """Write a weight file of random values for an artifact, or for a group of its variants.

    Matrices preserve the scale of their inputs. Vectors are positive, as they may be variances. One tensor is in memory
    at a time.
    """
    rows = canonical_order(row.row for row in (manifest.weights if group is None else manifest.variants[group]))
    data = ((row.name, [_weight(row.dtype, row.shape, rng).data]) for row in rows)
    write_weight_file(path, rows, data, graph_id=manifest.packed_for)


def _value(leaf: Leaf, sizes: Sizes, rng: np.random.Generator, bound: int | None, signs: Signs) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    shape = [size_at(size, sizes) for size in leaf.shape]
    values: NDArray[Any]
    if has_fractions(leaf.dtype):
        values = rng.normal(0, 1, shape)
        values = {"positive values": np.abs(values), "negative values": -np.abs(values)}.get(signs, values)
    else:
        values = rng.integers(*_range(leaf.dtype, bound, signs), shape, endpoint=True)
    return encoded(np.asarray(values), leaf.dtype)


def _range(dtype: str, bound: int | None, signs: Signs) -> tuple[int, int]:
    """Return the least and the greatest of random integers."""
    if not signs or dtype == "BOOL":
        return 0, (bound or _INTEGERS) - 1
    if bound is not None:
        return min(1, bound - 1), bound - 1
    limits = np.iinfo(numpy_dtype(dtype))
    most = limits.max if limits.bits <= 16 else _MOST_OF_ONE_SIGN
    return (max(limits.min, -most - 1), -1) if signs == "negative values" and limits.min else (1, int(most))


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


# Sizes of dynamic dimensions.


def common_sizes(signature: Signature) -> list[Sizes]:
    """Return sets of small, different sizes for the dynamic dimensions, within the limits of the signature.

    Without dynamic dimensions, returns one empty set. Returns none if no set meets the signature's conditions.
    """
    starts = range(len(_COMMON) if signature.dims else 1)
    return _allowed(signature, (_rotated_sizes(signature, start) for start in starts))


def edge_sizes(signature: Signature, most: int = _MOST_ELEMENTS) -> list[Sizes]:
    """Return sets of sizes at the ends of the ranges.

    The first has all dimensions at their minimum, but at least 1. The others have one dimension each at its maximum, or
    at 0 where its range includes 0. A dimension without a maximum ends at 64. A maximum that would give the
    inputs more than `most` elements, or more than 2048 integers, is halved until it does not.
    """
    least = {name: max(1, limits.min) for name, limits in signature.dims.items()}
    largest = [least | {name: _largest(signature, least, name, most)} for name in least]
    empty = [least | {name: 0} for name, limits in signature.dims.items() if limits.min == 0]
    return _allowed(signature, [least, *largest, *empty])


def _rotated_sizes(signature: Signature, start: int) -> Sizes:
    sizes = {}
    for index, (name, limits) in enumerate(signature.dims.items()):
        size = max(limits.min, _COMMON[(start + index) % len(_COMMON)])
        sizes[name] = size if limits.max is None else min(size, limits.max)
    return sizes


def _allowed(signature: Signature, candidates: Iterator[Sizes] | Sequence[Sizes]) -> list[Sizes]:
    """Return the distinct sets that meet the signature's conditions."""
    unique = {tuple(sizes.items()): sizes for sizes in candidates}
    return [sizes for sizes in unique.values() if all_hold(signature.conditions, sizes)]


def _largest(signature: Signature, least: Sizes, name: str, most: int) -> int:
    limits = signature.dims[name]
    size = _UNBOUNDED if limits.max is None else limits.max
    while size > least[name] and _is_too_large(signature, {**least, name: size}, most):
        size //= 2
    return max(size, least[name])


def _is_too_large(signature: Signature, sizes: Sizes, most: int) -> bool:
    tensors = [leaf for leaf in input_leaves(signature) if isinstance(leaf, Tensor)]
    counts = [(leaf.dtype, math.prod(size_at(size, sizes) for size in leaf.shape)) for leaf in tensors]
    integers = sum(count for dtype, count in counts if not has_fractions(dtype))
    return sum(count for _, count in counts) > most or integers > _MOST_INTEGERS
