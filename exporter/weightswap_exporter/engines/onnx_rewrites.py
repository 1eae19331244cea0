"""Rewrites of operators that torch does not translate to ONNX, or translates wrongly."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

_QKV = 3
_RUNNING, _TRAINING = 3, 5
_ROUNDED = {"aten::div", "aten::div_", "aten::fmod", "aten::fmod_"}


def adapt(program: ExportedProgram) -> None:
    """Rewrite a program so that its translation computes the same."""
    _drop_literals(program)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                _adapt(module.graph, node)


def _adapt(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if node.target is torch.ops.aten.view.default:
        # decomposed attention may have other strides than views were captured for; ONNX has none
        node.target = torch.ops.aten.reshape.default
    elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
        _plain_attention(graph, node)
    elif node.target is torch.ops.aten.embedding.default:
        _refuse_negative_rows(graph, node)
    elif _is_training_norm(node):
        _decompose_norm(graph, node)
    elif node.target is operator.floordiv:
        _exact_division(graph, node)
    elif _rounds_integers(node):
        _exact_integers(graph, node)


def _plain_attention(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose attention if it has a mask or not four dimensions.

    torch's translation takes four dimensions only, and gives NaN for a row that is wholly masked; eager gives zeros.
    """
    mask = node.args[_QKV] if len(node.args) > _QKV else node.kwargs.get("attn_mask")
    if node.meta["val"].ndim == 4 and mask is None:
        return
    if isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype is torch.bool:
        node.replace_input_with(mask, _additive_mask(graph, node, mask))
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    node.target = torch.ops.aten._scaled_dot_product_attention_math.default
    node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _additive_mask(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node) -> torch.fx.Node:
    """Convert a boolean mask to numbers that are added to the scores."""
    aten = torch.ops.aten
    with graph.inserting_before(node):
        hidden = graph.call_function(aten.logical_not.default, (mask,))
        zeros = graph.call_function(aten.zeros_like.default, (mask,), {"dtype": node.meta["val"].dtype})
        return graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, -math.inf))


def _refuse_negative_rows(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Map negative rows, which ONNX counts from the end, to one past the end, which is refused as in eager."""
    table, rows = node.args[:2]
    assert isinstance(table, torch.fx.Node)
    with graph.inserting_before(node):
        below = graph.call_function(torch.ops.aten.lt.Scalar, (rows, 0))
        beyond = (rows, below, table.meta["val"].shape[0])
        checked = graph.call_function(torch.ops.aten.masked_fill.Scalar, beyond)
    node.args = (table, checked, *node.args[2:])


def _is_training_norm(node: torch.fx.Node) -> bool:
    """Return whether the node is a norm in training mode, which torch mistranslates or strips of its statistics."""
    aten = torch.ops.aten
    if node.target is aten.instance_norm.default and node.args[_RUNNING] is None:
        return False
    return node.target in (aten.batch_norm.default, aten.instance_norm.default) and bool(node.args[_TRAINING])


def _decompose_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose a norm by the statistics of the batch or of each instance, and update the running statistics."""
    aten = torch.ops.aten
    source, weight, bias, running_mean, running_var, _, momentum, eps, _ = node.args
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)  # the dtype in which eager sums
    reduced = [*([0] if node.target is aten.batch_norm.default else []), *range(2, value.ndim)]
    column = [-1, *[1] * (value.ndim - 2)]

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return graph.call_function(target, args, kwargs)

    with graph.inserting_before(node):
        x = call(aten.to.dtype, source, dtype)
        mean = call(aten.mean.dim, x, reduced, True)
        centred = call(aten.sub.Tensor, x, mean)
        var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), reduced, True)
        result = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, var, eps)))
        for operation, affine in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if affine is not None:
                result = call(operation, result, call(aten.reshape.default, affine, column))
        result = call(aten.to.dtype, result, value.dtype)
        unbiased = call(aten.var.correction, x, reduced, correction=1, keepdim=True)
        for running, statistic in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                new = call(aten.reshape.default, call(aten.mean.dim, statistic, [0]), [-1])
                step = call(aten.mul.Tensor, call(aten.sub.Tensor, new, running), momentum)
                call(aten.copy_.default, running, call(aten.add.Tensor, running, step))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _exact_division(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Subtract the remainder before a floor division, as ONNX does not round negative quotients down."""
    dividend, divisor = node.args
    with graph.inserting_before(node):
        remainder = graph.call_function(operator.mod, (dividend, divisor))
        node.args = (graph.call_function(operator.sub, (dividend, remainder)), divisor)


def _rounds_integers(node: torch.fx.Node) -> bool:
    """Return whether the node rounds a quotient of integers or is their `fmod`, which torch translates with floats."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _ROUNDED:
        return False
    rounds = "fmod" in node.target._schema.name or node.kwargs.get("rounding_mode")
    dtype = node.meta["val"].dtype
    return bool(rounds) and dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _exact_integers(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with floor division and remainder, whose translations compute with integers.

    The rewrite uses int64, as ONNX Runtime lacks some of these operators for narrower integers.
    """
    aten = torch.ops.aten
    assert isinstance(node.target, torch._ops.OpOverload)
    with graph.inserting_before(node):
        dividend, divisor = (_int64(graph, value) for value in node.args[:2])
        result = _rounded(graph, dividend, divisor, node.kwargs.get("rounding_mode"))
        result = graph.call_function(aten.to.dtype, (result, node.meta["val"].dtype))
    if node.target._schema.is_mutable:
        node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], result), {}
    else:
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _rounded(graph: torch.fx.Graph, dividend: torch.fx.Node, divisor: torch.fx.Node, mode: object) -> torch.fx.Node:
    aten = torch.ops.aten
    if mode == "floor":
        return graph.call_function(aten.floor_divide.default, (dividend, divisor))
    remainder = graph.call_function(aten.remainder.Tensor, (dividend, divisor))
    negative = tuple(graph.call_function(aten.lt.Scalar, (value, 0)) for value in (dividend, divisor))
    signs_differ = graph.call_function(aten.logical_xor.default, negative)
    inexact = graph.call_function(aten.ne.Scalar, (remainder, 0))
    away = graph.call_function(aten.logical_and.default, (signs_differ, inexact))  # rounding down is away from zero
    if mode == "trunc":
        floor = graph.call_function(aten.floor_divide.default, (dividend, divisor))
        return graph.call_function(aten.add.Tensor, (floor, _int64(graph, away)))
    fmod = graph.call_function(aten.sub.Tensor, (remainder, divisor))
    return graph.call_function(aten.where.self, (away, fmod, remainder))


def _int64(graph: torch.fx.Graph, value: Any) -> torch.fx.Node:
    """Return a tensor or number of a graph as an int64 tensor."""
    if isinstance(value, torch.fx.Node) and not isinstance(value.meta.get("val"), int | torch.SymInt):
        return graph.call_function(torch.ops.aten.to.dtype, (value, torch.int64))
    return graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"dtype": torch.int64})


def _drop_literals(program: ExportedProgram) -> None:
    """Replace literal outputs with None: the signature has their values."""
    (last,) = program.graph.find_nodes(op="output")
    last.args = (tuple(item if isinstance(item, torch.fx.Node) else None for item in last.args[0]),)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument):
            spec.arg = ConstantArgument(spec.arg.name, None)
