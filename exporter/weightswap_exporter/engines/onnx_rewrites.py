"""What torch does not translate to ONNX, or translates to something else, said in another way first."""

from __future__ import annotations

import math
import operator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

_QKV = 3


def adapt(program: ExportedProgram) -> None:
    """Change a program so that its translation computes the same."""
    _drop_literals(program)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten.view.default:
                    # decomposed attention may have other strides than views were captured for; ONNX has none
                    node.target = torch.ops.aten.reshape.default
                elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
                    _plain_attention(module.graph, node)
                elif node.target is torch.ops.aten.embedding.default:
                    _refuse_negative_rows(module.graph, node)
                elif node.target is operator.floordiv:
                    _exact_division(module.graph, node)


def _plain_attention(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Attention in single steps where a row may be masked as a whole, or heads have no dimension of their own.

    torch's translation takes four dimensions, and gives NaN for such a row; eager gives zeros.
    """
    mask = node.args[_QKV] if len(node.args) > _QKV else node.kwargs.get("attn_mask")
    if node.meta["val"].ndim == 4 and mask is None:
        return
    if isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype is torch.bool:
        node.replace_input_with(mask, _as_numbers(graph, node, mask))
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    node.target = torch.ops.aten._scaled_dot_product_attention_math.default
    node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _as_numbers(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node) -> torch.fx.Node:
    """A mask as what is added to the scores."""
    aten = torch.ops.aten
    with graph.inserting_before(node):
        hidden = graph.call_function(aten.logical_not.default, (mask,))
        zeros = graph.call_function(aten.zeros_like.default, (mask,), {"dtype": node.meta["val"].dtype})
        return graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, -math.inf))


def _refuse_negative_rows(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """ONNX counts negative rows from the end; a table's lookup refuses them, as it does those beyond its end."""
    table, places = node.args[:2]
    assert isinstance(table, torch.fx.Node)
    with graph.inserting_before(node):
        below = graph.call_function(torch.ops.aten.lt.Scalar, (places, 0))
        beyond = (places, below, table.meta["val"].shape[0])
        checked = graph.call_function(torch.ops.aten.masked_fill.Scalar, beyond)
    node.args = (table, checked, *node.args[2:])


def _exact_division(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rounding down, which ONNX does not do for negative numbers, without anything to round."""
    above, below = node.args
    with graph.inserting_before(node):
        rest = graph.call_function(operator.mod, (above, below))
        node.args = (graph.call_function(operator.sub, (above, rest)), below)


def _drop_literals(program: ExportedProgram) -> None:
    """Outputs that are fixed: the signature has their values."""
    (last,) = program.graph.find_nodes(op="output")
    last.args = (tuple(item if isinstance(item, torch.fx.Node) else None for item in last.args[0]),)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument):
            spec.arg = ConstantArgument(spec.arg.name, None)
