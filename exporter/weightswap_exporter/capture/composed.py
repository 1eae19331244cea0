"""Capture of models with composed parameters: the graph takes the parts as inputs, and composes them itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from weightswap_exporter.models.parts import is_composed, parts_of, put_together

_MARK = "*"  # no attribute's name has it


@contextmanager
def in_parts(model: nn.Module) -> Iterator[dict[str, str]]:
    """Replace composed parameters by their parts in the block; reading a composed parameter's attribute composes it.

    Gives the FQN of each part by its name in the block. Nothing is copied; the block's end restores the model.
    """
    modules = [module for module in model.modules() if _composed_names(module)]
    originals = [(module, type(module), module._parameters, module._modules) for module in modules]
    names = {
        f"{name}{_MARK}.{index}": key
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if is_composed(parameter)
        for index, key in enumerate(parts_of(name, parameter))
    }
    shared: dict[int, nn.Parameter] = {}
    try:
        for module in modules:
            _take_apart(module, shared)
        yield names
    finally:
        for module, kind, parameters, children in originals:
            module.__class__ = kind
            module._parameters, module._modules = parameters, children


class _Parts(nn.Module):
    """Parts of a composed parameter; `shared` has one parameter for each distinct part, for ties."""

    def __init__(self, whole: torch.Tensor, shared: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self._like = (whole,)  # a tuple, so that it does not become a parameter of this module
        for index, part in enumerate(parts_of("", whole).values()):
            self._parameters[str(index)] = shared.setdefault(id(part), nn.Parameter(part, part.requires_grad))

    def compose(self) -> torch.Tensor:
        (like,) = self._like
        return put_together("", like, dict(zip(parts_of("", like), self._parameters.values(), strict=True)))  # type: ignore[arg-type]


def _composed_names(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None and is_composed(value)]


def _take_apart(module: nn.Module, shared: dict[int, nn.Parameter]) -> None:
    kind = type(module)
    attributes: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module._parameters, module._modules = dict(module._parameters), dict(module._modules)
    for name in _composed_names(module):
        module._modules[name + _MARK] = _Parts(module._parameters.pop(name), shared)  # type: ignore[arg-type]
        attributes[name] = _composing_property(name + _MARK)
    module.__class__ = type(kind.__name__, (kind,), attributes)


def _composing_property(name: str) -> Any:
    return property(lambda module: module._modules[name].compose())


def name_parts(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Replace, in a program that was captured `in_parts`, the names of the parts by their FQNs."""
    for spec in program.graph_signature.input_specs:
        spec.target = None if spec.target is None else names.get(spec.target, spec.target)
    program._state_dict = {names.get(name, name): value for name, value in program.state_dict.items()}
    program._module_call_graph = [entry for entry in program.module_call_graph if _MARK not in entry.fqn]
