"""Pools to a given size whose inputs have dynamic sizes: torch translates them to ONNX for the sample's sizes alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_aten = torch.ops.aten
_AVERAGES = frozenset(
    {
        *(_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default, _aten.adaptive_avg_pool3d.default),
        *(_aten._adaptive_avg_pool2d.default, _aten._adaptive_avg_pool3d.default),
    }
)
_MAXIMA = frozenset(
    {_aten.adaptive_max_pool1d.default, _aten.adaptive_max_pool2d.default, _aten.adaptive_max_pool3d.default}
)


def is_dynamic_pool(node: Node) -> bool:
    """Return whether the node pools a dynamic size to another one than 1, which needs no windows."""
    return node.target in _AVERAGES | _MAXIMA and any(
        not isinstance(before, int) and not _is_one(after) for before, after in _sizes(node)
    )


def uses_places(node: Node) -> bool:
    """Return whether the node pools a dynamic size, and a graph uses the places of the maxima."""
    return node.target in _MAXIMA and is_dynamic_pool(node) and any(user.users for user in node.users if user.args[1])


def exact_pool(graph: Graph, node: Node) -> None:
    """Rewrite the node with windows that are computed from the sizes of each call, as eager computes them.

    Places of maxima are not used.
    """
    with graph.inserting_before(node):
        result = _pooled(graph, node)
    of_maxima = list(node.users) if node.target in _MAXIMA else []
    for each in [user for user in of_maxima if user.args[1] == 0] or [node]:
        result.meta = dict(each.meta)  # at which rewrites of what follows look
        each.replace_all_uses_with(result)
    for each in (*of_maxima, node):
        graph.erase_node(each)


def _pooled(graph: Graph, node: Node) -> Node:
    sizes, is_average = _sizes(node), node.target in _AVERAGES
    value = _argument(node).meta["val"]
    wide = torch.promote_types(value.dtype, torch.float32)  # in which eager adds
    result = graph.call_function(_aten.to.dtype, (node.args[0], wide))
    reduce = _aten.mean.dim if is_average else _aten.amax.default
    for axis, (before, after) in enumerate(sizes, value.ndim - len(sizes)):
        if _is_one(after):
            result = graph.call_function(reduce, (result, [axis], True))
        elif not statically_known_true(before == _value(after)):
            result = _windows(graph, result, axis, after, value.ndim - axis - 1, is_average=is_average)
    return graph.call_function(_aten.to.dtype, (result, value.dtype))


def _windows(graph: Graph, values: Node, axis: int, after: Any, behind: int, *, is_average: bool) -> Node:
    """Pool along one axis, which others may be behind. Window i begins at i * before // after, and ends where the next
    one begins, or one element later if the sizes do not divide."""

    def call(target: Any, *args: Any) -> Node:
        return graph.call_function(target, args)

    before = call(_aten.sym_size.int, values, axis)
    count, length = (call(_aten.scalar_tensor.default, size) for size in (after, before))
    count, length = (call(_aten.to.dtype, size, torch.int64) for size in (count, length))
    most = call(operator.add, call(operator.floordiv, before, after), 2)  # elements of a window
    numbers = call(_aten.arange.default, after)
    begins = call(_aten.floor_divide.default, call(_aten.mul.Tensor, numbers, length), count)
    last = call(_aten.sub.Scalar, call(_aten.mul.Tensor, call(_aten.add.Scalar, numbers, 1), length), 1)
    ends = call(_aten.floor_divide.default, last, count)  # the last elements
    places = call(_aten.add.Tensor, call(_aten.unsqueeze.default, begins, 1), call(_aten.arange.default, most))
    ends_of = call(_aten.unsqueeze.default, ends, 1)
    within = call(_aten.reshape.default, call(_aten.minimum.default, places, ends_of), [-1])
    chosen = call(_aten.unflatten.int, call(_aten.index_select.default, values, axis, within), axis, [after, most])
    if not is_average:
        return call(_aten.amax.default, chosen, [axis + 1])
    beyond = call(_aten.gt.Tensor, places, ends_of)
    widths = call(_aten.add.Scalar, call(_aten.sub.Tensor, ends, begins), 1)
    for _ in range(behind):
        beyond, widths = (call(_aten.unsqueeze.default, each, -1) for each in (beyond, widths))
    total = call(_aten.sum.dim_IntList, call(_aten.masked_fill.Scalar, chosen, beyond, 0.0), [axis + 1])
    return call(_aten.div.Tensor, total, widths)


def _sizes(node: Node) -> list[tuple[Any, Any]]:
    """Return the sizes that are pooled, each with the size after it, which may be a node."""
    after: Any = node.args[1]
    assert isinstance(after, Sequence)
    return list(zip(_argument(node).meta["val"].shape[-len(after) :], after, strict=True))


def _argument(node: Node) -> Node:
    values = node.args[0]
    assert isinstance(values, Node)
    return values


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, Node) else size
