"""Conditions: relations between dimensions under which a graph was captured, such as `rows <= columns`, `d0 % 2 == 0`.

The text is parsed into a tree of a few kinds of nodes, which is interpreted; it is never compiled or executed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weightswap_runtime.errors import is_number

Condition = ast.expr
MOST_CHARACTERS, MOST_PARTS = 2000, 300
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[[Iterable[Any]], Any]] = {"max": max, "min": min}


def parse_condition(text: str, *, fractions: bool = False) -> Condition:
    """Parse and check a condition. Raises ValueError for anything but arithmetic, comparison and and/or/not.

    fractions: accept numbers with a decimal point, and compute with floats; otherwise only integers.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a condition of {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a condition") from error
    nodes = _nodes(tree)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        bare = isinstance(node, ast.Name) and node.id in _CALLS and id(node) not in called
        if bare or not (_allowed(node) or (fractions and _is_fraction(node))):
            raise ValueError(f"{text!r} is not a condition ({type(node).__name__})")
    if len(nodes) > MOST_PARTS:
        raise ValueError(f"a condition of {len(nodes)} parts")
    if fractions:
        _check_numbers(nodes)
    return tree


def _check_numbers(nodes: list[ast.AST]) -> None:
    """Make floats of all numbers. Raise ValueError if a part without names has no finite value, or divides by zero."""
    constants = [node for node in nodes if isinstance(node, ast.Constant)]
    if not all(is_number(constant.value) for constant in constants):
        raise ValueError("a number that is too large")
    for constant in constants:
        constant.value = float(constant.value)  # type: ignore[arg-type]
    for node in nodes:
        if isinstance(node, ast.BinOp) and not condition_dims(node.right):
            try:
                left = 1.0 if condition_dims(node.left) else _value(node.left, {})
                finite = math.isfinite(_computed(node.op, left, _value(node.right, {})))
            except ArithmeticError as error:
                raise ValueError(f"it computes what is not a number ({error})") from error
            if not finite:
                raise ValueError("a number that is too large")


def condition_dims(condition: Condition) -> set[str]:
    """Return the names of the dimensions in a condition."""
    return {node.id for node in _nodes(condition) if isinstance(node, ast.Name)} - _CALLS.keys()


def evaluate(condition: Condition, sizes: Mapping[str, float]) -> bool:
    """Return True if the condition holds; False if it divides by zero, or computes what is not a number."""
    try:
        return bool(_value(condition, sizes))
    except ArithmeticError:
        return False


def all_hold(conditions: Iterable[str], sizes: Mapping[str, float]) -> bool:
    """Parse conditions and return True if all hold. Raises ValueError."""
    return all(evaluate(parse_condition(text), sizes) for text in conditions)


def _nodes(tree: ast.expr) -> list[ast.AST]:
    skipped = (ast.Load, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
    return [node for node in ast.walk(tree) if not isinstance(node, skipped)]


def _is_fraction(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is float and math.isfinite(node.value)


def _allowed(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.Name():
            return True
        case ast.BinOp(op=operation):
            return type(operation) in _BINARY
        case ast.UnaryOp(op=operation):
            return isinstance(operation, ast.USub | ast.Not)
        case ast.Compare(ops=operations):
            return all(type(operation) in COMPARISONS for operation in operations)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _CALLS and bool(arguments)
        case _:
            return isinstance(node, ast.BoolOp)


def _value(node: ast.expr, sizes: Mapping[str, float]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left, operation, right):
            return _computed(operation, _value(left, sizes), _value(right, sizes))
        case ast.UnaryOp(operation, operand):
            value = _value(operand, sizes)
            return not value if isinstance(operation, ast.Not) else -value
        case ast.Compare(left, operations, rights):
            values = [_value(item, sizes) for item in (left, *rights)]
            pairs = zip(operations, values, values[1:], strict=False)
            return all(COMPARISONS[type(operation)](one, other) for operation, one, other in pairs)
        case ast.BoolOp(operation, operands):
            combine = all if isinstance(operation, ast.And) else any
            return combine(_value(item, sizes) for item in operands)
        case ast.Call(ast.Name(id=name), arguments):
            return _CALLS[name](_value(item, sizes) for item in arguments)
    raise AssertionError(node)


def _computed(operation: ast.operator, left: Any, right: Any) -> Any:
    """Raises ArithmeticError."""
    value = _BINARY[type(operation)](left, right)
    if isinstance(value, float) and math.isnan(value):
        raise ArithmeticError("not a number")
    return value
