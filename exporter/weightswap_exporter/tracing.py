"""Tracing a model's own loading code: a graph from the tensors of a checkpoint to those of the model.

The code runs once, on tensors without values, and every operator that it calls is recorded by `make_fx`
(torch.fx.experimental.proxy_tensor). What depends on values cannot be recorded, and is refused with the code's name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from weightswap_runtime.errors import CaptureError

from .blame import first_line, place_of, reason, wants_values
from .hollowing import install, named_tensors, restored, stand_in, without_values

Load = Callable[[nn.Module, dict[str, Any]], object]
Checkpoint = Mapping[str, Any]


class Untraceable(Exception):
    """The loading code failed when it was run without values. The text says where.

    `wants_values` tells that it failed because it asked for them.
    """

    def __init__(self, text: str, error: Exception) -> None:
        self.wants_values = wants_values(error)
        super().__init__(f"{text}{place_of(error)}{first_line(error) if self.wants_values else reason(error)}")


class Traced(NamedTuple):
    """`module` takes the tensors at `keys`, then the model's at `outputs`, and returns the latter after the loading."""

    module: GraphModule
    keys: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def inputs(self) -> dict[Node, str]:
        """The placeholders that are the checkpoint's, with their keys."""
        return dict(zip(self.placeholders, self.keys, strict=False))

    @property
    def initial(self) -> dict[Node, str]:
        """The placeholders that are what the model had before, with their FQNs."""
        return dict(zip(self.placeholders[len(self.keys) :], self.outputs, strict=True))

    @property
    def results(self) -> dict[str, Node]:
        """The node that gives each of the model's tensors."""
        (nodes,) = self.module.graph.output_node().args
        return dict(zip(self.outputs, nodes, strict=True))  # type: ignore[arg-type]


def load_state_dict(model: nn.Module, checkpoint: dict[str, Any], *, strict: bool = True) -> None:
    """What `model.load_state_dict(checkpoint)` does, with every hook, without copies of tensors that only move."""
    model.load_state_dict(checkpoint, strict=strict, assign=True)


def trace_loading(model: nn.Module, names: Callable[[str], bool], checkpoint: Checkpoint, load: Load) -> Traced:
    """Record what `load(model, checkpoint)` makes of the tensors whose FQNs `names` accepts.

    `checkpoint` needs no values; entries that are no tensors are given to `load` as they are, and so are the versions
    that a state dict has in `_metadata`. The model is left as it was. Raises Untraceable and CaptureError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {
        key: stand_in(value, mode, contiguous=True)
        for key, value in checkpoint.items()
        if isinstance(value, torch.Tensor)
    }
    initial = without_values(model, mode, names)
    constants = {name: tensor for name, tensor in named_tensors(model).items() if name not in initial}

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(tensors, flat, strict=False))
        install(model, dict(zip(initial, flat[len(given) :], strict=True)))
        load(model, _like(checkpoint, given))
        loaded = named_tensors(model)
        _check_constants(constants, loaded)
        return [loaded[name] for name in initial]

    inputs = (*tensors.values(), *initial.values())
    with restored(model):
        try:
            module = make_fx(run, tracing_mode="fake")(*inputs)
        except CaptureError:
            raise
        except Exception as error:
            raise Untraceable("", error) from error
    if any(_mutates(node) for node in module.graph.nodes):
        module = make_fx(torch.func.functionalize(module, remove="mutations"), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Traced(module, tuple(tensors), tuple(initial))


def _like(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    filled = OrderedDict((key, tensors.get(key, value)) for key, value in checkpoint.items())
    if hasattr(checkpoint, "_metadata"):
        filled._metadata = checkpoint._metadata  # type: ignore[attr-defined]
    return filled


def _check_constants(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    if changed := [name for name, tensor in before.items() if after.get(name) is not tensor]:
        raise CaptureError(
            f"loading a checkpoint replaces {', '.join(changed)}, which belongs to the graph, not to a checkpoint, so "
            "that a swap could not: register it as a persistent buffer"
        )


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
