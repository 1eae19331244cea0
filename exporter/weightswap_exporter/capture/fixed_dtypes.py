"""Writing of dtypes into a graph that its operators would take from `torch.get_default_dtype()`.

The default belongs to the whole process. In a server, another thread may change it in the middle of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from weightswap_runtime.engines.graphs.effects import is_composed
from weightswap_runtime.engines.graphs.operators import OF_TORCH

from .inlining import Bodies, inline
from .programs import graphs
from .views import arguments, nodes, opname

_INTEGER, _FLOAT, _COMPLEX = range(3)  # kinds of values; each promotes those before it
_COMPARISONS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isin"),
    *("not_equal", "less", "less_equal", "greater", "greater_equal"),
}
_PROMOTING = {"where", "logsumexp", "floor_divide", "isin"}  # as operators with the tag `pointwise` do
_SECRETLY = {"isclose"}  # casts integers to the default dtype inside


def fix_dtypes(program: ExportedProgram) -> None:
    """Make a program independent of the default dtype: what that is now becomes a part of the program."""
    bodies: Bodies = {}
    for module in graphs(program):
        _fix(module.graph, bodies)
        module.recompile()


def _fix(graph: Graph, bodies: Bodies) -> None:
    unseen = list(reversed(graph.nodes))
    while unseen:
        node = unseen.pop()
        target: Any = node.target
        if not isinstance(target, OpOverload) or target.namespace not in OF_TORCH:
            continue
        dtype = _default_taken(node)
        if dtype is None:
            continue
        if any(argument.name == "dtype" for argument in target._schema.arguments):
            node.kwargs = {**node.kwargs, "dtype": dtype}
        elif is_composed(target):
            unseen += reversed(inline(node, bodies))
        elif torch.Tag.pointwise in target.tags or opname(node) in _PROMOTING:
            _cast_arguments(node, dtype)


def _default_taken(node: Node) -> torch.dtype | None:
    """Return the dtype in which an operator computes, if neither its tensors nor its argument `dtype` determine it."""
    if any(argument.name == "dtype" and value is not None for argument, value in arguments(node)):
        return None
    given = pytree.tree_leaves((node.args, node.kwargs))
    values = [item.meta["val"] if isinstance(item, Node) else item for item in given]
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    results = [value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    computed = values if opname(node) in _COMPARISONS else results
    kind = _FLOAT if opname(node) in _SECRETLY else max(map(_kind, computed), default=_INTEGER)
    if kind == _INTEGER or kind <= max(map(_kind, tensors), default=_INTEGER):
        return None
    default = torch.get_default_dtype() if kind == _FLOAT else torch.get_default_dtype().to_complex()
    return next((result.dtype for result in results if _kind(result) == kind), default)


def _kind(value: Any) -> int:
    if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
        return _COMPLEX
    if isinstance(value, float | torch.SymFloat) or (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return _FLOAT
    return _INTEGER


def _cast_arguments(node: Node, dtype: torch.dtype) -> None:
    """Cast the tensors that the operator would cast to the default dtype."""
    for argument, value in list(arguments(node)):
        for item in nodes(value):
            tensor = item.meta["val"]
            if argument.name == "condition" or not isinstance(tensor, torch.Tensor) or tensor.dtype == dtype:
                continue
            with node.graph.inserting_before(node):
                cast = node.graph.call_function(torch.ops.aten.to.dtype, (item, dtype))
            cast.meta["val"] = _cast_value(tensor, dtype)
            cast.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
            node.replace_input_with(item, cast)


def _cast_value(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not torch._C._functorch.is_batchedtensor(tensor):
        return tensor.to(dtype)
    # the level of vmap that it belongs to has ended
    return torch._C._functorch.get_unwrapped(tensor).new_empty(tensor.shape, dtype=dtype)
