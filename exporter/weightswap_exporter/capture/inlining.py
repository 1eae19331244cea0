"""Inlining of other packages' operators that are composed of torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from weightswap_runtime.engines.graphs.effects import is_composed
from weightswap_runtime.engines.graphs.operators import OF_TORCH
from weightswap_runtime.errors import CaptureError

from .programs import graphs

Bodies = dict[str, Graph]


def inline_operators(program: ExportedProgram) -> None:
    """Replace other packages' composed operators by torch's: a server need not have those packages."""
    bodies: Bodies = {}
    for module in graphs(program):
        for node in filter(_is_composed_operator, list(module.graph.nodes)):
            inline(node, bodies)
        module.recompile()


def _is_composed_operator(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target.namespace not in OF_TORCH and is_composed(target)


def inline(node: Node, bodies: Bodies) -> list[Node]:
    """Replace a node by its composed operator's body, and return the new nodes.

    `bodies` caches them by operator and types of its arguments.
    """
    inputs = [item for item in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(item, Node)]
    types = [_type(item.meta["val"]) for item in inputs]
    key = str((node.target, pytree.tree_map_only(Node, lambda _: Node, (node.args, node.kwargs)), types))
    body = bodies[key] = bodies.get(key) or _body(node, inputs)
    copies = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(body, copies)
    new = [copies[item] for item in body.nodes if item in copies and item.op != "placeholder"]
    for item in new:
        item.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    _replace(node, results, new)
    return new


def _type(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def _body(node: Node, inputs: list[Node]) -> Graph:
    target: Any = node.target
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))

    def run(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(item, Node) else item for item in flat], spec)
        return target.decompose(*args, **kwargs)

    body: Graph = make_fx(run)(*(item.meta["val"] for item in inputs)).graph
    body.eliminate_dead_code()  # sizes that the operator only looked at
    if body.find_nodes(op="get_attr"):
        raise CaptureError(f"{target} keeps a tensor of its own, which a graph cannot hold without its package")
    return body


def _replace(node: Node, results: Any, new: list[Node]) -> None:
    """Replace a node by the results of its body, under the same names: the program's outputs are listed by name."""
    if isinstance(results, Node):
        if results not in new:  # an argument
            with node.graph.inserting_before(node):
                results = node.graph.call_function(torch.ops.aten.alias.default, (results,))
            results.meta = dict(node.meta)
        node.replace_all_uses_with(results)
        results.name = node.name
    else:
        for user in list(node.users):  # each is a getitem
            _replace(user, results[user.args[1]], new)
    node.graph.erase_node(node)
