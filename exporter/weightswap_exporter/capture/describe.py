"""Description of a captured method's inputs and outputs, as the manifest's JSON tree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import Dim
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from weightswap_exporter.modules.tensors import children, dtype_name, tree_of
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.expressions import parse_condition
from weightswap_runtime.format.signature import Dimension, Integer, Leaf, Literal, Node, Signature, Size, Tensor

from .capture import Captured
from .programs import graph_inputs


def describe_method(captured: Captured) -> Signature:
    """Return the method's signature: parameters in call order, output tree, named dynamic dimensions with ranges."""
    program = captured.program
    in_spec = program.call_spec.in_spec
    assert in_spec is not None
    args_spec, kwargs_spec = children(in_spec)
    names = list(_positional_names(captured.parameters, len(children(args_spec))))
    parameters = list(zip(names, children(args_spec), strict=True))
    keywords = list(zip(captured.keywords, children(kwargs_spec), strict=True))
    values = _user_inputs(captured)
    dims = _Dims(_dim_names(captured.shapes, parameters + keywords, values))
    flat = iter(values)

    def tree(name: str, spec: pytree.TreeSpec) -> tuple[str, Node]:
        return name, tree_of(spec, name, flat, lambda value, path: _leaf(value, path, dims, strict=True))

    args = tuple(tree(name, spec) for name, spec in parameters)
    kwargs = tuple(tree(name, spec) for name, spec in keywords)
    conditions = tuple(_conditions(values, dims))
    ranges = dims.ranges(program.range_constraints)
    return Signature(args=args, kwargs=kwargs, output=_output(captured, dims), dims=ranges, conditions=conditions)


def _conditions(values: list[Any], dims: _Dims) -> Iterator[str]:
    """Yield the relations between sizes that the capture relied on, from the guards of its shape environment."""
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    symbolic = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return
    environment = symbolic[0].shape_env
    inputs = {symbol for node in symbolic for symbol in node.expr.free_symbols}
    for guard in environment.guards:
        relation = environment.simplify(guard.expr)
        if relation is sympy.true or not relation.free_symbols:
            continue
        if not relation.free_symbols <= inputs:
            raise CaptureError(f"the capture relies on {relation}, which cannot be checked against the inputs")
        yield dims.condition(relation)


def _positional_names(signature: inspect.Signature, count: int) -> Iterator[str]:
    """Yield names of the first `count` positional arguments; the parts of `*rest` are `rest.0`, `rest.1`, ..."""
    for position, parameter in enumerate(signature.parameters.values()):
        if position == count:
            return
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from (f"{parameter.name}.{index}" for index in range(count - position))
            return
        yield parameter.name


def _user_inputs(captured: Captured) -> list[Any]:
    """Return the flat user inputs, in order: fake tensors, symbolic integers, or the values that became fixed."""
    return [
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta.get("val")
        for node, spec in graph_inputs(captured.program)
        if spec.kind is InputKind.USER_INPUT
    ]


def _output(captured: Captured, dims: _Dims) -> Node:
    program = captured.program
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    (outputs,) = program.graph.output_node().args
    assert isinstance(outputs, tuple | list)
    values = (item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in outputs)
    return tree_of(out_spec, "", values, lambda value, path: _leaf(value, path or "output", dims, strict=False))


def _leaf(value: Any, path: str, dims: _Dims, *, strict: bool) -> Leaf:
    if isinstance(value, torch.Tensor):
        if strict and value.layout is not torch.strided:
            raise CaptureError(f"{path}: {value.layout} tensors cannot be inputs, only dense ones")
        return Tensor(path, dtype_name(value.dtype, path), tuple(dims.size(size, path, strict) for size in value.shape))
    if isinstance(value, torch.SymInt):
        return Integer(path, dims.size(value, path, strict))
    if value is None or isinstance(value, bool | int | float | str):
        return Literal.of(path, value)
    raise CaptureError(f"{path}: a {type(value).__qualname__} can be neither an input nor an output")


class _Dims:
    """Names for the symbols of dynamic dimensions: those given by the user, or d0, d1, ... in order of appearance."""

    def __init__(self, names: dict[sympy.Symbol, str]) -> None:
        self._names = dict(names)

    def size(self, size: int | torch.SymInt, path: str, strict: bool) -> Size:
        """Return an integer, or the size's expression; `strict` requires one that is linear in one dimension."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        linear = self._linear(expression)
        if linear is not None:
            return linear
        if strict:
            raise CaptureError(f"{path}: the size {expression} is not linear in one dynamic dimension")
        return str(expression.xreplace({symbol: sympy.Symbol(self._name(symbol)) for symbol in _symbols(expression)}))

    def ranges(self, constraints: Mapping[sympy.Symbol, Any]) -> dict[str, Dimension]:
        """Return the range that the export has for each named dimension."""
        dimensions = {}
        for symbol, name in self._names.items():
            limits = constraints.get(symbol)
            upper = int(limits.upper) if limits is not None and isinstance(limits.upper, sympy.Integer) else None
            dimensions[name] = Dimension(max(0, int(limits.lower)) if limits is not None else 0, upper)
        return dimensions

    def condition(self, relation: Any) -> str:
        """Return a relation between sizes in the notation of signatures."""
        text = str(PythonPrinter().doprint(relation))
        for symbol in _symbols(relation):
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", self._name(symbol), text)
        try:
            parse_condition(text)
        except ValueError as error:
            raise CaptureError(
                f"the capture relies on {relation}, which a signature cannot express ({error})"
            ) from error
        return text

    def _linear(self, expression: Any) -> str | None:
        symbols = _symbols(expression)
        if len(symbols) != 1:
            return None
        (symbol,) = symbols
        factor, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
        integers = isinstance(factor, sympy.Integer) and isinstance(offset, sympy.Integer)
        if not integers or factor < 1 or sympy.simplify(factor * symbol + offset - expression) != 0:
            return None
        text = self._name(symbol) if factor == 1 else f"{factor}*{self._name(symbol)}"
        return text if offset == 0 else f"{text}{int(offset):+d}"

    def _name(self, symbol: sympy.Symbol) -> str:
        if symbol not in self._names:
            used = set(self._names.values())
            candidates = (f"d{index}" for index in range(len(used) + 1))
            self._names[symbol] = next(name for name in candidates if name not in used)
        name: str = self._names[symbol]
        return name


def _symbols(expression: Any) -> list[sympy.Symbol]:
    return sorted(expression.free_symbols, key=str)


def _dim_names(
    shapes: list[Any], parameters: list[tuple[str, pytree.TreeSpec]], values: list[Any]
) -> dict[sympy.Symbol, str]:
    """Return the user's names of dimensions, from the `shapes` of the flat inputs.

    Raises CaptureError if one of them became fixed.
    """
    names: dict[sympy.Symbol, str] = {}
    owners = (name for name, spec in parameters for _ in range(spec.num_leaves))
    for name, value, shape in zip(owners, values, shapes, strict=True):
        for symbol, dim in _named_sizes(value, shape, name):
            names.setdefault(symbol, dim)
    return names


def _named_sizes(value: Any, shape: Any, name: str) -> Iterator[tuple[sympy.Symbol, str]]:
    if not isinstance(value, torch.Tensor):
        return
    axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
    for axis, dim in axes:
        size: Any = value.shape[axis]
        if _is_dynamic(dim) and not (isinstance(size, torch.SymInt) and size.node.expr.free_symbols):
            raise CaptureError(f"{name}: dimension {axis} was declared dynamic, but the capture fixed it at {size}")
        if isinstance(dim, Dim) and isinstance(size, torch.SymInt):
            # `3*rows` may be the only use of `rows`: a derived dimension knows the one that it is computed from
            root, expected = getattr(dim, "root", dim), getattr(dim, "fn", lambda symbol: symbol)
            for symbol in _symbols(size.node.expr):
                if expected(symbol) == size.node.expr:
                    yield symbol, root.__name__


def _is_dynamic(dim: Any) -> bool:
    """Return whether a dimension must stay dynamic: a named or derived one, or `Dim.DYNAMIC`."""
    return isinstance(dim, Dim) or getattr(dim, "type", None) == Dim.DYNAMIC.type
