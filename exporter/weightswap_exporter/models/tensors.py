"""Tensors of a model: names, dtypes and ties."""

from __future__ import annotations

import io
import sys
from collections.abc import Sized
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from weightswap_runtime.errors import CaptureError, Unsupported
from weightswap_runtime.format.name_matching import EXTRA_STATE
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES

from .parts import is_composed, is_sharded, kind_of, parts_of, unknown_in

TieKey = tuple[object, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without wrappers, whose names the artifact shall not have. Raises CaptureError for no module."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a module, got a {type(model).__qualname__}")
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second; compiling imports it
    compiled = compiler.OptimizedModule if compiler else ()
    while isinstance(model, (compiled, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, compiled) else model.module
    return model


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by FQN, tied ones under each name; for composed ones, their parts."""
    return {
        key: value for name, tensor in whole_tensors(model).items() for key, value in parts_of(name, tensor).items()
    }


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by FQN, composed ones whole."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def named_parameters(model: nn.Module) -> set[str]:
    """Return the FQNs of parameters; for composed ones, of their parts."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {key for name, parameter in parameters for key in parts_of(name, parameter)}


def check_separable(model: nn.Module) -> None:
    """Raise Unsupported for composed tensors that cannot be taken apart."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    texts = {name: _inseparable(tensor, name in parameters) for name, tensor in whole_tensors(model).items()}
    if problems := [f"{name} is a {text}" for name, text in texts.items() if text]:
        raise Unsupported(f"{listed(problems, between='; ')}. Export the model before that is done.")


def _inseparable(tensor: torch.Tensor, is_parameter: bool) -> str:
    if not is_sharded(tensor) and not is_composed(tensor):
        return ""
    name = type(tensor).__qualname__
    if is_sharded(tensor):
        return f"{name}, which has only a part of the values"
    if not is_parameter:
        return f"{name}, and only parameters may be made of other tensors"
    unknown = unknown_in(kind_of(tensor))
    return f"{name} with a {unknown[0]} in it, which an artifact cannot record" if unknown else ""


def persistent_buffers(model: nn.Module) -> set[str]:
    """Return the FQNs of the buffers that belong to a checkpoint."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def extra_states(model: nn.Module) -> dict[str, str]:
    """Return the keys of extra states that say something, each with a text in place of the state."""
    modules = model.named_modules(remove_duplicate=False)
    own = {path: module for path, module in modules if type(module).get_extra_state is not nn.Module.get_extra_state}
    return {f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: "saved" for path, module in own.items() if _says(module)}


def _says(module: nn.Module) -> bool:
    try:
        return not is_empty_state(module.get_extra_state())
    except Exception:  # it may need what only a trainer has; `state_dict()` would say so
        return True


def is_empty_state(value: Any) -> bool:
    """Return whether an extra state says nothing."""
    if isinstance(value, io.BytesIO):
        return not value.getbuffer()
    if isinstance(value, torch.Tensor):
        return not value.numel()
    return value is None or (isinstance(value, Sized) and not len(value))


def tie_key(tensor: torch.Tensor) -> TieKey:
    """Return a key that tied tensors share: those of the same elements of a storage. Empty tensors are never tied."""
    if not tensor.numel():
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the safetensors name of a torch dtype. Raises CaptureError if it has none."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise CaptureError(f"{where}: {dtype} is not a dtype of the safetensors format")
    return name


def attribute_at(model: nn.Module, path: str) -> Any:
    """Return what a dotted path of attributes leads to; None if it leads nowhere."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has shape and dtype but no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
