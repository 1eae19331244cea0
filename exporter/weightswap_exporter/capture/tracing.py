"""Tracing of a model's own loading code: a graph from the tensors of a checkpoint to those of the model.

The code runs once, on fake tensors, and `make_fx` (torch.fx.experimental.proxy_tensor) records every operator that it
calls. Code that depends on values cannot be recorded; the error names it. Assignments of `.data`, which the tracer does
not see, are recorded here. Writes to tensors that are not the model's are refused: such a tensor is real, so that the
tracing itself would change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from weightswap_exporter.modules.stand_ins import (
    Unrecordable,
    first_line,
    frame_of,
    install,
    reason,
    restored,
    stand_in,
    wants_values,
    without_values,
)
from weightswap_exporter.modules.tensors import Kind, ModelView, describe_kind, parts_of, put_together
from weightswap_runtime.errors import CaptureError

from .trials import WritesChecked

Load = Callable[[nn.Module, dict[str, Any]], object]
CheckpointTensors = Mapping[str, Any]
_data: Any = torch._C.TensorBase.data


class Untraceable(Exception):
    """Error of loading code on fake tensors; the text names the code."""

    wants_values: bool  # it failed because it needs values, or cannot be recorded

    def __init__(self, text: str, error: Exception) -> None:
        self.wants_values = wants_values(error)
        super().__init__(f"{text}{frame_of(error)}{first_line(error) if self.wants_values else reason(error)}")


class Traced(NamedTuple):
    """Trace of loading code."""

    module: GraphModule  # takes a checkpoint's tensors, then the model's, and returns the model's after the loading
    keys: dict[Node, str]  # placeholders of the checkpoint's tensors, with their keys
    initial: dict[Node, str]  # placeholders of the model's tensors, with their FQNs
    changed: tuple[str, ...]  # attributes of modules that loading changes: the graph has their values at the export

    def results(self) -> dict[str, Node]:
        """Return the node that gives each of the model's tensors, by FQN."""
        (nodes,) = self.module.graph.output_node().args
        return dict(zip(self.initial.values(), nodes, strict=True))  # type: ignore[arg-type]


def load_state_dict(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Load as users do, with all hooks."""
    model.load_state_dict(checkpoint)


def load_what_fits(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Load a checkpoint that has unexpected keys, or lacks some."""
    model.load_state_dict(checkpoint, strict=False)


def trace_loading(view: ModelView, names: Collection[str], checkpoint: CheckpointTensors, load: Load) -> Traced:
    """Record how `load(model, checkpoint)` computes the tensors of these FQNs.

    `checkpoint` needs no values; `load` gets entries that are no tensors unchanged, and the versions that a state dict
    has in `_metadata`. The model is restored, except for changes inside objects other than modules, lists, dicts and
    sets. Raises Untraceable and CaptureError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {
        key: stand_in(value, mode, contiguous=True)
        for key, value in flattened(checkpoint).items()
        if isinstance(value, torch.Tensor)
    }
    initial = without_values(view, mode, names)
    changed: list[str] = []

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        entries = dict(zip(tensors, flat, strict=False))
        install(view, dict(zip(initial, flat[len(entries) :], strict=True)))
        before = _attributes(view.model, initial)
        whole = {
            key: put_together(key, value, entries) if isinstance(value, torch.Tensor) else value
            for key, value in checkpoint.items()
        }
        with _watched():
            load(view.model, like_checkpoint(checkpoint, whole))
        loaded = ModelView(view.model)
        _check_kinds(view.kinds, loaded.kinds)
        changed[:] = _changed(before, _attributes(view.model, initial))
        return [loaded.tensors[name] for name in initial]

    inputs = (*tensors.values(), *initial.values())
    with restored(view.model):
        try:
            module = make_fx(run, tracing_mode="fake")(*inputs)
            if any(_mutates(node) for node in module.graph.nodes):
                # instead of writes, results: each weight is then one expression of what was loaded
                module = make_fx(torch.func.functionalize(module, remove="mutations"), tracing_mode="fake")(*inputs)
            _check_recorded(module)
        except CaptureError:
            raise
        except Exception as error:
            raise Untraceable("", error) from error
    module.graph.eliminate_dead_code()
    placeholders = iter(module.graph.find_nodes(op="placeholder"))
    keys = {next(placeholders): key for key in tensors}
    return Traced(module, keys, dict(zip(placeholders, initial, strict=True)), tuple(changed))


def flattened(checkpoint: CheckpointTensors) -> dict[str, Any]:
    """Return a checkpoint with composed tensors replaced by their parts, as `KEY.PART`."""
    return {
        name: part
        for key, value in checkpoint.items()
        for name, part in (parts_of(key, value) if isinstance(value, torch.Tensor) else {key: value}).items()
    }


def _check_kinds(before: Mapping[str, Kind], after: Mapping[str, Kind]) -> None:
    for name in [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        raise CaptureError(
            f"loading a checkpoint makes {name} {describe_kind(after.get(name))}, but the graph has "
            f"{describe_kind(before.get(name))}"
        )


def _check_recorded(module: GraphModule) -> None:
    """Raise Unrecordable for an operator without results, which only checks: the graph would drop it as unused."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not schema.returns and not schema.is_mutable:
            raise Unrecordable(f"{node.target} checks values")


def _attributes(model: nn.Module, weights: Collection[str]) -> dict[str, Any]:
    """Return what the graph may depend on beside weights and state: buffers, and attributes with tensors or values."""
    values: dict[str, Any] = {name: value for name, value in model.named_buffers() if name not in weights}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor | bool | int | float | str):
                values[f"{path}.{name}" if path else name] = value
    return values


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the changed attributes. Raises CaptureError for tensors among them: they are constants of the graph."""
    changed = [name for name, value in before.items() if name in after and _differ(value, after[name])]
    if tensors := [name for name in changed if isinstance(before[name], torch.Tensor)]:
        raise CaptureError(
            f"loading a checkpoint replaces {', '.join(tensors)}, which belongs to the graph, not to a checkpoint, so "
            "a swap could not replace it: register it as a persistent buffer"
        )
    return changed


def _differ(one: object, other: object) -> bool:
    return one is not other if isinstance(one, torch.Tensor) else type(one) is not type(other) or one != other


def like_checkpoint(checkpoint: CheckpointTensors, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with the versions that `checkpoint` has in `_metadata`, if it is a state dict."""
    copied = OrderedDict(entries)
    if hasattr(checkpoint, "_metadata"):
        copied._metadata = checkpoint._metadata  # type: ignore[attr-defined]
    return copied


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


@contextmanager
def _watched() -> Iterator[None]:
    """Raise Unrecordable in the block for operations that `make_fx` would lose, or would run on real tensors."""
    writes: Any = WritesChecked(_check_written)  # torch has no types for it
    with writes, mock.patch.object(torch.Tensor, "data", property(_data.__get__, _assign_data), create=True):
        yield


def _check_written(values: list[Any], func: object) -> None:
    """Raise Unrecordable for a write to a tensor that the model or a hook keeps: the tracer would change it."""
    parts = [part for value in values if isinstance(value, torch.Tensor) for part in parts_of("", value).values()]
    if not all(isinstance(part, FakeTensor) for part in parts):
        raise Unrecordable(
            f"{func} writes to a tensor that is neither a weight nor of the checkpoint; if it is a buffer, register it "
            "as a persistent one, since a server computes with its value from the export"
        )


def _assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Run `tensor.data = value`, and let the tracer take the tensor for `value` from here on."""
    mode = get_proxy_mode()
    proxy = get_proxy_slot(value, mode.tracer, None) if mode is not None else None
    if proxy is None or not isinstance(tensor, FakeTensor):
        raise Unrecordable("an assignment of `.data` that does not put a tensor of the checkpoint into a weight")
    _data.__set__(tensor, value)
    set_proxy_slot(tensor, mode.tracer, proxy)  # type: ignore[union-attr]
