"""Running a model's own code on stand-ins for its tensors, and putting everything back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .tables import TieKey, tie_key


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by FQN, tied ones under each of theirs."""
    tensors: dict[str, torch.Tensor] = {}
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return tensors


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode, *, contiguous: bool = False) -> torch.Tensor:
    """A tensor of the same type on the CPU, without values."""
    with mode:
        if contiguous:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put every attribute of every module back when the block ends, also what its lists and dicts hold."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    contents = [(value, value.copy()) for _, attributes in saved for value in attributes.values() if _is_plain(value)]
    try:
        yield
    finally:
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def _is_plain(value: object) -> bool:
    return isinstance(value, list | dict | set) and type(value).__module__ in ("builtins", "collections")


def install(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors in the places of parameters and buffers, by FQN; ties stay ties, parameters keep their attributes."""
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf not in module._parameters:
            module._buffers[leaf] = tensor
            continue
        if id(tensor) not in parameters:
            original = module._parameters[leaf]
            assert original is not None
            parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=original.requires_grad)
            vars(parameters[id(tensor)]).update(vars(original))
        module._parameters[leaf] = parameters[id(tensor)]


def tie_groups(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one of those whose tensors are tied."""
    first: dict[TieKey, str] = {}
    return {name: first.setdefault(tie_key(tensor), name) for name, tensor in tensors.items()}


def without_values(model: nn.Module, mode: FakeTensorMode, names: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """A stand-in for each parameter and buffer whose FQN `names` accepts; tied ones share theirs."""
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if names(name)}
    made: dict[str, Any] = {}
    groups = tie_groups(tensors)
    for name, first in groups.items():
        if first not in made:
            made[first] = stand_in(tensors[first], mode)
        made[name] = made[first]
    return made
