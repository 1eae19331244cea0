"""The tensors of a model: their names, their types, and which of them are one."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightswap_runtime.dtypes import TORCH_NAMES
from weightswap_runtime.errors import CaptureError, Unsupported

TieKey = tuple[object, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: its names, not a wrapper's, are those of the artifact. Raises CaptureError."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a module, got a {type(model).__qualname__}")
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported, a second's work, where anything is compiled
    compiled = compiler.OptimizedModule if compiler else ()
    while isinstance(model, (compiled, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, compiled) else model.module
    return model


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by FQN, tied ones under each of theirs."""
    tensors: dict[str, torch.Tensor] = {}
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return tensors


def kind_of(tensor: torch.Tensor) -> str | None:
    """The class of a tensor that is made of others, such as a quantised or a sharded one; None for a plain tensor."""
    composed: bool = is_traceable_wrapper_subclass(tensor)
    return type(tensor.detach()).__qualname__ if composed else None


def check_plain(model: nn.Module) -> None:
    """Raise Unsupported for parameters and buffers that are made of other tensors."""
    found = [f"{name} is a {kind}" for name, tensor in named_tensors(model).items() if (kind := kind_of(tensor))]
    if found:
        more = f", and {len(found) - 5} more" if len(found) > 5 else ""
        raise Unsupported(
            f"{', '.join(found[:5])}{more}: tensors that are made of others cannot be exported. Export the model "
            "before it is quantised or sharded."
        )


def persistent_buffers(model: nn.Module) -> set[str]:
    """FQNs of the buffers that belong to a checkpoint."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def tie_key(tensor: torch.Tensor) -> TieKey:
    """Equal for tensors that are one: the same elements of the same storage. Empty tensors are never tied."""
    if not tensor.numel():
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The safetensors name of a torch dtype. Raises CaptureError where there is none."""
    name = TORCH_NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise CaptureError(f"{where}: {dtype} has no place in the safetensors format")
    return name


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has shape and dtype but no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
