"""What a call does beside returning its outputs: the graph has it, no later call reads it, or it is refused.

A graph has outputs, and new values of the buffers that a call writes to: the state. On a server nothing else of a call
reaches the next one. So a call that assigns another tensor to a buffer is turned into one that writes to the buffer. A
value that it leaves in a plain attribute is let through only if a second call, captured in one program with the first,
computes the same without it. Random numbers must come from torch's own state, which a server has, too.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Literal, NamedTuple
from unittest import mock

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

from weightswap_exporter.modules.stand_ins import attributes_of, restored, within
from weightswap_exporter.modules.tensors import ModelView, is_fake
from weightswap_runtime.errors import CaptureError, listed

from .programs import all_inputs, functionalised, graph_inputs, is_random, memory

INSTEAD = (
    "draw the numbers once, before the export, and keep them in a persistent buffer, so that checkpoints have them"
)
_SAME = {  # operators whose result has the same values as the argument at this index
    torch.ops.aten.clone.default: 0,
    torch.ops.aten.alias.default: 0,
    torch.ops.aten.detach.default: 0,
    torch.ops.aten.copy.default: 1,
}
_Tensors = Mapping[str, tuple[torch.Tensor, set[int]]]  # tensors by FQN, with their storages
_Labels = dict[Any, int]  # numbers of computations, by what they are
_Axes = dict[int, Any]  # dynamic dimensions of a tensor
_Compared = Literal["same", "different", "unknown"]  # what two calls compute, each from its own inputs


@contextmanager
def no_seeding() -> Iterator[None]:
    """Raise CaptureError if the block calls `torch.manual_seed` in this thread."""
    thread, seed = get_ident(), torch.manual_seed

    def refuse(value: Any) -> torch.Generator:
        if get_ident() != thread:
            return seed(value)
        raise CaptureError(f"a call seeds torch's random numbers, which a graph cannot do: {INSTEAD}")

    with mock.patch.object(torch, "manual_seed", refuse), mock.patch.object(torch.random, "manual_seed", refuse):
        yield


def check_no_generator(program: ExportedProgram) -> None:
    """Raise CaptureError for a generator: each call of a graph would continue its sequence of numbers."""
    if any(isinstance(value, torch.Generator) for value in program.constants.values()):
        raise CaptureError(f"a call draws random numbers from a torch.Generator, which a graph cannot seed: {INSTEAD}")


@contextmanager
def replaced_tensors(root: nn.Module) -> Iterator[set[str]]:
    """Give a set that, when the block ends, has the FQNs whose tensor or memory a call of `root` has replaced.

    torch sees which tensors a call assigns to buffers of the root alone. So the end of the call itself writes the
    values into the buffers of submodules, which torch captures. It raises CaptureError for a tensor of another type,
    and if the call changes which buffers share memory.
    """
    names: set[str] = set()
    stack: list[_Tensors] = []  # a method may call its own module

    def begin(module: nn.Module, _: Any) -> None:
        if module is root:
            stack.append(_tensors(root))

    def end(module: nn.Module, _: Any, output: Any) -> Any:
        if module is not root:
            return None
        before = stack.pop()
        return None if stack else _copy_back(root, before, output, names)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end):
        yield names


def check_seen(replaced: Collection[str], mutated: Collection[str]) -> None:
    """Raise CaptureError for replaced tensors whose change the program does not have: `mutated` are those it has."""
    if unseen := sorted(set(replaced) - set(mutated)):
        raise CaptureError(
            f"a call replaces {listed(unseen)} in a way that a graph cannot express: a parameter, by .data, or in "
            "_buffers. A weight stays as it is: compute a new tensor in the call. What calls remember is assigned to a "
            "buffer's attribute, or changed in place"
        )


def _tensors(root: nn.Module) -> _Tensors:
    return {name: (tensor, memory(tensor)) for name, tensor in ModelView(root).whole.items()}


def _copy_back(root: nn.Module, before: _Tensors, output: Any, names: set[str]) -> Any:
    """Return the call's output without views of buffers that are overwritten; None leaves the output as it is."""
    present = _tensors(root)
    now = {name: present[name] for name in before.keys() & present.keys()}
    names |= {name for name, pair in now.items() if pair[0] is not before[name][0] or pair[1] != before[name][1]}
    assigned = sorted(name for name in names & now.keys() if now[name][0] is not before[name][0])
    if not assigned:
        return None
    _check_assigned(assigned, before, now)
    old = set[int]().union(*(before[name][1] for name in assigned))
    # a call that returns the old value returns its memory, which is about to have the new value
    output = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.clone() if memory(leaf) & old else leaf, output)
    deep = {id(before[name][0]): name for name in assigned if "." in name}.values()  # tied buffers once
    # torch copies into the root's buffers in turn: a copy may read a buffer that an earlier one has overwritten
    own = [name for name in assigned if "." not in name and now[name][1] & old]
    values = {name: now[name][0].detach() for name in (*deep, *own)}
    # all clones before the first copy, for the same reason
    values = {name: value.clone() if now[name][1] & old else value for name, value in values.items()}
    for name, value in values.items():
        if "." in name:
            before[name][0].copy_(value)
        else:
            setattr(root, name, value)
    return output


def _check_assigned(assigned: list[str], before: _Tensors, now: _Tensors) -> None:
    if retyped := [name for name in assigned if _type(before[name][0]) != _type(now[name][0])]:
        raise CaptureError(
            f"a call replaces {listed(retyped)} with a tensor of another dtype or shape, but a graph's state keeps "
            "both: assign a tensor like the old one, or write to a part of it"
        )
    names = [name for name in before if name in now]
    if changed := [name for name in assigned if _sharing(name, names, before) != _sharing(name, names, now)]:
        raise CaptureError(
            f"a call changes which tensors share memory with {listed(changed)}, which a graph cannot do; assign a "
            ".clone(), or change the tensor in place"
        )


def _sharing(name: str, names: list[str], tensors: _Tensors) -> list[str]:
    return [other for other in names if tensors[other][1] & tensors[name][1]]


def _type(tensor: torch.Tensor) -> Any:
    return tensor.dtype, [str(size) for size in tensor.shape], tensor.device


class SideEffects(NamedTuple):
    """Attributes that a call changes, by path."""

    tensors: list[str]  # those in which it has left tensors
    numbers: list[str]  # those whose number or text it has changed


@contextmanager
def side_effects_of_calls(root: nn.Module) -> Iterator[SideEffects]:
    """Yield what, when the block ends, names the attributes in which a call of `root` has left values.

    The block's end resets all attributes. torch's own check does not look into tuples.
    """
    side_effects = SideEffects([], [])
    tensors: dict[str, None] = {}
    numbers: dict[str, None] = {}
    before: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []  # of the outermost call: calls may be nested

    def snapshot() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        values = {path: value for path, value in _plain_attributes(root) if type(value) in (bool, int, float, str)}
        return _plain_tensors(root), values

    def begin(module: nn.Module, _: Any) -> None:
        if module is root and not before:
            before.append(snapshot())

    def end(module: nn.Module, _: Any, __: Any) -> None:
        if module is root:
            (tensors_before, values_before), (tensors_now, values_now) = before[0], snapshot()
            tensors.update({path: None for path, value in tensors_now.items() if tensors_before.get(path) is not value})
            numbers.update(
                {path: None for path, value in values_now.items() if values_before.get(path, value) != value}
            )

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    with hooks[0], hooks[1], restored(root), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
        yield side_effects
    reassigned = _reassigned(root)
    side_effects.tensors.extend(path for path in tensors if not reassigned.match(path))
    side_effects.numbers.extend(numbers)


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


def _plain_attributes(root: nn.Module) -> Iterator[tuple[str, Any]]:
    own = vars(nn.Module()).keys()
    for path, module in root.named_modules():
        prefix = f"self.{path}." if path else "self."
        yield from ((prefix + name, value) for name, value in vars(module).items() if name not in own)


def _plain_values(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes, and the values nested in them, by path."""
    for path, value in _plain_attributes(root):
        yield from within(path, value)


def _plain_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    return {path: value for path, value in _plain_values(root) if isinstance(value, torch.Tensor)}


def is_read_later(
    root: nn.Module, inputs: Any, program: ExportedProgram, mutated: Collection[str], side_effects: SideEffects
) -> bool:
    """Return whether a second call of `root` may depend on values that the first has left in attributes.

    inputs: args and kwargs with which `program` was captured. mutated: buffers that a call changes; as state, they are
    inputs of each call. Of calls that cannot be compared, the second is taken to read tensors, but no numbers: many
    modules count their calls, and never read the number.
    """
    flat, spec = pytree.tree_flatten(inputs)
    twice = _Twice(root, flat, spec, mutated)
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    axes = _dynamic(program)
    tensors += [owner._buffers[name].detach().clone() for owner, name in twice.state()]
    axes += [{}] * (len(tensors) - len(axes))
    with restored(root), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the capture of one call has shown the same warnings
        try:
            both = torch.export.export(
                twice, (tensors, [value.clone() for value in tensors]), dynamic_shapes=(axes, axes), strict=False
            )
            both = functionalised(both)
        except Exception:  # calls that differ, such as in a size, cannot be captured in one program
            compared: _Compared = "unknown"
        else:
            compared = _compare_calls(both, axes, mutated)
    if side_effects.tensors:
        return False in twice.settled or compared != "same"
    return compared == "different"


class _Twice(nn.Module):
    """Module that calls another one twice.

    If outputs and side effects depend on a call's own inputs alone, they do so in every later call: the second stands
    for all that follow.
    """

    def __init__(self, root: nn.Module, flat: list[Any], spec: Any, mutated: Collection[str]) -> None:
        super().__init__()
        self.root = root
        self._flat, self._spec, self._mutated = tuple(flat), spec, sorted(mutated)
        # whether the second call has left attributes of the same kinds as the first: a list may have grown, and a later
        # call read it. A set, as torch resets other attributes after the capture
        self.settled = set[bool]()

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
        # parameters in a list are no side effects, and those of a skeleton crash torch's second pass as fake constants
        found = (tensor for tensor in _plain_tensors(self.root).values() if not isinstance(tensor, nn.Parameter))
        side_effects = [tensor.clone() for tensor in found]
        return pytree.tree_leaves(output), [owner._buffers[name].clone() for owner, name in self.state()], side_effects

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


def _dynamic(program: ExportedProgram) -> list[_Axes]:
    """Return the dynamic dimensions of each input tensor. The sizes of two calls may differ."""
    values = (node.meta.get("val") for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT)
    return [
        {axis: Dim.AUTO for axis, size in enumerate(value.shape) if not isinstance(size, int)}
        for value in values
        if isinstance(value, torch.Tensor)
    ]


def _compare_calls(program: ExportedProgram, axes: list[_Axes], mutated: Collection[str]) -> _Compared:
    """Return whether both calls compute the same outputs, each from its own inputs.

    "unknown" if they cannot be compared, as one affects the other by more than attributes.
    """
    signature = program.graph_signature
    (returned,) = program.graph.output_node().args
    outputs = [
        node for node, spec in zip(returned, signature.output_specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT
    ]
    one, two = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    inputs = [node for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT]
    first, second = inputs[: len(axes)], inputs[len(axes) :]
    if {spec.kind for spec in signature.output_specs} - {OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION}:
        return "unknown"
    if not {name.removeprefix("root.") for name in signature.buffers_to_mutate.values()} <= set(mutated):
        return "unknown"
    if not _vary_apart(first, second, axes) or _random_operators(one) & _random_operators(two):
        return "unknown"
    labels: _Labels = {}
    is_same = _labelled(program, labels, first, one) == _labelled(program, labels, second, two)
    return "same" if is_same else "different"


def _vary_apart(first: list[Node], second: list[Node], axes: list[_Axes]) -> bool:
    """Return whether each call's dynamic sizes are still dynamic, and independent of the other call's."""
    sides = [_symbols(side, axes) for side in (first, second)]
    return all(map(all, sides)) and not set().union(*sides[0]) & set().union(*sides[1])


def _symbols(inputs: list[Node], axes: list[_Axes]) -> list[set[Any]]:
    """Return the symbols of each dynamic size; empty for one that has become fixed."""
    sizes: list[Any] = [node.meta["val"].shape[axis] for node, own in zip(inputs, axes, strict=True) for axis in own]
    return [set() if isinstance(size, int) else size.node.expr.free_symbols for size in sizes]


def _random_operators(outputs: list[Any]) -> set[Node]:
    """Return the operators that draw numbers for outputs: labels do not tell the draws of two calls apart."""
    return set(filter(is_random, all_inputs(item for item in outputs if isinstance(item, Node))))


def _labelled(program: ExportedProgram, labels: _Labels, inputs: list[Node], outputs: list[Any]) -> list[Any]:
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


def _labels(module: GraphModule, labels: _Labels, sources: Mapping[Node, Any]) -> dict[Node, int]:
    """Return a number for each node, the same as for an earlier node that computes the same.

    `labels` has all that have been given, by operator and numbers of the arguments: one table for both calls.
    """
    numbers: dict[Node, int] = {}
    for node in module.graph.nodes:
        source = node.args[_SAME[node.target]] if node.target in _SAME else None
        if isinstance(source, Node) and _type_of(source) == _type_of(node):
            numbers[node] = numbers[source]
        else:
            numbers[node] = labels.setdefault(_meaning(module, node, labels, sources, numbers), len(labels))
    return numbers


def _type_of(node: Node) -> Any:
    value = node.meta["val"]
    return value.dtype, tuple(map(str, value.shape))


def _meaning(
    module: GraphModule, node: Node, labels: _Labels, sources: Mapping[Node, Any], numbers: Mapping[Node, int]
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
