"""Divisions of floats that are rounded down, as eager computes them, for engines whose own lose digits."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node


def is_remainder_of_fractions(node: Node) -> bool:
    """Return whether the node is `a % b` of floats, which torch translates with a quotient that loses digits."""
    names = ("aten::remainder", "aten::remainder_")
    is_remainder = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in names
    return is_remainder and node.meta["val"].dtype.is_floating_point


def exact_remainder(graph: Graph, node: Node) -> None:
    """Rewrite the node with `fmod`, whose sign is the dividend's, as eager computes it."""
    aten = torch.ops.aten
    with graph.inserting_before(node):
        _, divisor, fmod, away = _divided(graph, node)
        result = graph.call_function(
            aten.where.self, (away, graph.call_function(aten.add.Tensor, (fmod, divisor)), fmod)
        )
        result = graph.call_function(aten.to.dtype, (result, node.meta["val"].dtype))
    replace(graph, node, result)


def is_floor_of_fractions(node: Node) -> bool:
    """Return whether the node is `a // b` of floats, which torch translates by rounding a quotient that is rounded."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.removesuffix("_")
    floors = name == "aten::floor_divide" or (name == "aten::div" and node.kwargs.get("rounding_mode") == "floor")
    return bool(floors and node.meta["val"].dtype.is_floating_point)


def exact_floor(graph: Graph, node: Node) -> None:
    """Rewrite the node as eager computes it: ATen's `div_floor_floating`, which rounds what the remainder leaves."""
    aten, call, dtype = torch.ops.aten, graph.call_function, node.meta["val"].dtype
    with graph.inserting_before(node):
        dividend, divisor, fmod, away = _divided(graph, node)
        quotient = call(aten.div.Tensor, (call(aten.sub.Tensor, (dividend, fmod)), divisor))
        lower = call(aten.where.self, (away, call(aten.sub.Scalar, (quotient, 1.0)), quotient))
        floor = call(aten.floor.default, (lower,))
        above = call(aten.gt.Scalar, (call(aten.sub.Tensor, (lower, floor)), 0.5))
        nearest = call(aten.where.self, (above, call(aten.add.Scalar, (floor, 1.0)), floor))
        by_zero = call(aten.eq.Scalar, (divisor, 0))
        result = call(aten.where.self, (by_zero, call(aten.div.Tensor, (dividend, divisor)), nearest))
        result = call(aten.to.dtype, (result, dtype))
    replace(graph, node, result)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _divided(graph: Graph, node: Node) -> tuple[Node, Node, Node, Node]:
    """Return dividend, divisor, their `fmod`, and whether the quotient, rounded to zero, is above the one rounded down,
    all in the precision in which eager divides."""
    aten = torch.ops.aten
    dtype = node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    (shaped, *_) = filter(_is_tensor, node.args[:2])

    def operand(value: Any) -> Node:
        if not isinstance(value, Node):  # rounded here, as a compiler may leave out a cast between two dtypes
            number = torch.tensor(value, dtype=dtype).item()
            return graph.call_function(aten.full_like.default, (shaped, number), {"dtype": wide})
        if not _is_tensor(value):  # a size
            value = graph.call_function(aten.full_like.default, (shaped, value), {"dtype": dtype})
        return graph.call_function(aten.to.dtype, (graph.call_function(aten.to.dtype, (value, dtype)), wide))

    dividend, divisor = map(operand, node.args[:2])
    fmod = graph.call_function(aten.fmod.Tensor, (dividend, divisor))
    negative = tuple(graph.call_function(aten.lt.Scalar, (value, 0)) for value in (fmod, divisor))
    signs_differ = graph.call_function(aten.logical_xor.default, negative)
    inexact = graph.call_function(aten.ne.Scalar, (fmod, 0))
    return dividend, divisor, fmod, graph.call_function(aten.logical_and.default, (signs_differ, inexact))


def replace(graph: Graph, node: Node, result: Node) -> None:
    """Let the result stand for an operator's, or be written to what it changes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target._schema.is_mutable:
        node.target, node.args, node.kwargs = torch.ops.aten.copy_.default, (node.args[0], result), {}
    else:
        result.meta = dict(node.meta)  # at which rewrites of what follows look
        node.replace_all_uses_with(result)
        graph.erase_node(node)
