"""Of which of its arguments a node's result may be a view, or which it may simply return."""

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
    """Inputs that a result may share memory with, by the schema: all of them where an operator is composed of others.

    Such operators do not always declare it.
    """
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    if declares_views(node.target):
        return [item for argument, value in arguments(node) if argument.alias_info for item in nodes(value)]
    if is_fresh(node.target):
        return []
    return node.all_input_nodes if is_composed(node.target) or opname(node) in SECRET_VIEWS else []


def viewed(node: Node) -> list[Node]:
    """The same, where composed operators are tried on tensors without values: convolutions are no views of weights.

    As in eager, C++ decomposes them then. Results that the capture has recorded do not tell, as it takes
    decompositions in Python, which may copy what C++ returns as it is.
    """
    views, target = may_view(node), node.target
    if not views or not isinstance(target, OpOverload) or declares_views(target) or not is_composed(target):
        return views
    try:
        return _tried(node, target)
    except Exception:  # it has no implementation without values, or sizes that follow from values
        return views


def _tried(node: Node, target: OpOverload) -> list[Node]:
    with FakeTensorMode(), torch.no_grad():
        given = {item: pytree.tree_map(_stand_in, item.meta["val"]) for item in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        result = memory(target(*args, **kwargs))
    return [item for item, value in given.items() if result & memory(value)]


def _stand_in(value: Any) -> Any:
    """A tensor of the sizes that the sample inputs had; or such a size."""
    if isinstance(value, torch.Tensor):
        shape, stride = ([_sample(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return _sample(value)


def _sample(size: Any) -> Any:
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    if size.node.hint is None:
        raise ValueError(f"{size} follows from values")
    return size.node.hint


def memory(value: Any) -> set[int]:
    """The storages of the tensors in a value."""
    return {each.untyped_storage()._cdata for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)}


def opname(node: Node) -> str:
    """The operator's name without its package; empty for what is no operator."""
    return str(getattr(node.target, "_opname", ""))


def arguments(node: Node) -> Iterator[tuple[torch.Argument, Any]]:
    """The arguments of an operator's schema, with what the node gives for them."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    named = dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    return ((argument, named.get(argument.name)) for argument in declared)


def nodes(value: Any) -> list[Node]:
    """The nodes in an argument: one, or those of a list."""
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]
