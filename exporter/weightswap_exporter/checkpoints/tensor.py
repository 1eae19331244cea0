"""Tensors of a checkpoint: their types, where their values are, and their bytes."""

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
    """The tensor of this kind that a tensor is a part of; `suffix` is what the part's name has after that's."""

    suffix: str
    kind: Kind


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint.

    dtype: its safetensors name. tie_key: equal only for tensors that have the same values, without a look at them.
    load: gets the values, in memory of their own or in the source's. problems: what would keep `load` from working, and
    check sums that are wrong. lacking: the same, as far as it can be told without reading the values.
    parts: gives what fills memory with the row-major bytes from a given one on, in any thread; None where that would
    take the memory of the whole tensor. file: the one that the values are in, if it is one. offset: of the first
    element in it, in bytes, where it can be said. part_of: what it is a part of, if it is one and that is known.
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
    """The values of a tensor in memory, which is not copied."""
    shape, parts = tuple(tensor.shape), partial(_parts, tensor)
    return CheckpointTensor(dtype_of(tensor.dtype), shape, tie_key(tensor), lambda: tensor, parts=parts)


def dtype_of(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype; `torch.x` where there is none."""
    return DTYPE_NAMES.get(dtype, str(dtype))


def content_of(tensor: torch.Tensor) -> TensorBytes:
    """A tensor to be compared or written; shares its memory where that is on the CPU and contiguous."""
    return TensorBytes(dtype_of(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def contents_of(values: Iterable[Any]) -> list[Any]:
    """Inputs or outputs of a call, tensors as contents."""
    return [content_of(value) if isinstance(value, torch.Tensor) else value for value in values]


def _parts(tensor: torch.Tensor) -> Read | None:
    return partial(copy_part, tensor) if tensor.is_contiguous() else None


def copy_part(tensor: torch.Tensor, memory: memoryview, begin: int) -> None:
    """Fill memory with a tensor's row-major bytes from `begin` on."""
    memory[:] = tensor_bytes(tensor)[begin : begin + len(memory)]


def pieces(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[memoryview]:
    """The row-major bytes of a tensor of any layout and device, in pieces of at most 16 MiB before `change`.

    change: an elementwise function, called on one piece at a time. Beside the tensor one piece is in memory.
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
