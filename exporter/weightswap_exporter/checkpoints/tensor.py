"""Tensors of a checkpoint: types, places of their values, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightswap_exporter.models.parts import Kind
from weightswap_exporter.models.tensors import tie_key
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES, tensor_bytes

PIECE = 16 << 20
Read = Callable[[memoryview, int], None]


class PartOf(NamedTuple):
    """Composed tensor that a tensor is a part of: its kind, and the suffix that the part's name adds to its name."""

    suffix: str
    kind: Kind


class CheckpointTensor(NamedTuple):
    """Tensor of a checkpoint.

    dtype: safetensors name. tie_key: equal only for tensors that have the same values, found without reading them.
    load: returns the values, in their own memory or the source's. problems: returns reasons why `load` would fail, and
    wrong checksums. lacking: returns those that are known without reading the values. parts: returns a function that
    fills memory with row-major bytes from a given offset on, in any thread; None if that would take the memory of the
    whole tensor. file: file of the values, if there is exactly one. offset: of the first element in it, in bytes, if
    known. part_of: composed tensor that this is a part of, if known.
    """

    dtype: str
    shape: tuple[int, ...]
    tie_key: Hashable
    load: Callable[[], torch.Tensor]
    problems: Callable[[], Sequence[str]] = lambda: ()
    lacking: Callable[[], Sequence[str]] = lambda: ()
    parts: Callable[[], Read | None] = lambda: None
    file: Path | None = None
    offset: int | None = None
    part_of: PartOf | None = None


def values_of(tensor: torch.Tensor) -> CheckpointTensor:
    """Return a tensor in memory as a CheckpointTensor, without a copy."""
    shape, parts = tuple(tensor.shape), partial(_parts, tensor)
    return CheckpointTensor(dtype_of(tensor.dtype), shape, tie_key(tensor), lambda: tensor, parts=parts)


def dtype_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, or `torch.x` if it has none."""
    return DTYPE_NAMES.get(dtype, str(dtype))


def content_of(tensor: torch.Tensor) -> TensorBytes:
    """Return a tensor's content; it shares the tensor's memory if that is contiguous and on the CPU."""
    return TensorBytes(dtype_of(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def contents_of(values: Iterable[Any]) -> list[Any]:
    """Return the inputs or outputs of a call, with tensors as contents."""
    return [content_of(value) if isinstance(value, torch.Tensor) else value for value in values]


def _parts(tensor: torch.Tensor) -> Read | None:
    return partial(copy_part, tensor) if tensor.is_contiguous() else None


def copy_part(tensor: torch.Tensor, memory: memoryview, begin: int) -> None:
    """Fill memory with a tensor's row-major bytes from `begin` on."""
    memory[:] = tensor_bytes(tensor)[begin : begin + len(memory)]


def pieces(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor of any layout and device, in pieces of at most 16 MiB before `change`.

    change: an elementwise function, called on one piece at a time. Memory: one piece, beside the tensor.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size <= PIECE:
        yield tensor_bytes(change(tensor.cpu()))
    elif tensor.is_contiguous():
        for part in torch.split(tensor.view(-1), PIECE // tensor.element_size()):
            yield tensor_bytes(change(part.cpu()))
    else:
        rows = max(1, PIECE // (size // len(tensor)))
        for part in tensor.unbind() if rows == 1 else torch.split(tensor, rows):
            yield from pieces(part, change)
