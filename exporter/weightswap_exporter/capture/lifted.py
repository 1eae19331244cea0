"""Constants that torch lifts out of a call, and that are none: tables of which each is a weight, and scratch memory.

fbgemm keeps quantised tables in one piece of memory, with gaps between them, and registers views of it as buffers. Its
operator takes the whole: the graph puts it together from the weights, once for each set of them (the prologue).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from weightswap_exporter.modules.tensors import is_fake

from .programs import arguments, graph_inputs

_aten = torch.ops.aten
# arguments that count what was wrong with inputs; nothing that is returned depends on them
_SCRATCH = {("fbgemm::bounds_check_indices", "warning")}


def settle_constants(program: ExportedProgram) -> None:
    """Give each call scratch memory of its own, and compute constants that are made of weights from these."""
    constants = {
        node: str(spec.target) for node, spec in graph_inputs(program) if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node, name in constants.items():
        for user in [user for user in node.users if _is_scratch(user, node)]:
            with program.graph.inserting_before(user):
                # a counter beyond its first warning, which eager prints once: not once for each call
                shape, dtype = list(node.meta["val"].shape), node.meta["val"].dtype
                user.replace_input_with(node, _call(program, _aten.ones.default, shape, **_plain_memory(dtype)))
        if parts := _parts(program, program.constants[name]):
            first_call = next(node for node in program.graph.nodes if node.op != "placeholder")
            with program.graph.inserting_before(first_call):
                node.replace_all_uses_with(_joined(program, parts))
        if not node.users:
            _remove(program, node, name)
    program.graph_module.recompile()


def _is_scratch(user: Node, node: Node) -> bool:
    return user.op == "call_function" and any(
        value is node and (user.target.name(), argument.name) in _SCRATCH  # type: ignore[union-attr]
        for argument, value in (arguments(user) if isinstance(user.target, torch._ops.OpOverload) else ())
    )


def _parts(program: ExportedProgram, value: Any) -> list[Node | int]:
    """Return the weights that a constant's memory consists of, in order, and the numbers of zeros between them.

    Empty if it is made of no weights, or if there is more in it: what is in a weight's memory is refused later.
    """
    if not isinstance(value, torch.Tensor) or is_fake(value) or value.dim() != 1 or not value.is_contiguous():
        return []
    parts: list[Node | int] = []
    end = 0
    for begin, node, size in sorted(_within(program, value), key=lambda part: part[0]):
        if begin < end:  # tables that overlap
            return []
        parts += [begin - end, node] if begin > end else [node]
        if value[end:begin].any():
            return []
        end = begin + size
    whole = len(parts) == 1 and isinstance(parts[0], Node) and parts[0].meta["val"].shape == value.shape
    if not parts or whole or value[end:].any():  # a weight itself, as lists hold them, is found by `classify`
        return []
    return [*parts, len(value) - end] if end < len(value) else parts


def _within(program: ExportedProgram, value: torch.Tensor) -> Iterator[tuple[int, Node, int]]:
    """Yield the weights that lie in a vector's memory: place, node and number of elements."""
    seen: set[int] = set()
    for node, spec in graph_inputs(program):
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            continue
        weight = program.state_dict.get(str(spec.target), program.constants.get(str(spec.target)))
        if (
            isinstance(weight, torch.Tensor)
            and weight.numel()
            and weight.dtype == value.dtype
            and weight.is_contiguous()
            and weight.untyped_storage()._cdata == value.untyped_storage()._cdata
        ):
            begin = int(weight.storage_offset()) - int(value.storage_offset())
            if begin >= 0 and begin + weight.numel() <= len(value) and begin not in seen:
                seen.add(begin)
                yield begin, node, weight.numel()


def _joined(program: ExportedProgram, parts: list[Node | int]) -> Node:
    """Add nodes that put weights and zeros together. One weight alone is viewed, and not copied."""
    nodes: list[Node] = []
    (dtype,) = {part.meta["val"].dtype for part in parts if isinstance(part, Node)}
    for part in parts:
        if isinstance(part, Node):
            nodes.append(_call(program, _aten.view.default, part, [-1]))
        else:
            nodes.append(_call(program, _aten.zeros.default, [part], **_plain_memory(dtype)))
    return nodes[0] if len(nodes) == 1 else _call(program, _aten.cat.default, nodes)


def _plain_memory(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}


def _remove(program: ExportedProgram, node: Node, name: str) -> None:
    program.graph.erase_node(node)
    signature = program.graph_signature
    signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name != node.name]
    del program.constants[name]


def _call(program: ExportedProgram, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call of an operator, with the fake result that nodes of a capture have."""
    node: Node = program.graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
    with detect_fake_mode([value.meta["val"] for value, _ in graph_inputs(program)]) or nullcontext():
        node.meta["val"] = target(*values[0], **values[1])
    return node
