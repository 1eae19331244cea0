"""Conditions on the change of a tensor: `new_nan or rel_change > 0.5 and name ~ "encoder.*"`.

A condition combines `QUANTITY`, `QUANTITY < NUMBER` (also <=, >, >=, ==, !=) and `name ~ "PATTERN"` with `or`, `and`,
`not` and parentheses. A quantity alone holds if it is not zero. The text is parsed by `ast`, and never compiled or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.conditions import COMPARISONS

from .report import TensorDiff, WeightsDiff
from .severity import new_values

MOST_CHARACTERS = 2000
_PATTERN = re.compile(r"""\bname\s*~\s*(?:"([^"]*)"|'([^']*)')""")
Quantity = Callable[[TensorDiff], float | None]
Test = Callable[[TensorDiff], bool]


def _of(part: Literal["values_after", "change"], field: str) -> Quantity:
    return lambda diff: getattr(getattr(diff, part), field, None)  # the part may be None


def _is(field: Literal["status", "level"], word: str) -> Quantity:
    return lambda diff: float(getattr(diff, field) == word)


OF_VALUES = ("nan", "inf", "mean", "std", "norm", "dead_rows")  # unchanged tensors have these, too
UNCHANGED: Mapping[str, float] = {
    "rel_change": 0.0,
    "max_change": 0.0,
    "max_rel_change": 0.0,
    "share_changed": 0.0,
    "sign_flips": 0.0,
    "cosine": 1.0,
}
"""The quantities of an unread tensor whose recorded digests are equal."""
QUANTITIES: Mapping[str, Quantity] = {
    **{name: _of("values_after", name) for name in OF_VALUES},
    "new_nan": lambda diff: new_values(diff)[0],
    "new_inf": lambda diff: new_values(diff)[1],
    "new_dead_rows": lambda diff: new_values(diff)[2],
    **{name: _of("change", name) for name in UNCHANGED},
    "max_change": lambda diff: (diff.change.largest.change if diff.change.largest else 0.0) if diff.change else None,
    **{name: _is("status", name) for name in ("removed", "added", "reshaped", "retyped", "renamed")},
    "changed": lambda diff: float(diff.level != "same" and diff.status != "renamed"),
    **{name: _is("level", name) for name in ("alarm", "notice")},
}


class Policy:
    """A parsed condition. `text` is its source, `quantities` are the names of the quantities in it."""

    def __init__(self, text: str) -> None:
        """Parse a condition. Raises Unsupported, with the column, if the text is not a condition."""
        self.text = text
        if len(text) > MOST_CHARACTERS:
            raise Unsupported(f"a condition of {len(text)} characters; at most {MOST_CHARACTERS} are allowed")
        tree = _parse(text.strip())
        self._test = _TestCompiler(text.strip()).test(tree)
        self.quantities = (
            frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) & QUANTITIES.keys()
        )

    @property
    def needs_values(self) -> bool:
        """True if the condition needs values of tensors that did not change."""
        return not self.quantities.isdisjoint(OF_VALUES)

    def meets(self, tensor: TensorDiff) -> bool:
        """Return whether the condition holds for a tensor. Comparisons of an unknown quantity do not hold."""
        return self._test(tensor)

    def failures(self, diff: WeightsDiff) -> tuple[str, ...]:
        """Return the names of all tensors for which the condition holds, the most alarming first."""
        return tuple(tensor.name for tensor in diff.tensors if self.meets(tensor))


def _parse(text: str) -> ast.expr:
    """Parse the text as Python, with each `name ~ "PATTERN"` replaced by a name of the same width and column."""
    words = _PATTERN.sub(lambda match: "name".ljust(len(match[0]), "_"), text)
    try:
        return ast.parse(re.sub(r"\s", " ", words), mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(text, error.offset or len(text) + 1, error.msg) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(text, 1, str(error)) from error


class _TestCompiler:
    """Compiler from the nodes of a condition to test functions."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._patterns = {match.start(): match[1] or match[2] or "" for match in _PATTERN.finditer(text)}

    def test(self, node: ast.expr) -> Test:
        """Return a function that tests a tensor. Raises Unsupported."""
        match node:
            case ast.BoolOp(operation, operands):
                tests = [self.test(operand) for operand in operands]
                combine = all if isinstance(operation, ast.And) else any
                return lambda diff: combine(test(diff) for test in tests)
            case ast.UnaryOp(ast.Not(), operand):
                negated = self.test(operand)
                return lambda diff: not negated(diff)
            case ast.Compare(left, [operation], [right]) if type(operation) in COMPARISONS:
                return self._comparison(self._quantity(left), COMPARISONS[type(operation)], self._number(right))
            case ast.Name() if node.col_offset in self._patterns:
                pattern = self._patterns[node.col_offset]
                return lambda diff: fnmatchcase(diff.name, pattern)
            case _:
                quantity = self._quantity(node)
                return lambda diff: bool(quantity(diff))

    @staticmethod
    def _comparison(quantity: Quantity, holds: Callable[[float, float], bool], number: float) -> Test:
        return lambda diff: (value := quantity(diff)) is not None and holds(value, number)

    def _quantity(self, node: ast.expr) -> Quantity:
        if isinstance(node, ast.Name) and node.id in QUANTITIES:
            return _quantity_of(node.id)
        raise self._error(node, f'expected name ~ "PATTERN" or one of {", ".join(QUANTITIES)}')

    def _number(self, node: ast.expr) -> float:
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Constant(value=int() | float() as value):
                return value
        raise self._error(node, "expected a number")

    def _error(self, node: ast.expr, what: str) -> Unsupported:
        return _syntax_error(self._text, node.col_offset + 1, what)


def _quantity_of(name: str) -> Quantity:
    """Return a quantity that is also known for unchanged tensors that were not read."""
    unread = UNCHANGED.get(name)

    def quantity(diff: TensorDiff) -> float | None:
        value = QUANTITIES[name](diff)
        return unread if value is None and diff.status in ("same", "renamed") and diff.change is None else value

    return quantity


def _syntax_error(text: str, column: int, what: str) -> Unsupported:
    return Unsupported(f"the condition {text!r}, column {column}: {what}")
