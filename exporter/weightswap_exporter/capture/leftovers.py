"""Values that a call leaves in attributes of modules, and the test whether a later call reads them.

A server runs each call as if it were the first. That is right if later calls give the same, whatever earlier ones have
left. To prove it, two calls are captured in one program, and both must compute the same from their own inputs.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from weightswap_exporter.models.stand_ins import attributes_of, restored, within
from weightswap_exporter.models.tensors import is_fake

from .programs import all_inputs, graph_inputs, is_random

Labels = dict[Any, int]
Half = tuple[list[Node], list[Any]]  # inputs and outputs of one call
Halves = tuple[Half, Half]
_SAME = {  # operators whose result has the same values as the argument at this index
    torch.ops.aten.clone.default: 0,
    torch.ops.aten.alias.default: 0,
    torch.ops.aten.detach.default: 0,
    torch.ops.aten.copy.default: 1,
}


class Leftovers(NamedTuple):
    """Attributes in which a call has left tensors, and attributes whose numbers or texts it has changed."""

    tensors: list[str]
    numbers: list[str]


def is_read_later(
    root: nn.Module, inputs: Any, program: ExportedProgram, mutated: Collection[str], leftovers: Leftovers
) -> bool:
    """Return whether a second call of `root` may depend on values that the first has left in attributes.

    inputs: args and kwargs with which `program` was captured. mutated: buffers that a call changes; as state, they are
    inputs of each call. If only numbers were left, the answer is True only for a second call that is seen to compute
    something else: many modules count their calls, and never read the number.
    """
    flat, spec = pytree.tree_flatten(inputs)
    twice = _Twice(root, flat, spec, mutated)
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    shapes = _dynamic(program)
    tensors += [owner._buffers[name].detach().clone() for owner, name in twice.state()]
    shapes += [{}] * (len(tensors) - len(shapes))
    with restored(root), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the capture of one call has shown the same warnings
        try:
            both = torch.export.export(
                twice, (tensors, [value.clone() for value in tensors]), dynamic_shapes=(shapes, shapes), strict=False
            )
            both = both.run_decompositions({})
        except Exception:  # calls that differ, such as in a size, cannot be captured in one program
            return bool(leftovers.tensors)
    halves = _halves(both, shapes, mutated)
    if not leftovers.tensors:
        return halves is not None and not _are_alike(both, *halves)
    return False in twice.settled or halves is None or not _are_alike(both, *halves)


class _Twice(nn.Module):
    """Module that calls another one twice."""

    def __init__(self, root: nn.Module, flat: list[Any], spec: Any, mutated: Collection[str]) -> None:
        super().__init__()
        self.root = root
        self._flat, self._spec, self._mutated = tuple(flat), spec, sorted(mutated)
        self.settled = set[bool]()  # a set, as torch resets other attributes after the capture

    def forward(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> Any:
        buffers = [owner._buffers[name] for owner, name in self.state()]
        one = self._call(first, buffers)
        kinds = _kinds(self.root)
        two = self._call(second, buffers)
        self.settled.add(_kinds(self.root) == kinds)
        return one, two

    def _call(self, tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        flat = [next(remaining) if isinstance(value, torch.Tensor) else value for value in self._flat]
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        for (owner, name), buffer, values in zip(self.state(), buffers, remaining, strict=True):
            buffer.copy_(values)
            owner._buffers[name] = buffer
        output = self.root(*args, **kwargs)
        # if outputs and leftovers depend on a call's own inputs alone, they do so in every later call
        leftovers = [tensor.clone() for tensor in _tensors(self.root).values()]
        return pytree.tree_leaves(output), [owner._buffers[name].clone() for owner, name in self.state()], leftovers

    def state(self) -> list[tuple[Any, str]]:
        split = (name.rpartition(".") for name in self._mutated)
        return [(self.root.get_submodule(path), name) for path, _, name in split]


def _kinds(root: nn.Module) -> dict[str, Any]:
    """Return the kind of each plain attribute's value by path: the type of a tensor, or a plain value itself."""
    return {path: _kind(value) for path, value in _plain_values(root)}


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.dim())
    if isinstance(value, bool | int | float | str | None):
        return value
    if attributes_of(value) is not None:
        return object  # its class may differ from call to call; its attributes are compared
    return list if isinstance(value, list | tuple | deque | dict) else type(value)


def _tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    return {path: value for path, value in _plain_values(root) if isinstance(value, torch.Tensor)}


def _plain_attributes(root: nn.Module) -> Iterator[tuple[str, Any]]:
    own = vars(nn.Module()).keys()
    for path, module in root.named_modules():
        prefix = f"self.{path}." if path else "self."
        yield from ((prefix + name, value) for name, value in vars(module).items() if name not in own)


def _plain_values(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes, and the values nested in them, by path."""
    for path, value in _plain_attributes(root):
        yield from within(path, value)


@contextmanager
def leftovers_of_calls(root: nn.Module) -> Iterator[Leftovers]:
    """Give Leftovers that, when the block ends, name the attributes in which a call of `root` has left values.

    The block's end resets all attributes. torch's own check does not look into tuples.
    """
    names: dict[str, None] = {}
    numbers: dict[str, None] = {}
    before: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []  # of the outermost call: calls may be nested

    def snapshot() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        values = {path: value for path, value in _plain_attributes(root) if type(value) in (bool, int, float, str)}
        return _tensors(root), values

    def begin(module: nn.Module, _: Any) -> None:
        if vars(module) is vars(root) and not before:
            before.append(snapshot())

    def end(module: nn.Module, _: Any, __: Any) -> None:
        if vars(module) is vars(root):
            (tensors, values), (tensors_now, values_now) = before[0], snapshot()
            names.update({name: None for name, tensor in tensors_now.items() if tensors.get(name) is not tensor})
            numbers.update({path: None for path, value in values_now.items() if values.get(path, value) != value})

    leftovers = Leftovers([], [])
    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    with hooks[0], hooks[1], restored(root), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
        yield leftovers
    reassigned = _reassigned(root)
    leftovers.tensors.extend(name for name in names if not reassigned.match(name))
    leftovers.numbers.extend(numbers)


def _reassigned(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern for attributes that each call assigns before it reads them.

    These are the weights of the old weight_norm and spectral_norm, and the lists of weights in recurrent layers.
    """
    computed = [
        re.escape(f"self.{path}.{hook.name}" if path else f"self.{hook.name}")
        for path, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm | SpectralNorm)
    ]
    return re.compile("|".join([r"self\.(?:[\w.]+\.)?_flat_weights\b", *(f"{name}$" for name in computed)]))


def _dynamic(program: ExportedProgram) -> list[dict[int, Any]]:
    """Return the dynamic dimensions of each input tensor. The sizes of two calls may differ."""
    values = (node.meta.get("val") for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT)
    return [
        {axis: Dim.AUTO for axis, size in enumerate(value.shape) if not isinstance(size, int)}
        for value in values
        if isinstance(value, torch.Tensor)
    ]


def _halves(program: ExportedProgram, shapes: list[dict[int, Any]], mutated: Collection[str]) -> Halves | None:
    """Return both calls' inputs and outputs; None if they cannot be compared, as one call affects the other."""
    signature = program.graph_signature
    (returned,) = program.graph.output_node().args
    outputs = [
        node for node, spec in zip(returned, signature.output_specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT
    ]
    one, two = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    inputs = [node for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT]
    first, second = inputs[: len(shapes)], inputs[len(shapes) :]
    if {spec.kind for spec in signature.output_specs} - {OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION}:
        return None
    if not {name.removeprefix("root.") for name in signature.buffers_to_mutate.values()} <= set(mutated):
        return None
    if not _vary_apart(first, second, shapes) or _random_operators(one) & _random_operators(two):
        return None
    return (first, one), (second, two)


def _are_alike(program: ExportedProgram, one: Half, two: Half) -> bool:
    """Return whether both halves compute their outputs alike, each from its own inputs."""
    labels: Labels = {}
    return _labelled(program, labels, *one) == _labelled(program, labels, *two)


def _vary_apart(first: list[Node], second: list[Node], shapes: list[dict[int, Any]]) -> bool:
    """Return whether each call's dynamic sizes are still dynamic, and independent of the other call's."""
    sides = [_symbols(side, shapes) for side in (first, second)]
    return all(map(all, sides)) and not set().union(*sides[0]) & set().union(*sides[1])


def _symbols(inputs: list[Node], shapes: list[dict[int, Any]]) -> list[set[Any]]:
    """Return the symbols of each dynamic size; empty for one that has become fixed."""
    sizes: list[Any] = [
        node.meta["val"].shape[axis] for node, axes in zip(inputs, shapes, strict=True) for axis in axes
    ]
    return [set() if isinstance(size, int) else size.node.expr.free_symbols for size in sizes]


def _random_operators(outputs: list[Any]) -> set[Node]:
    return set(filter(is_random, all_inputs(item for item in outputs if isinstance(item, Node))))


def _labelled(program: ExportedProgram, labels: Labels, inputs: list[Node], outputs: list[Any]) -> list[Any]:
    """Return a label for each output, the same for the same computation from `inputs`, weights and constants."""
    sources: dict[Node, Any] = {}
    for node, spec in graph_inputs(program):
        constant = program.constants.get(str(spec.target))
        sources[node] = (spec.kind.name, str(spec.target or spec.arg.name))
        if isinstance(constant, torch.Tensor) and not is_fake(constant):
            sources[node] = (str(constant.dtype), tuple(constant.shape), repr(constant.tolist()))
    sources |= {node: ("own input", index) for index, node in enumerate(inputs)}
    node_labels = _labels(program.graph_module, labels, sources)
    return [node_labels[item] if isinstance(item, Node) else repr(item) for item in outputs]


def _labels(module: GraphModule, labels: Labels, sources: Mapping[Node, Any]) -> dict[Node, int]:
    numbers: dict[Node, int] = {}
    for node in module.graph.nodes:
        source = node.args[_SAME[node.target]] if node.target in _SAME else None
        if isinstance(source, Node) and _type(source) == _type(node):
            numbers[node] = numbers[source]
        else:
            numbers[node] = labels.setdefault(_meaning(module, node, labels, sources, numbers), len(labels))
    return numbers


def _type(node: Node) -> Any:
    value = node.meta["val"]
    return value.dtype, tuple(map(str, value.shape))


def _meaning(
    module: GraphModule, node: Node, labels: Labels, sources: Mapping[Node, Any], numbers: Mapping[Node, int]
) -> Any:
    if node in sources:
        return sources[node]
    if node.op == "get_attr":
        region = getattr(module, str(node.target))
        assert isinstance(region, GraphModule)
        placeholders = region.graph.find_nodes(op="placeholder")
        inner = _labels(region, labels, {item: ("placeholder", index) for index, item in enumerate(placeholders)})
        return ("region", inner[region.graph.output_node()])
    args = map_arg((node.args, node.kwargs), lambda item: f"%{numbers[item]}")
    target = node.target if isinstance(node.target, str) else f"{node.target!s} {getattr(node.target, '__name__', '')}"
    return (node.op, target, repr(args))
