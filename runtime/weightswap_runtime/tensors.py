"""torch tensors and the bytes that they stand for in a file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from .contents import Content
from .dtypes import DTYPES, TORCH_NAMES
from .errors import Unsupported


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name. Raises Unsupported where this torch has none."""
    attribute = DTYPES[name].torch
    dtype = getattr(torch, attribute, None) if attribute else None
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"dtype {name}: torch {torch.__version__} has no such type")
    return dtype


def as_tensor(memory: bytearray | mmap.mmap | memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over row-major, little-endian bytes; it shares their memory."""
    kind = torch_dtype(dtype)
    flat = torch.frombuffer(memory, dtype=kind) if len(memory) else torch.empty(0, dtype=kind)
    return flat.view(*shape) if shape else flat.view(())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major, little-endian bytes. A view of the tensor's own memory where that is on the CPU and contiguous."""
    rows = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = rows.as_strided((rows.numel(),), (1,))  # reshape leaves a single element its stride
    return flat.view(torch.uint8).numpy().data


def tensor_content(tensor: torch.Tensor) -> Content:
    """The content of a tensor; shares its memory where `tensor_bytes` does.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if name is None:
        raise Unsupported(f"{tensor.dtype} has no place in the safetensors format")
    return Content(name, tuple(tensor.shape), tensor_bytes(tensor))
