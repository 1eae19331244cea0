"""Detection of the arguments that a node's result may be a view of, or that it may return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from weightswap_runtime.engines.graphs.effects import SECRET_VIEWS, declares_views, is_composed, is_fresh


def may_view(node: Node) -> list[Node]:
    """Return the inputs that a result may share memory with, by the operator's schema.

    Composed operators do not always declare it, so all of their inputs count.
    """
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    if declares_views(node.target):
        return [item for argument, value in arguments(node) if argument.alias_info for item in nodes(value)]
    if is_fresh(node.target):
        return []
    return node.all_input_nodes if is_composed(node.target) or opname(node) in SECRET_VIEWS else []


def viewed(node: Node) -> list[Node]:
    """Return `may_view(node)` more exactly, by running composed operators on fake tensors: a convolution is no view.

    As in eager mode, C++ decomposes them then. The results that the capture has recorded do not show it: Python's
    decompositions may copy where C++ returns an input.
    """
    views, target = may_view(node), node.target
    if not views or not isinstance(target, OpOverload) or declares_views(target) or not is_composed(target):
        return views
    try:
        return _views_in_run(node, target)
    except Exception:  # the operator does not run on fake tensors, or its sizes depend on values
        return views


def _views_in_run(node: Node, target: OpOverload) -> list[Node]:
    with FakeTensorMode(), torch.no_grad():
        stand_ins = {item: pytree.tree_map(_stand_in, item.meta["val"]) for item in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), stand_ins.__getitem__)
        result = memory(target(*args, **kwargs))
    return [item for item, value in stand_ins.items() if result & memory(value)]


def _stand_in(value: Any) -> Any:
    """Return a fake tensor, or a size, with the sizes of the sample inputs."""
    if isinstance(value, torch.Tensor):
        shape, stride = ([_sample(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return _sample(value)


def _sample(size: Any) -> Any:
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    if size.node.hint is None:
        raise ValueError(f"{size} depends on values")
    return size.node.hint


def memory(value: Any) -> set[int]:
    """Return the storages of the tensors in a value."""
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}


def opname(node: Node) -> str:
    """Return the operator's name without its package; empty if the target is no operator."""
    return str(getattr(node.target, "_opname", ""))


def arguments(node: Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Return the arguments of an operator's schema, with the node's values for them."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    return ((argument, values.get(argument.name)) for argument in declared)


def nodes(value: Any) -> list[Node]:
    """Return the nodes in an argument: itself, or those in a list."""
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]
