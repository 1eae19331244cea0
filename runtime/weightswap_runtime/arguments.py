"""A call's arguments from tensors by name, as files of inputs have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cases import input_leaves
from .contents import Content, as_array
from .dtypes import describe, has_fractions
from .engines import Engine
from .errors import InputMismatch
from .signature import Integer, Literal, Node, Signature, leaves, unflatten


def named_inputs(method: str, signature: Signature, tensors: Mapping[str, Content]) -> list[Any]:
    """Flat inputs in the graph's order: tensors as contents, integers and literals as they are.

    Raises InputMismatch for names that are missing or unknown, and for an integer that is not a single whole number.
    """
    found = input_leaves(signature)
    names = {leaf.name for leaf in found if not isinstance(leaf, Literal)}
    problems = [f"{name}: missing from the inputs (--input FILE)" for name in sorted(names - tensors.keys())]
    known = ", ".join(sorted(names))
    problems += [f"{name}: not an input (they are {known})" for name in sorted(tensors.keys() - names)]
    integers = {leaf.name for leaf in found if isinstance(leaf, Integer)} & tensors.keys()
    problems += [text for name in sorted(integers) for text in _integer_problems(name, tensors[name])]
    if problems:
        raise InputMismatch(method, problems)
    values = {name: int(as_array(tensors[name]).item()) if name in integers else tensors[name] for name in names}
    return [leaf.content if isinstance(leaf, Literal) else values[leaf.name] for leaf in found]


def _integer_problems(name: str, content: Content) -> Iterator[str]:
    if math.prod(content.shape) != 1 or has_fractions(content.dtype):
        yield f"{name}: expected one integer, got {describe(content.dtype, content.shape)}"


def call_arguments(signature: Signature, flat: Sequence[Any], engine: Engine) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments from flat inputs, contents as the engine's tensors."""
    values = iter([engine.tensor(value) if isinstance(value, Content) else value for value in flat])

    def tree(node: Node) -> Any:
        return unflatten(node, [next(values) for _ in leaves(node)])

    args = [tree(node) for _, node in signature.args]
    return args, {name: tree(node) for name, node in signature.kwargs}
