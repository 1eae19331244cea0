"""Sizes for which calls are captured, from what a caller has named to inputs of a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from weightswap_runtime.engines.engine import AUTO, CudaGraphs
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.manifest import Manifest, Method
from weightswap_runtime.format.signature import (
    Integer,
    Leaf,
    Literal,
    Signature,
    Sizes,
    Tensor,
    in_range,
    input_leaves,
    parse_size,
    size_at,
)
from weightswap_runtime.tensors.torch_tensors import torch_dtype


def samples(wanted: CudaGraphs, manifest: Manifest, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """Flat inputs of zeros for every method without state that has the named sizes.

    wanted: for each capture the sizes of the named dimensions, or the shape of the input of a method that takes one
    tensor. Raises Unsupported for sizes that no method has, and for those out of range.
    """
    if wanted == AUTO:
        return
    if isinstance(wanted, str | Mapping) or not isinstance(wanted, Iterable):
        raise Unsupported(f'cuda_graphs={wanted!r}: expected "auto", or a list of sizes such as [{{"batch": 1}}]')
    for each in wanted:
        _check(each)
        fitting = [
            (name, inputs)
            for name, method in manifest.methods.items()
            if not method.has_state and (inputs := _sample(each, method.signature, device)) is not None
        ]
        if not fitting:
            has = "; ".join(f"{name} has {_described(method)}" for name, method in manifest.methods.items())
            raise Unsupported(f"cuda_graphs: no method can be called with {each!r}: {has}")
        yield from fitting


def _check(wanted: Any) -> None:
    numbers = wanted.values() if isinstance(wanted, Mapping) else wanted
    if isinstance(wanted, str) or not isinstance(numbers, Iterable) or not all(type(each) is int for each in numbers):
        raise Unsupported(f'cuda_graphs: {wanted!r} is neither sizes by name, such as {{"batch": 1}}, nor a shape')


def _sample(wanted: Any, signature: Signature, device: torch.device) -> list[Any] | None:
    flat = input_leaves(signature)
    sizes = wanted if isinstance(wanted, Mapping) else _sizes_of_shape(tuple(wanted), flat)
    if sizes is None or not in_range(sizes, signature.dims):
        return None
    return [_zeros(leaf, sizes, device) for leaf in flat]


def _sizes_of_shape(shape: tuple[int, ...], flat: list[Leaf]) -> Sizes | None:
    """The named sizes of a method's only tensor, if it can have this shape."""
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or len(tensors[0].shape) != len(shape):
        return None
    sizes = {size: given for size, given in zip(tensors[0].shape, shape, strict=True) if isinstance(size, str)}
    found = {}
    for text, given in sizes.items():
        factor, dim, offset = parse_size(text)
        found[dim] = (given - offset) // factor
    return found if tuple(size_at(size, found) for size in tensors[0].shape) == shape else None


def _zeros(leaf: Leaf, sizes: Sizes, device: torch.device) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    return torch.zeros([size_at(size, sizes) for size in leaf.shape], dtype=torch_dtype(leaf.dtype), device=device)


def _described(method: Method) -> str:
    if method.has_state:
        return "state, with which no call is captured"
    signature = method.signature
    if not signature.dims:
        return "no named dimensions"
    return ", ".join(f"{name} ({each.min} to {each.max or 'any'})" for name, each in signature.dims.items())
