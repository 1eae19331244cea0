"""Stand-ins for a model's tensors, on which its own code runs, and restoring of the model afterwards."""

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

_DEEPEST = 6  # levels of nesting in attributes


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode, *, contiguous: bool = False) -> torch.Tensor:
    """Return a fake CPU tensor with the same shape, dtype and, unless `contiguous`, strides."""
    with mode:
        if contiguous:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Reset all attributes of all modules when the block ends, and the contents of their containers and objects."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    containers = (item for _, attributes in saved for value in attributes.values() for item in _containers(value))
    contents = {id(item): (item, item.copy()) for item in containers}
    try:
        yield
    finally:
        for item, content in contents.values():
            item.clear()
            item.extend(content) if isinstance(item, list | deque) else item.update(content)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class; None for others, as of torch or the standard library."""
    origin = type(value).__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "torch" or isinstance(value, nn.Module | torch.Tensor | type):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists, deques, dicts and sets nested in a value, and the attributes of objects."""
    for _, item in within("", value):
        if isinstance(item, list | dict | set | deque) and type(item).__module__ in ("builtins", "collections"):
            yield item
        if (attributes := attributes_of(item)) is not None:
            yield attributes


def within(path: str, value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield a value and those nested in it (in containers and objects), by path; `seen` has the ids of objects."""
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
    """Replace parameters and buffers by tensors, by FQN; one tensor for two names ties them.

    Parameters keep their attributes, except composed ones, which are composed of the given parts.
    """
    composed: dict[tuple[int, ...], torch.Tensor] = {}
    whole = dict(tensors)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if is_composed(parameter) and (parts := parts_of(name, parameter)).keys() <= tensors.keys():
            key = tuple(id(whole.pop(part)) for part in parts)
            whole[name] = composed.setdefault(key, put_together(name, parameter, tensors))
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
    """Return a stand-in for each parameter and buffer of these FQNs; tied tensors have separate ones."""
    return {name: stand_in(tensor, mode) for name, tensor in named_tensors(model).items() if name in names}


def tied(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the stand-ins with the same one for all names of a tied tensor."""
    first: dict[TieKey, torch.Tensor] = {}
    tensors = named_tensors(model)
    return {name: first.setdefault(tie_key(tensors[name]), value) for name, value in stand_ins.items()}
