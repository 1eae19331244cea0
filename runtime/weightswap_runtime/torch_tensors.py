"""Tensors of torch as bytes, and torch without the modes of its caller.

Bytes are viewed, not copied, where the tensor's memory has them as they are; a view keeps the tensor alive.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .errors import Unsupported
from .tensors import DTYPES, TORCH_NAMES, TensorBytes

_AUTOCAST = ("cpu", "cuda")
_DENORMAL, _ONE = np.float32(1e-40), np.float32(1)
DTYPE_NAMES: Mapping[torch.dtype, str] = {getattr(torch, attribute): name for attribute, name in TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name. Raises Unsupported if torch has none."""
    attribute = DTYPES[name].torch
    if attribute is None:
        raise Unsupported(f"dtype {name}: torch {torch.__version__} has no such type")
    dtype: torch.dtype = getattr(torch, attribute)
    return dtype


def as_tensor(memory: bytearray | mmap.mmap | memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that shares the memory of row-major, little-endian bytes."""
    torch_type = torch_dtype(dtype)
    flat = torch.frombuffer(memory, dtype=torch_type) if len(memory) else torch.empty(0, dtype=torch_type)
    return flat.view(*shape) if shape else flat.view(())


def copied_tensor(content: TensorBytes) -> torch.Tensor:
    """Copy content to a tensor in memory from torch's allocator: kernels depend on alignment."""
    tensor = torch.empty(content.shape, dtype=torch_dtype(content.dtype), device="cpu")
    _memory(tensor)[:] = content.data
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return row-major, little-endian bytes: a view of the tensor's memory if it is on the CPU and contiguous."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    rows = tensor.contiguous()
    if type(rows) is not torch.Tensor or (rows.numel() and not rows.data_ptr()):
        flat = rows.detach().as_strided((rows.numel(),), (1,))  # reshape leaves a single element its stride
        return flat.view(torch.uint8).numpy().data  # raises for a tensor without memory, unlike `_memory`
    return _memory(rows)


def _memory(rows: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor. torch's `.numpy()` would keep the storage from ever being resized."""
    memory = _array_type(rows.nbytes).from_address(rows.data_ptr())
    memory.tensor = rows  # type: ignore[attr-defined]  # keeps the tensor alive as long as the view
    return memoryview(memory).cast("B")


@functools.lru_cache  # making a type is much slower than making an array of it
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


def tensor_content(tensor: torch.Tensor) -> TensorBytes:
    """Return the content of a tensor; it shares the tensor's memory as in `tensor_bytes`.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise Unsupported(f"{tensor.dtype} is not a dtype of the safetensors format")
    return TensorBytes(name, tuple(tensor.shape), tensor_bytes(tensor))


def class_name(kind: type[Any]) -> str:
    """Return the name of a class as signatures have it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def context_text(kind: type[Any], context: Any) -> str:
    """Return what an object keeps beside its fields, as the class's registration with pytree gives it, as JSON.

    Raises TypeError or ValueError if JSON cannot express it.
    """
    dumps = pytree.SUPPORTED_SERIALIZED_TYPES[kind].to_dumpable_context
    return "" if context is None else json.dumps(dumps(context) if dumps else context, ensure_ascii=False)


def registered_fields(value: Any) -> tuple[str, list[Any]] | None:
    """Return an object's context and its fields, in order; None if its class is not registered with pytree."""
    kind = type(value)
    if kind not in pytree.SUPPORTED_NODES:
        return None
    fields, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    return context_text(kind, context), list(fields)


@contextmanager
def default_torch_modes() -> Iterator[None]:
    """Run the block without the modes of the calling thread.

    These are gradients, autocast, inference mode, `torch.device(...)` contexts and the flushing of denormal numbers.
    The weights, and whether they reproduce their goldens, must not depend on the caller of the swap. Torch's own
    context managers are written in Python: an interrupt in the middle of one leaves the thread in its mode.
    """
    before = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
    flushes = not _DENORMAL * _ONE  # torch does not tell
    try:
        # the first guard enables gradients, and restores their mode at the end
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(False)
            _set_autocast([False for _ in _AUTOCAST])
            if flushes:
                torch.set_flush_denormal(False)
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)
        _set_autocast(before)


def _set_autocast(enabled: list[bool]) -> None:
    for device, on in zip(_AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(device, on)
