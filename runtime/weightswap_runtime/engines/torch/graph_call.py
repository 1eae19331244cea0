"""One method's graph, called over the tensors of one arena."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import contains
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from weightswap_runtime.engines.graphs.graph_opening import open_graph
from weightswap_runtime.engines.graphs.straight_line import Compiled
from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import GraphInput, Method
from weightswap_runtime.format.signature import Integer, Literal, Tensor, input_leaves, leaves

from .state import TorchState
from .variants import ChosenTensors

Tensors = Mapping[tuple[str, str], torch.Tensor]  # by kind and FQN
_FIXED = ("weight", "constant")
_KINDS: dict[type, tuple[str, ...]] = {
    Tensor: ("as_tensor",),
    Integer: ("as_sym_int",),
    Literal: ("as_none", "as_bool", "as_int", "as_float", "as_string"),
}


class MethodCall(Protocol):
    """One method with its tensors in place. stateful: it takes a state. hoisted: the results of `run_prologue`."""

    past_autograd: bool
    stateful: bool
    hoisted: list[torch.Tensor]

    @property
    def has_prologue(self) -> bool: ...

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone."""
        ...

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None) -> Any:
        """Run on flat inputs. Return flat outputs. state: None unless stateful. chosen: variants; None: zeros."""
        ...


def load_graph(artifact: Artifact, name: str, prologue: bool, device: torch.device) -> Compiled:
    """Open a method's graph as it was captured. Raises ArtifactError."""
    method = artifact.manifest.methods[name]
    fixed = [prologue and item.kind in _FIXED for item in method.inputs]
    graph = open_graph(artifact, method.graph, device, fixed)
    if not _fits(graph, method):
        raise ArtifactError(
            f"{artifact.path / method.graph}: its inputs and outputs are not those of the method {name!r} in the "
            "manifest"
        )
    return graph


def _fits(graph: Compiled, method: Method) -> bool:
    """Return whether a graph has as many inputs and outputs as a method, and inputs of the same kinds."""
    flat = iter(input_leaves(method.signature))
    kinds = [_KINDS[type(next(flat))] if item.kind == "input" else _KINDS[Tensor] for item in method.inputs]
    if len(graph.kinds) != len(kinds) or not all(map(contains, kinds, graph.kinds)):
        return False
    return graph.outputs == len(leaves(method.signature.output))


class GraphCall:
    """One method's graph with its tensors in place."""

    def __init__(self, graph: Compiled, inputs: tuple[GraphInput, ...], tensors: Tensors) -> None:
        self._graph = graph.call
        self.past_autograd = graph.past_autograd
        self._prologue = graph.prologue
        self._hoisted_count = graph.hoisted
        self.hoisted: list[torch.Tensor] = []
        bound = [tensors.get((item.kind, item.name)) for item in inputs]
        self._prologue_inputs = [tensor for item, tensor in zip(inputs, bound, strict=True) if item.kind in _FIXED]
        self._slots: list[Any] = [None] * self._hoisted_count + bound
        slots = list(enumerate(inputs, graph.hoisted))
        self._inputs = [index for index, item in slots if item.kind == "input"]
        self._states = [(index, item.name) for index, item in slots if item.kind == "state"]
        self._variable = [(index, item.name) for index, item in slots if item.kind == "variant"]
        self._with_variants: WeakKeyDictionary[ChosenTensors, list[Any]] = WeakKeyDictionary()
        self.stateful = bool(self._states)
        varies = self.stateful or bool(self._variable)
        self._bound = self._slots[: self._inputs[0]] if self._has_inputs_last() and not varies else None

    @property
    def has_prologue(self) -> bool:
        return self._prologue is not None

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone. The addresses of the results stay."""
        if self._prologue is None:
            return
        values = self._prologue(*self._prologue_inputs)
        if self.hoisted:
            for old, new in zip(self.hoisted, values, strict=True):
                overwrite(old, new)
            return
        self._slots[: self._hoisted_count] = values
        self._with_variants.clear()
        if self._bound is not None:
            self._bound[: self._hoisted_count] = values
        self.hoisted = list(values)

    def _has_inputs_last(self) -> bool:
        count = len(self._inputs)
        return bool(count) and self._inputs == list(range(len(self._slots) - count, len(self._slots)))

    def __call__(self, inputs: list[Any], state: TorchState | None = None, chosen: ChosenTensors | None = None) -> Any:
        if self._bound is not None:
            return self._graph(*self._bound, *inputs)
        slots = (self._slots if chosen is None else self._chosen(chosen)).copy()
        if state is not None:
            for index, tensor in state.for_inputs(self._graph, self._states):
                slots[index] = tensor
        for index, value in zip(self._inputs, inputs, strict=True):
            slots[index] = value
        return self._graph(*slots)

    def _chosen(self, chosen: ChosenTensors) -> list[Any]:
        """Return the slots, filled with the tensors of the chosen variants."""
        if (slots := self._with_variants.get(chosen)) is None:
            slots = self._slots.copy()
            for index, name in self._variable:
                slots[index] = chosen.tensors.get(name, slots[index])
            self._with_variants[chosen] = slots
        return slots


def overwrite(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy `new` into the memory of `old`, also if elements overlap. Raises ValueError for another shape or layout."""
    if layout_of(old) != layout_of(new):
        raise ValueError("a value computed from weights alone has a different shape or layout than before")
    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # else both view the same memory
        old.untyped_storage().copy_(new.untyped_storage())


def layout_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
