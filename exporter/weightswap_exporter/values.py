"""Tensors of a checkpoint: their types, where their values are, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from weightswap_runtime.contents import Content
from weightswap_runtime.dtypes import TORCH_NAMES
from weightswap_runtime.tensors import tensor_bytes

from .tables import tie_key

PIECE = 16 << 20


def _no_problems() -> Sequence[str]:
    return ()


class Values(NamedTuple):
    """A tensor of a checkpoint.

    dtype: its safetensors name. place: equal for two tensors only if they have the same values without a look at them.
    load: gets the values, in memory of their own or in the source's. problems: what would keep `load` from working, as
    far as can be told without reading the values.
    """

    dtype: str
    shape: tuple[int, ...]
    place: Hashable
    load: Callable[[], torch.Tensor]
    problems: Callable[[], Sequence[str]] = _no_problems


def values_of(tensor: torch.Tensor) -> Values:
    """The values of a tensor in memory, which is not copied."""
    return Values(dtype_of(tensor.dtype), tuple(tensor.shape), tie_key(tensor), partial(_same, tensor))


def dtype_of(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype; `torch.x` where there is none."""
    return TORCH_NAMES.get(str(dtype).removeprefix("torch."), str(dtype))


def content_of(tensor: torch.Tensor) -> Content:
    """A tensor to be compared or written; shares its memory where that is on the CPU and contiguous."""
    return Content(dtype_of(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
