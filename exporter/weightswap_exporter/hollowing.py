"""Running a model's own code on stand-ins for its tensors, and putting everything back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .tensors import TieKey, named_tensors, tie_key


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
    """Put tensors in the places of parameters and buffers, by FQN; one for two names ties them.

    Parameters keep their attributes.
    """
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


def without_values(model: nn.Module, mode: FakeTensorMode, names: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """A stand-in for each parameter and buffer whose FQN `names` accepts; those of tied ones are not tied."""
    return {name: stand_in(tensor, mode) for name, tensor in named_tensors(model).items() if names(name)}


def tied(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with one stand-in for all names of a tied tensor."""
    first: dict[TieKey, torch.Tensor] = {}
    tensors = named_tensors(model)
    return {name: first.setdefault(tie_key(tensors[name]), value) for name, value in stand_ins.items()}
