"""Sample inputs of methods, from the sizes for which an application asks to capture calls."""

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


def samples(cuda_graphs: CudaGraphs, manifest: Manifest, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """Yield methods with flat inputs of zeros, for every method without state that can have the sizes.

    cuda_graphs: for each capture the sizes of the named dimensions, or the shape of the input of a method that takes
    one tensor. Raises Unsupported for sizes that no method has, and for those out of range.
    """
    if cuda_graphs == AUTO:
        return
    if isinstance(cuda_graphs, str | Mapping) or not isinstance(cuda_graphs, Iterable):
        raise Unsupported(f'cuda_graphs={cuda_graphs!r}: expected "auto", or a list of sizes such as [{{"batch": 1}}]')
    for request in cuda_graphs:
        _check(request)
        fitting = [
            (name, inputs)
            for name, method in manifest.methods.items()
            if not method.has_state and (inputs := _sample(request, method.signature, device)) is not None
        ]
        if not fitting:
            has = "; ".join(f"{name} has {_described(method)}" for name, method in manifest.methods.items())
            raise Unsupported(f"cuda_graphs: no method can be called with {request!r}: {has}")
        yield from fitting


def _check(request: Any) -> None:
    sizes = request.values() if isinstance(request, Mapping) else request
    if isinstance(request, str) or not isinstance(sizes, Iterable) or not all(type(size) is int for size in sizes):
        raise Unsupported(f'cuda_graphs: {request!r} is neither sizes by name, such as {{"batch": 1}}, nor a shape')


def _sample(request: Any, signature: Signature, device: torch.device) -> list[Any] | None:
    flat = input_leaves(signature)
    sizes = request if isinstance(request, Mapping) else _sizes_of_shape(tuple(request), flat)
    if sizes is None or not in_range(sizes, signature.dims):
        return None
    return [_zeros(leaf, sizes, device) for leaf in flat]


def _sizes_of_shape(shape: tuple[int, ...], flat: list[Leaf]) -> Sizes | None:
    """Return the named sizes of a method's only tensor for a shape; None if it cannot have this shape."""
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or len(tensors[0].shape) != len(shape):
        return None
    dynamic = {text: size for text, size in zip(tensors[0].shape, shape, strict=True) if isinstance(text, str)}
    sizes = {}
    for text, size in dynamic.items():
        factor, dim, offset = parse_size(text)
        sizes[dim] = (size - offset) // factor
    return sizes if tuple(size_at(size, sizes) for size in tensors[0].shape) == shape else None


def _zeros(leaf: Leaf, sizes: Sizes, device: torch.device) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    return torch.zeros([size_at(size, sizes) for size in leaf.shape], dtype=torch_dtype(leaf.dtype), device=device)


def _described(method: Method) -> str:
    if method.has_state:
        return "state, and calls with state are never captured"
    signature = method.signature
    if not signature.dims:
        return "no named dimensions"
    return ", ".join(f"{name} ({dim.min} to {dim.max or 'any'})" for name, dim in signature.dims.items())
