"""Running a model's own code on stand-ins for its tensors, and putting everything back afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .parts import is_composed, parts_of, put_together
from .tensors import TieKey, named_tensors, tie_key

_DEEPEST = 6  # of what attributes hold in one another


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
    found = (value for _, attributes in saved for each in attributes.values() for value in _containers(each))
    contents = {id(value): (value, value.copy()) for value in found}
    try:
        yield
    finally:
        for value, content in contents.values():
            value.clear()
            value.extend(content) if isinstance(value, list | deque) else value.update(content)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object of somebody's own class; None of what torch and the standard library make."""
    origin = type(value).__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "torch" or isinstance(value, nn.Module | torch.Tensor | type):
        return None
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


def _containers(value: Any) -> Iterator[Any]:
    """What can be put back of an attribute: its lists, deques, dicts and sets, objects, also those in one another."""
    for _, each in within("", value):
        if isinstance(each, list | dict | set | deque) and type(each).__module__ in ("builtins", "collections"):
            yield each
        if (attributes := attributes_of(each)) is not None:
            yield attributes


def within(path: str, value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """A value, and what lists, tuples, deques, dicts and plain objects hold, by path; `seen` are the ids of objects."""
    yield path, value
    seen = set() if seen is None else seen
    items: list[tuple[str, Any]] = []
    if id(value) not in seen and (attributes := attributes_of(value)) is not None:
        seen.add(id(value))
        items += [(f".{name}", item) for name, item in attributes.items()]
    if isinstance(value, list | tuple | deque):
        items += [(f"[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        items += [(f"[{key!r}]", item) for key, item in value.items()]
    for key, item in items if depth <= _DEEPEST else ():
        yield from within(path + key, item, depth + 1, seen)


def install(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors where parameters and buffers are, by FQN; one for two names ties them.

    Parameters keep their attributes, but for those that are made of others: they are made of the given parts.
    """
    made: dict[tuple[int, ...], torch.Tensor] = {}
    whole = dict(tensors)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if is_composed(parameter) and (parts := parts_of(name, parameter)).keys() <= tensors.keys():
            given = [whole.pop(part) for part in parts]
            whole[name] = made.setdefault(tuple(map(id, given)), put_together(name, parameter, tensors))
    _install(model, whole)


def _install(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
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
            if not is_composed(tensor):
                vars(parameters[id(tensor)]).update(vars(original))
        module._parameters[leaf] = parameters[id(tensor)]


def without_values(model: nn.Module, mode: FakeTensorMode, names: Collection[str]) -> dict[str, torch.Tensor]:
    """A stand-in for each parameter and buffer of these FQNs; those of tied ones are not tied."""
    return {name: stand_in(tensor, mode) for name, tensor in named_tensors(model).items() if name in names}


def tied(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with one stand-in for all names of a tied tensor."""
    first: dict[TieKey, torch.Tensor] = {}
    tensors = named_tensors(model)
    return {name: first.setdefault(tie_key(tensors[name]), value) for name, value in stand_ins.items()}
