"""Conversion of a trace of loading code to an adapter: renames where possible, a graph for computed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from weightswap_exporter.capture.archive import program_archive
from weightswap_exporter.capture.programs import all_inputs, is_random
from weightswap_exporter.models.tensors import dtype_name, is_fake
from weightswap_exporter.models.user_errors import Unrecordable, first_line
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.manifest import ADAPTER_CONSTANTS_NAME, ADAPTER_NAME, AdapterInput, NamedTensor
from weightswap_runtime.format.weight_file import encode_tensors
from weightswap_runtime.tensors.torch_tensors import tensor_content, torch_dtype

from .overwriting import overwritten
from .tracing import Traced, Untraceable

aten = torch.ops.aten
_SAME_VALUES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.expand.default,
}


class Loaded(NamedTuple):
    """Source of a weight: any one of `keys`, or the adapter graph's output `transform`, computed from all of them."""

    keys: tuple[str, ...]
    transform: int | None = None


class Transforming:
    """Search for weights in a trace; those that are computed become outputs of the adapter's graph."""

    def __init__(self, traced: Traced, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: the model's tensors by FQN, whose present values must not become a part of the adapter."""
        self._traced = traced
        self._storages = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items() if tensor.numel()}
        for node in list(traced.module.graph.nodes):
            _replace_copy(node)
        self._keys, self._initial = traced.keys, traced.initial
        self._results = traced.results()
        self._outputs: list[Node] = []
        self._renamed_keys: set[str] = set()
        self.changed = traced.changed

    def weight(self, weight: NamedTensor) -> Loaded:
        """Return the source of a weight; without keys if loading does not change it.

        Raises Untraceable for a weight that depends on more than a checkpoint.
        """
        roots = dict.fromkeys(_root(self._results[name]) for name in weight.names)
        loaded = [root for root in roots if root not in self._initial]
        keys = [self._keys[root] for root in loaded if root in self._keys]
        cast = [root for root in loaded if _root(root, casts=True) in self._keys]
        if len(keys) == len(loaded) and all(_type(root) == (weight.dtype, weight.shape) for root in loaded):
            if not self._renamed_keys.intersection(keys):
                self._renamed_keys.update(keys)
                return Loaded(tuple(keys))
            key = loaded[-1]  # another weight has the same key
            with key.graph.inserting_after(key):
                node = _called(aten.clone.default, key, value=key.meta["val"].clone())
        elif len(cast) < len(loaded) > 1:
            raise _untraceable(f"gives {' and '.join(weight.names)}, which are one tensor, different values")
        else:
            node = self._with_type_of(loaded[-1], weight)  # names are loaded in turn, so that the last one wins
        return self._computed(weight, node)

    def _computed(self, weight: NamedTensor, node: Node) -> Loaded:
        used = sorted(all_inputs([node]))
        initial = [root for root in used if root in self._initial]
        if initial and not overwritten(node, initial):
            raise _untraceable(f"leaves old values in a part of {weight.name}")
        if any(map(is_random, used)):
            raise _untraceable(f"draws random numbers for {weight.name}")
        self._outputs.append(node)
        return Loaded(tuple(self._keys[root] for root in used if root in self._keys), len(self._outputs) - 1)

    def _with_type_of(self, node: Node, weight: NamedTensor) -> Node:
        """Return the node, cast to the weight's dtype as `Tensor.copy_` would."""
        dtype, shape = _type(node)
        if shape != weight.shape:
            raise CaptureError(
                f"loading a checkpoint gives {weight.name} the shape {list(shape)}; the model has {list(weight.shape)}"
            )
        if dtype == weight.dtype:
            return node
        with node.graph.inserting_after(node):
            return _cast(node, torch_dtype(weight.dtype))

    def adapter(self) -> tuple[tuple[AdapterInput, ...], dict[str, bytes]]:
        """Return the inputs of the adapter's graph, and the files of it and its constants; empty without transforms."""
        if not self._outputs:
            return (), {}
        body = sorted(all_inputs(self._outputs))
        keys = [node for node in body if node in self._keys]
        constants = {node: f"constant_{index}" for index, node in enumerate(n for n in body if n.op == "get_attr")}
        inputs = [_input("key", self._keys[node], node) for node in keys]
        inputs += [_input("constant", name, node) for node, name in constants.items()]
        values = {name: getattr(self._traced.module, str(node.target)) for node, name in constants.items()}
        self._check_constants(values)
        contents = {name: tensor_content(value) for name, value in values.items()}
        files = {ADAPTER_CONSTANTS_NAME: b"".join(encode_tensors(contents))} if values else {}
        return tuple(inputs), files | {ADAPTER_NAME: self._archive(body, [*keys, *constants])}

    def _check_constants(self, values: Mapping[str, torch.Tensor]) -> None:
        for value in values.values():
            if (name := self._storages.get(value.untyped_storage()._cdata)) is not None or is_fake(value):
                raise CaptureError(
                    f"the loading code uses the model's current values of {name or 'a tensor that it keeps'}: a "
                    "checkpoint must produce the same weights whatever the model held before"
                )

    def _archive(self, body: list[Node], placeholders: list[Node]) -> bytes:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for index, node in enumerate(placeholders):
            copies[node] = graph.placeholder(f"input_{index}")
        for node in body:
            if node in self._initial:  # all of its elements are overwritten
                value = node.meta["val"]
                copies[node] = graph.call_function(aten.zeros.default, (list(value.shape),), {"dtype": value.dtype})
            elif node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[output] for output in self._outputs))
        module = GraphModule(torch.nn.Module(), graph)
        examples = tuple(node.meta["val"].detach().contiguous() for node in placeholders)
        try:
            return program_archive(torch.export.export(module, examples, strict=False))
        except Exception as error:
            raise CaptureError(f"the adapter's graph cannot be written: {first_line(error)}") from error


def _untraceable(what: str) -> Untraceable:
    return Untraceable("", Unrecordable(f"loading a checkpoint {what}"))


def _replace_copy(node: Node) -> None:
    """Replace `copy(target, source)` by the source, expanded and cast to the target's type."""
    if node.target is not aten.copy.default:
        return
    source: Any = node.args[1]
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        if source.meta["val"].shape != value.shape:
            shape = list(value.shape)
            source = _called(aten.expand.default, source, shape, value=source.meta["val"].expand(shape))
        if source.meta["val"].dtype != value.dtype:
            source = _cast(source, value.dtype)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    return _called(aten._to_copy.default, node, value=node.meta["val"].to(dtype), dtype=dtype)


def _called(target: Any, node: Node, *args: Any, value: torch.Tensor, **kwargs: Any) -> Node:
    """Insert a call on a node at the graph's present insertion point; `value` is its fake result."""
    call = node.graph.call_function(target, (node, *args), kwargs)
    call.meta["val"] = value
    return call


def _root(node: Node, *, casts: bool = False) -> Node:
    """Return the first node with the same values, order and shape as `node`; with `casts`, also of another dtype."""
    while node.target in _SAME_VALUES or _pads_nothing(node):
        source = node.args[0]
        assert isinstance(source, Node)
        (dtype, shape), (source_dtype, source_shape) = _type(node), _type(source)
        if source_shape != shape or (source_dtype != dtype and not casts):
            break
        node = source
    return node


def _pads_nothing(node: Node) -> bool:
    """Return whether a node pads by nothing, as in transformers' code for tied weights."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    widths: Any = node.args[1]
    return not any(widths)


def _type(node: Node) -> tuple[str, tuple[int, ...]]:
    value = node.meta["val"]
    return dtype_name(value.dtype, str(node)), tuple(value.shape)


def _input(kind: Literal["key", "constant"], name: str, node: Node) -> AdapterInput:
    dtype, shape = _type(node)
    return AdapterInput(kind=kind, name=name, dtype=dtype, shape=shape)
