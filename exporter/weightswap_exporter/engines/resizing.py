"""Resizing to the nearest element, with eager's choice of the nearest for engines that round the ratio otherwise."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from weightswap_exporter.engines.divisions import replace

_OFFSETS = {"aten::upsample_nearest": 0.0, "aten::_upsample_nearest_exact": 0.5}  # of an element's centre


def _offset(node: Node) -> float | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._overloadname != "vec":
        return None
    return _OFFSETS.get(node.target._schema.name[: -len("2d")])


def is_nearest_to_size(node: Node) -> bool:
    """Return whether the node resizes to a given size, for which ONNX Runtime divides by a rounded ratio."""
    return _offset(node) is not None and node.args[1] is not None


def exact_nearest(graph: Graph, node: Node) -> None:
    """Rewrite the node with the elements that eager selects: their places are products with a float32 ratio."""
    aten, call, offset = torch.ops.aten, graph.call_function, _offset(node)
    result, sizes = node.args[:2]
    assert isinstance(result, Node)
    assert isinstance(sizes, list | tuple)
    with graph.inserting_before(node):
        for dim, size in enumerate(sizes, 2):
            old, new = (
                call(aten.scalar_tensor.default, (value,), {"dtype": torch.float32})
                for value in (call(aten.sym_size.int, (node.args[0], dim)), size)
            )
            places = call(aten.add.Scalar, (call(aten.arange.default, (size,), {"dtype": torch.float32}), offset))
            chosen = call(aten.floor.default, (call(aten.mul.Tensor, (places, call(aten.div.Tensor, (old, new)))),))
            within = call(aten.minimum.default, (chosen, call(aten.sub.Scalar, (old, 1.0))))
            result = call(aten.index_select.default, (result, dim, call(aten.to.dtype, (within, torch.int64))))
    replace(graph, node, result)
