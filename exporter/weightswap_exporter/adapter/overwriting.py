"""Check that loading code which writes to parts of a tensor leaves nothing of its old values."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node, map_arg

from weightswap_exporter.capture.programs import all_inputs

aten = torch.ops.aten
_MOVES = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    operator.getitem,
}


def overwritten(node: Node, before: Sequence[Node]) -> bool:
    """Return whether `node` is independent of the values of the nodes in `before`.

    Only operators that move elements may be between them; then two runs with different values show it.
    """
    body = sorted(all_inputs([node]))
    dependent = set(before)
    for item in body:
        if dependent.intersection(item.all_input_nodes):
            dependent.add(item)
            if item.target not in _MOVES:
                return False
    zeros, ones = (_run(body, node, set(before), fill) for fill in (0, 1))
    return torch.equal(zeros, ones)


def _run(body: Sequence[Node], output: Node, before: set[Node], fill: int) -> torch.Tensor:
    values: dict[Node, torch.Tensor] = {}
    for node in body:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            continue
        value = node.meta["val"]
        values[node] = torch.full(value.shape, fill if node in before else 0, dtype=value.dtype)
    return values[output]
