"""Signatures: the inputs and outputs of a method, as a JSON tree; and checks whether a call's arguments fit them.

A leaf is one flat input or output of the graph: a tensor, an integer that varies, or a literal that is fixed in the
graph. A size is an integer or a linear expression of one named dimension: `batch`, `2*batch`, `batch+1`. Graphs take
and give flat lists; callers see the trees.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from weightswap_runtime.errors import InputMismatch

from .expressions import parse_condition

Size = int | str
Key = str | int | tuple[str | int, ...]
Sizes = Mapping[str, int]
Scalar = bool | int | float | str | None
_SIZE = re.compile(r"(?:(?P<factor>\d+)\*)?(?P<dim>[A-Za-z_]\w*)(?P<offset>[+-]\d+)?")
# fields of jagged tensors that follow from each other: which of them an object has is a matter of its past
_CACHED = {"_lengths": "lengths", "_offsets": "offsets"}
_MOST_ACCEPTED = 1024  # kinds of calls that are remembered; others are checked each time


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


class CallCheck:
    """Checker of a method's calls: turns arguments into the graph's flat inputs.

    tensor_type: the engine's tensor class. dtypes: its dtype objects -> safetensors names. misplaced: returns another
    problem of a tensor, such as a wrong device, or None. kind: returns all properties of a tensor that a check depends
    on, so that a call with tensors of kinds that were accepted before needs no check.
    """

    def __init__(
        self,
        method: str,
        signature: Signature,
        tensor_type: type[Any],
        dtypes: Mapping[Any, str],
        misplaced: Callable[[Any], str | None],
        kind: Callable[[Any], Hashable],
    ) -> None:
        self._method = method
        self._signature = signature
        self._parameters = (*signature.args, *signature.kwargs)
        self.tensor_type = tensor_type
        self.dtypes = dtypes
        self.misplaced = misplaced
        self.dims = signature.dims
        self._kind = kind
        self._plain = not signature.kwargs and all(type(node) is Tensor for _, node in signature.args)
        self._accepted: set[Hashable] = set()
        self.conditions = [parse_condition(text) for text in signature.conditions]
        self.sizes = {
            size: parse_size(size)
            for _, node in self._parameters
            for leaf in leaves(node)
            for size in sizes_of(leaf)
            if isinstance(size, str)
        }

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the flat inputs, in the graph's order. Raises InputMismatch with every problem."""
        if not self._plain or kwargs or not all(type(value) is self.tensor_type for value in args):
            return self._check(args, kwargs)
        try:
            kinds = tuple(map(self._kind, args))
        except RuntimeError:  # nested tensors have no shape
            return self._check(args, kwargs)
        if kinds in self._accepted:
            return list(args)
        flat = self._check(args, kwargs)
        if len(self._accepted) < _MOST_ACCEPTED:
            self._accepted.add(kinds)
        return flat

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        check = _Check(self)
        values = self._bind(args, kwargs, check)
        for name, node in self._parameters:
            if name in values:
                check.walk(node, values[name], name)
        if not check.problems:
            check.check_conditions()
        if check.problems:
            raise InputMismatch(self._method, check.problems)
        return check.flat

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], check: _Check) -> dict[str, Any]:
        positional = self._signature.args
        values = {name: value for (name, _), value in zip(positional, args, strict=False)}
        if len(args) > len(positional):
            check.problems.append(f"takes {len(positional)} positional argument(s), {len(args)} were given")
        known = {name for name, _ in self._parameters}
        for name, value in kwargs.items():
            if name in values:
                check.problems.append(f"{name}: given twice, by position and by keyword")
            elif name not in known:
                check.problems.append(f"{name}: not an argument it was exported with ({', '.join(sorted(known))})")
            else:
                values[name] = value
        for name, node in self._parameters:
            if name in values:
                continue
            if _is_fixed(node):
                values[name] = _fixed(node)
            else:
                check.problems.append(f"{name}: missing")
        return values


class _Check:
    """Walk over the inputs of one call that collects the flat values, the dimensions' sizes and the problems."""

    def __init__(self, expected: CallCheck) -> None:
        self.flat: list[Any] = []
        self.problems: list[str] = []
        self._expected = expected
        self._bound: dict[str, tuple[int, str]] = {}  # dimension -> its size, and where that is from

    def walk(self, node: Node, value: Any, path: str) -> None:
        if type(node) is Tensor:
            self._tensor(node, value)
        elif type(node) is Integer:
            self._integer(node, value)
        elif type(node) is Literal:
            self._literal(node, value)
        elif type(node) is Dict:
            self._dict(node, value, path) if isinstance(value, Mapping) else self._object(node, value, path)
        else:
            self._sequence(node, value, path)  # type: ignore[arg-type]

    def check_conditions(self) -> None:
        sizes = {dim: value for dim, (value, _) in self._bound.items()}
        for condition in self._expected.conditions:
            if not condition.holds(sizes):
                actual = ", ".join(f"{dim}={sizes[dim]}" for dim in sorted(condition.names))
                self.problems.append(
                    f"the graph was captured for {condition.text}, got {actual}; export with other sample inputs"
                )

    def _tensor(self, node: Tensor, value: Any) -> None:
        if not isinstance(value, self._expected.tensor_type):
            expected = f"{self._expected.tensor_type.__module__}.{self._expected.tensor_type.__qualname__}"
            self.problems.append(f"{node.name}: expected a {expected}, got {type(value).__qualname__}")
            return
        dtype = self._expected.dtypes.get(value.dtype)
        if dtype != node.dtype:
            self.problems.append(f"{node.name}: expected dtype {node.dtype}, got {dtype or value.dtype}")
        if problem := self._expected.misplaced(value):
            self.problems.append(f"{node.name}: {problem}")
            return
        shape = tuple(value.shape)
        if len(shape) != len(node.shape):
            expected = f"[{', '.join(map(str, node.shape))}]"
            self.problems.append(f"{node.name}: expected {len(node.shape)} dimensions {expected}, got {list(shape)}")
            return
        for axis, (expected_size, size) in enumerate(zip(node.shape, shape, strict=True)):
            if expected_size != size:
                self._size(expected_size, size, node.name, f" dimension {axis}")
        self.flat.append(value)

    def _integer(self, node: Integer, value: Any) -> None:
        if type(value) is not int:
            self.problems.append(f"{node.name}: expected an int, got {type(value).__qualname__}")
            return
        if node.value != value:
            self._size(node.value, value, node.name, "")
        self.flat.append(value)

    def _literal(self, node: Literal, value: Any) -> None:
        if type(value) is not type(node.content) or Literal.of(node.name, value) != node:
            self.problems.append(
                f"{node.name}: the graph was exported with {node.content!r}, got {_show(value)}; "
                "export another method for other values"
            )
        self.flat.append(node.content)

    def _sequence(self, node: Items | Tuple, value: Any, path: str) -> None:
        container = list if isinstance(node, Items) else tuple
        if not isinstance(value, (list, deque) if container is list else tuple) or len(value) != len(node.items):
            self.problems.append(f"{path}: expected a {container.__name__} of {len(node.items)}, got {_show(value)}")
            return
        for index, (item, part) in enumerate(zip(node.items, value, strict=True)):
            self.walk(item, part, f"{path}.{index}")

    def _dict(self, node: Dict, value: Mapping[Any, Any], path: str) -> None:
        # the fields of an object that the graph has no input for need not be given
        fixed = {key: _fixed(item) for key, item in node.items if _is_fixed(item)} if node.kind else {}
        if {*value, *fixed} != {key for key, _ in node.items}:
            self.problems.append(f"{path}: expected {_expected(node)}, got {_show(value)}")
            return
        for key, item in node.items:
            self.walk(item, value[key] if key in value else fixed[key], f"{path}.{key_text(key)}")

    def _object(self, node: Dict, value: Any, path: str) -> None:
        """Walk over the fields of an object of the class that was exported."""
        given = f"{type(value).__module__}.{type(value).__qualname__}"
        # no class is imported because an artifact names it; one that is registered has imported torch
        if given != node.kind or "torch" not in sys.modules:
            self.problems.append(f"{path}: expected {_expected(node)}, got {_show(value)}")
            return
        from weightswap_runtime.torch_tensors import registered_fields

        try:
            found = registered_fields(value)
        except (TypeError, ValueError) as error:
            self.problems.append(f"{path}: expected a {node.kind} with {node.context}, got one without that: {error}")
            return
        if found is None or found[0] != node.context or len(found[1]) != len(node.items):
            context = found[0] if found else "no fields, as it is not registered with pytree here"
            self.problems.append(f"{path}: expected a {node.kind} with {node.context}, got one with {context}")
            return
        is_jagged = _is_jagged(node, value)
        for (key, item), field in zip(node.items, found[1], strict=True):
            form = _followed(item, str(key), field, value) if is_jagged and key in _CACHED else field
            self.walk(item, form, f"{path}.{key_text(key)}")

    def _size(self, expected: Size, size: int, name: str, where: str) -> None:
        """Compare a size with the expected one, and bind the dimension in it if this is its first use."""
        if isinstance(expected, int):
            self.problems.append(f"{name}:{where} expected {expected}, got {size}")
            return
        factor, dim, offset = self._expected.sizes[expected]
        value, rest = divmod(size - offset, factor)
        if rest:
            self.problems.append(f"{name}:{where} expected {expected}, got {size}, for which no {dim} exists")
            return
        if dim in self._bound:
            bound, origin = self._bound[dim]
            if bound != value:
                self.problems.append(
                    f"{name}:{where} expected {expected} with {dim}={bound} (from {origin}), got {size}"
                )
            return
        self._bound[dim] = value, f"{name}{where}"
        limits = self._expected.dims[dim]
        if value < limits.min or (limits.max is not None and value > limits.max):
            most = "any" if limits.max is None else limits.max
            self.problems.append(f"{name}:{where} expected {expected} with {dim} in {limits.min}..{most}, got {size}")


def _is_fixed(node: Node) -> bool:
    return all(isinstance(leaf, Literal) for leaf in leaves(node))


def _fixed(node: Node) -> Any:
    return unflatten(node, list(leaves(node)))


def _expected(node: Dict) -> str:
    keys = [key for key, item in node.items if not (node.kind and _is_fixed(item))]
    return f"a {node.kind}, or a dict of its fields {keys}" if node.kind else f"a dict with the keys {keys}"


def _is_jagged(node: Dict, owner: Any) -> bool:
    """Return whether an object has both fields that follow from each other, and computes either. One of them may mean
    anything."""
    keys = {key for key, _ in node.items}
    return keys.issuperset(_CACHED) and all(callable(getattr(owner, name, None)) for name in _CACHED.values())


def _followed(node: Node, name: str, field: Any, owner: Any) -> Any:
    """Return a field in the form that was exported: left out, or computed."""
    if isinstance(node, Literal) and node.content is None:
        return None
    return getattr(owner, _CACHED[name])() if field is None else field


def _show(value: object) -> str:
    text = repr(list(value)) if isinstance(value, Mapping) else repr(value)
    kind = type(value).__qualname__
    return f"{kind} {text if len(text) <= 60 else text[:60] + '...'}"
