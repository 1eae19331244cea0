"""torch tensors and the bytes that they stand for in a file."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from weightswap_runtime.errors import Unsupported

from .content import TensorBytes
from .dtypes import DTYPES, TORCH_NAMES


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


def copied_tensor(content: TensorBytes) -> torch.Tensor:
    """A tensor of that content, in memory of its own."""
    return as_tensor(bytearray(content.data), content.dtype, content.shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major, little-endian bytes. A view of the tensor's own memory where that is on the CPU and contiguous."""
    rows = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = rows.as_strided((rows.numel(),), (1,))  # reshape leaves a single element its stride
    return _memory(flat.view(torch.uint8))


def _memory(flat: torch.Tensor) -> memoryview:
    """The memory of bytes. torch's own way, `.numpy()`, makes the storage one that can never be resized again."""
    if type(flat) is not torch.Tensor or (len(flat) and not flat.data_ptr()):
        return flat.numpy().data  # torch refuses what has no memory of its own
    memory = (ctypes.c_char * len(flat)).from_address(flat.data_ptr())
    memory.tensor = flat  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(memory).cast("B")


def tensor_content(tensor: torch.Tensor) -> TensorBytes:
    """The content of a tensor; shares its memory where `tensor_bytes` does.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if name is None:
        raise Unsupported(f"{tensor.dtype} has no place in the safetensors format")
    return TensorBytes(name, tuple(tensor.shape), tensor_bytes(tensor))
