"""Conversion of inputs and outputs in a model's own classes to the plain trees that a server has instead."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.signature import Dict, Integer, Items, Key, Node, Tuple, key_text


def plain_tree(value: Any) -> tuple[Node, list[Any]]:
    """Return the tree that a server has in place of a value, with leaves named by path, and its flat values."""
    flat, spec = pytree.tree_flatten(value)
    return tree_of(spec, "", lambda path: Integer(path or "output", 0)), flat


def tree_of(spec: pytree.TreeSpec, path: str, leaf: Any) -> Node:
    """Return a value's tree; `leaf(path)` makes its leaves, in order. Raises CaptureError for unsupported keys."""
    if spec.is_leaf():
        return leaf(path)  # type: ignore[no-any-return]
    keys = _keys(spec)
    names = map(key_text, keys or range(spec.num_children))
    parts = [
        tree_of(child, f"{path}.{name}" if path else name, leaf)
        for child, name in zip(children(spec), names, strict=True)
    ]
    if keys is not None:
        return Dict(tuple(zip(keys, parts, strict=True)))
    return Items(tuple(parts)) if spec.type in (list, deque) else Tuple(tuple(parts))


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    # torch 2.11 has the attribute only, later versions deprecate it
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def _keys(spec: pytree.TreeSpec) -> list[Key] | None:
    """Return the keys of a node that the server rebuilds as a dict; None for a sequence."""
    kind: Any = spec.type
    if kind in (tuple, list, deque, namedtuple):
        return None
    keys: list[Any] | None
    if kind in (dict, OrderedDict):
        keys = list(spec.context)
    elif kind is defaultdict:
        keys = list(spec.context[1])
    else:
        keys = _class_keys(spec)
    if keys is None:
        return None
    if not all(_is_key(key) for key in keys):
        raise CaptureError(
            f"an input or output is a dict with the keys {keys}; keys must be strings, integers, or tuples of these"
        )
    tuples = {key_text(key) for key in keys if isinstance(key, tuple)}
    if ambiguous := sorted(tuples.intersection(keys)):
        raise CaptureError(f"a dict has the key {ambiguous[0]!r} and a tuple that is written the same way; rename one")
    return keys


def _is_key(key: Any) -> bool:
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in (str, int) for part in parts)


def _class_keys(spec: pytree.TreeSpec) -> list[Any] | None:
    """Return the field names of a registered class: the context of an HF ModelOutput, the key paths of others."""
    context = spec.context
    if (
        isinstance(context, list | tuple)
        and len(context) == spec.num_children
        and all(isinstance(k, str) for k in context)
    ):
        return list(context)
    kind: Any = spec.type
    flatten = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    if flatten is None:
        return None
    dummy = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    keys = [key for key, _ in flatten(dummy)[0]]
    fields = [getattr(key, "name", getattr(key, "key", None)) for key in keys]
    return None if None in fields else fields
