"""Signatures: the inputs and outputs of a method, as a JSON tree.

A leaf is one flat input or output of the graph: a tensor, an integer that varies, or a literal that is fixed in the
graph. A size is an integer or a linear expression of one named dimension: `batch`, `2*batch`, `batch+1`. Graphs take
and give flat lists; callers see the trees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

Size = int | str
Key = str | int | tuple[str | int, ...]
Sizes = Mapping[str, int]
Scalar = bool | int | float | str | None
_SIZE = re.compile(r"(?:(?P<factor>\d+)\*)?(?P<dim>[A-Za-z_]\w*)(?P<offset>[+-]\d+)?")


class Tensor(msgspec.Struct, frozen=True, tag="tensor"):
    """Tensor leaf. `dtype` is a safetensors name."""

    name: str
    dtype: str
    shape: tuple[Size, ...]


class Integer(msgspec.Struct, frozen=True, tag="integer"):
    """Integer that may vary from call to call, like a size."""

    name: str
    value: Size


class Literal(msgspec.Struct, frozen=True, tag="literal"):
    """Value that was fixed at export. A call may omit it."""

    name: str
    value: bool | int | str | None = None
    hex: str | None = (
        None  # a float, as hexadecimal text: unambiguous, and JSON has no infinities; `value` is then None
    )

    @classmethod
    def of(cls, name: str, value: Scalar) -> Literal:
        return cls(name, hex=value.hex()) if isinstance(value, float) else cls(name, value)

    @property
    def content(self) -> Scalar:
        return self.value if self.hex is None else float.fromhex(self.hex)


class Items(msgspec.Struct, frozen=True, tag="list"):
    items: tuple[Node, ...]


class Tuple(msgspec.Struct, frozen=True, tag="tuple"):
    items: tuple[Node, ...]


class Dict(msgspec.Struct, frozen=True, tag="dict", omit_defaults=True):
    """Dict node. Keys keep their order and their type."""

    items: tuple[tuple[Key, Node], ...]
    kind: str = ""  # the class that was exported, as `module.Class`, if this has its fields; calls give it or a dict
    context: str = ""  # what else the class keeps, as JSON: the keys of a KeyedJaggedTensor


Leaf = Tensor | Integer | Literal
Node = Leaf | Items | Tuple | Dict


class Dimension(msgspec.Struct, frozen=True):
    """Range of a named dimension, both ends included."""

    min: int
    max: int | None = None  # None: no upper limit


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and output of a method."""

    args: tuple[tuple[str, Node], ...]  # parameter name and node, in call order; no identifier: not passed by keyword
    kwargs: tuple[tuple[str, Node], ...]
    output: Node
    dims: dict[str, Dimension]
    conditions: tuple[
        str, ...
    ] = ()  # relations between dimensions that the capture relied on, such as `rows <= columns`


def parse_size(text: str) -> tuple[int, str, int]:
    """Return the factor, the dimension and the offset of a size: `factor * dim + offset`. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size expression")
    return int(match["factor"] or 1), match["dim"], int(match["offset"] or 0)


def in_range(sizes: Sizes, dims: Mapping[str, Dimension]) -> bool:
    """Return True if `sizes` has exactly the named dimensions, each within its range."""
    return sizes.keys() == dims.keys() and all(
        limits.min <= sizes[name] and (limits.max is None or sizes[name] <= limits.max) for name, limits in dims.items()
    )


def size_at(size: Size, sizes: Sizes) -> int:
    """Evaluate a size of a shape for given sizes of the named dimensions."""
    if isinstance(size, int):
        return size
    factor, dim, offset = parse_size(size)
    return factor * sizes[dim] + offset


def key_text(key: Key) -> str:
    """Return a key as text for the name of a leaf: `x`, `7`, or for a tuple its JSON text, `["a","to","b"]`."""
    return json.dumps(key, ensure_ascii=False, separators=(",", ":")) if isinstance(key, tuple) else str(key)


def leaves(node: Node) -> list[Leaf]:
    """Return the leaves of a tree, in the order of the graph's flat inputs or outputs."""
    match node:
        case Items(items) | Tuple(items):
            return [leaf for item in items for leaf in leaves(item)]
        case Dict(items):
            return [leaf for _, item in items for leaf in leaves(item)]
        case _:
            return [node]


def input_leaves(signature: Signature) -> list[Leaf]:
    """Return the flat inputs of a method, in the graph's order."""
    return [leaf for _, node in (*signature.args, *signature.kwargs) for leaf in leaves(node)]


def sizes_of(leaf: Leaf) -> tuple[Size, ...]:
    """Return the sizes in a leaf: a tensor's shape, or an integer's value."""
    match leaf:
        case Tensor():
            return leaf.shape
        case Integer():
            return (leaf.value,)
        case _:
            return ()


def call_arguments(signature: Signature, flat: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build the positional and keyword arguments of a method from its flat inputs."""
    values = iter(flat)
    args = tuple(_build(node, values) for _, node in signature.args)
    return args, {name: _build(node, values) for name, node in signature.kwargs}


def unflatten(node: Node, values: list[Any]) -> Any:
    """Rebuild the tree of `node` from flat values, with plain dicts, lists and tuples; literals come from the node."""
    return _build(node, iter(values))


def flatten(node: Node, value: Any) -> list[Any]:
    """Return the flat values of a tree built by `unflatten`."""
    match node:
        case Items(items) | Tuple(items):
            return [part for item, element in zip(items, value, strict=True) for part in flatten(item, element)]
        case Dict(items):
            return [part for key, item in items for part in flatten(item, value[key])]
        case _:
            return [value]


def _build(node: Node, values: Iterator[Any]) -> Any:
    match node:
        case Items(items):
            return [_build(item, values) for item in items]
        case Tuple(items):
            return tuple(_build(item, values) for item in items)
        case Dict(items):
            return {key: _build(item, values) for key, item in items}
        case Literal():
            next(values)
            return node.content
        case _:
            return next(values)
