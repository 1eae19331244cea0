"""Expressions in texts of files and users, in three languages of one grammar:

- conditions of graphs: relations between dimensions under which a graph was captured, such as `d0 % 2 == 0`
- rules of canaries: the same with fractions, and for how long, such as `errors < 0.001 and p99 < 0.2 for 5 min`
- filters of tensors, for `--fail-if`: tests of quantities and names, such as `nan and not name ~ "head.*"`

Python's own parser makes the tree, so precedence and error messages are those that users know; the few kinds of nodes
that a language allows become closures. A text is never compiled or executed. The work is linear in its length, which
has a limit.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from weightswap_runtime.errors import is_number

MOST_CHARACTERS = 2000
# Of conditions and rules. It bounds the depth, too, as unary minus nests without parentheses, of which Python's parser
# allows 200. For filters the characters suffice: what nests deepest there is 500 times `not`.
_MOST_PARTS = 300
_PATTERN = re.compile(r"""\bname\s*~\s*(?:"([^"]*)"|'([^']*)')""")
NAME_MATCHES = "name ~ "
_DURATION = re.compile(r"(.*\S)\s+for\s+(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h)\s*", re.DOTALL)
_SECONDS = {"s": 1, "min": 60, "h": 3600}

Values = Mapping[str, float | None]
_Part = Callable[[Values], Any]


class Condition:
    """A parsed expression."""

    def __init__(self, text: str, names: frozenset[str], part: _Part) -> None:
        self.text = text
        self.names = names  # those whose values it needs
        self._part = part

    def holds(self, values: Values) -> bool:
        """Return True if the condition holds; False if it divides by zero, or computes what is not a number.

        values: of all names. None is an unknown one: it is false, and so are comparisons with it.
        """
        try:
            return bool(self._part(values))
        except ArithmeticError:
            return False


def parse_condition(text: str) -> Condition:
    """Parse a condition of a graph: integers, names, arithmetic, comparisons, and/or/not, max and min.

    Raises ValueError for anything else.
    """
    return _parse_arithmetic(text, fractions=False)


def parse_rule(text: str) -> tuple[Condition, float]:
    """Parse a rule, and return its condition and the seconds for which that has to hold.

    The condition may also have fractions, and computes with floats. Raises ValueError, also if a part without names has
    no finite value or divides by zero, as no measurement could make such a rule true.
    """
    match = _DURATION.fullmatch(text)
    condition, seconds = (match[1], float(match[2]) * _SECONDS[match[3]]) if match else (text, 0.0)
    return _parse_arithmetic(condition, fractions=True), seconds


def parse_filter(text: str, quantities: Collection[str]) -> Condition:
    """Parse a filter: and/or/not, quantities, comparisons of a quantity with a number, and patterns of names.

    `name ~ "PATTERN"` is a name of the condition, too, NAME_MATCHES + PATTERN, whose value is whether the pattern
    matches. Raises ValueError, with the column.
    """
    _check_length(text)
    text = text.strip()
    patterns = {match.start(): match[1] or match[2] or "" for match in _PATTERN.finditer(text)}
    # Python has no `~` between operands, so a name stands for each pattern, of its width, which keeps all columns
    words = _PATTERN.sub(lambda match: "name".ljust(len(match[0]), "_"), text)
    try:
        tree = _tree(re.sub(r"\s", " ", words))
        _check_filter(tree, patterns, quantities)
    except _Refused as error:
        raise ValueError(f"the condition {text!r}, column {error.column}: {error}") from error
    return _Compiler(text, (int, float, bool)).compile(tree)


def all_hold(conditions: Iterable[str], sizes: Values) -> bool:
    """Parse conditions of a graph and return True if all hold. Raises ValueError."""
    return all(parse_condition(text).holds(sizes) for text in conditions)


class _Refused(ValueError):
    def __init__(self, column: int, what: str) -> None:
        super().__init__(what)
        self.column = column


def _check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a condition of {len(text)} characters; at most {MOST_CHARACTERS} are allowed")


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _Refused(error.offset or len(text) + 1, error.msg) from error
    except (ValueError, RecursionError, MemoryError) as error:  # lone surrogates; too many parentheses
        raise _Refused(1, str(error)) from error


def _parse_arithmetic(text: str, *, fractions: bool) -> Condition:
    _check_length(text)
    try:
        tree = _tree(text)
    except _Refused as error:
        raise ValueError(f"{text!r} is not a condition") from error
    skipped = (ast.Load, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
    parts = sum(not isinstance(node, skipped) for node in ast.walk(tree))
    if parts > _MOST_PARTS:
        raise ValueError(f"a condition of {parts} parts; at most {_MOST_PARTS} are allowed")
    return _Compiler(text, (int, float) if fractions else (int,), finite=fractions).compile(tree)


def _check_filter(tree: ast.expr, patterns: Mapping[int, str], quantities: Collection[str]) -> None:
    """Check what may stand where, from left to right, and give patterns their names. `patterns`: by column."""
    waiting = [tree]
    while waiting:
        match waiting.pop():
            case ast.BoolOp(_, operands):
                waiting += reversed(operands)
            case ast.UnaryOp(ast.Not(), operand):
                waiting.append(operand)
            case ast.Compare(left, [operation], [right]) if type(operation) in _COMPARISONS:
                _check_quantity(left, quantities)
                _check_number(right)
            case ast.Name() as name if name.col_offset in patterns:
                name.id = NAME_MATCHES + patterns[name.col_offset]
            case node:
                _check_quantity(node, quantities)


def _check_quantity(node: ast.expr, quantities: Collection[str]) -> None:
    if not (isinstance(node, ast.Name) and node.id in quantities):
        raise _Refused(node.col_offset + 1, f'expected name ~ "PATTERN" or one of {", ".join(quantities)}')


def _check_number(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=int() | float()) | ast.UnaryOp(ast.USub(), ast.Constant(value=int() | float())):
            return
    raise _Refused(node.col_offset + 1, "expected a number")


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[[Iterable[Any]], Any]] = {"max": max, "min": min}


class _Compiler:
    """Closures of the nodes of one expression. Raises ValueError for nodes that no language has.

    numbers: the types of constants. finite: compute with floats, and check each part without names.
    """

    def __init__(self, text: str, numbers: tuple[type, ...], *, finite: bool = False) -> None:
        self._text = text
        self._numbers = numbers
        self._finite = finite
        self._names: list[str] = []  # each occurrence: a part has no names if there are no more after it

    def compile(self, tree: ast.expr) -> Condition:
        part = self._part(tree)
        return Condition(self._text, frozenset(self._names), part)

    def _part(self, node: ast.expr) -> _Part:
        match node:
            case ast.Constant(value=value) if type(value) in self._numbers:
                return self._constant(value)
            case ast.Name(id=name) if name not in _CALLS:
                self._names.append(name)
                return operator.itemgetter(name)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return self._arithmetic(_ARITHMETIC[type(node.op)], node)
            case ast.UnaryOp(ast.Not() | ast.USub() as operation, operand):
                change, inner = operator.not_ if isinstance(operation, ast.Not) else operator.neg, self._part(operand)
                return lambda values: change(inner(values))
            case ast.Compare(left, operations, rights) if all(type(item) in _COMPARISONS for item in operations):
                return _compared([_COMPARISONS[type(item)] for item in operations], self._parts([left, *rights]))
            case ast.BoolOp(operation, operands):
                return _combined(all if isinstance(operation, ast.And) else any, self._parts(operands))
            case ast.Call(ast.Name(id=name), operands, []) if name in _CALLS and operands:
                return _combined(_CALLS[name], self._parts(operands))
        raise ValueError(f"{self._text!r} is not a condition ({type(node).__name__})")

    def _parts(self, nodes: Sequence[ast.expr]) -> list[_Part]:
        return [self._part(node) for node in nodes]

    def _constant(self, value: Any) -> _Part:
        if self._finite:
            if not is_number(value):
                raise ValueError("a number that is too large")
            value = float(value)
        return lambda _: value

    def _arithmetic(self, operation: Callable[[Any, Any], Any], node: ast.BinOp) -> _Part:
        names_before = len(self._names)
        left = self._part(node.left)
        names_of_left = len(self._names)
        right = self._part(node.right)
        if self._finite and len(self._names) == names_of_left:
            is_constant = names_of_left == names_before
            value = _finite_result(operation, left({}) if is_constant else 1.0, right({}))
            if is_constant:  # or each part around it would compute it again
                return lambda _: value
        return lambda values: _computed(operation, left(values), right(values))


def _compared(comparisons: Sequence[Callable[[Any, Any], bool]], parts: Sequence[_Part]) -> _Part:
    def compare(values: Values) -> bool:
        operands = [part(values) for part in parts]
        if None in operands:
            return False
        return all(holds(*pair) for holds, *pair in zip(comparisons, operands, operands[1:], strict=False))

    return compare


def _combined(combine: Callable[[Iterable[Any]], Any], parts: Sequence[_Part]) -> _Part:
    return lambda values: combine(part(values) for part in parts)


def _computed(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Raises ArithmeticError."""
    value = operation(left, right)
    if isinstance(value, float) and math.isnan(value):
        raise ArithmeticError("not a number")
    return value


def _finite_result(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    try:
        value = _computed(operation, left, right)
    except ArithmeticError as error:
        raise ValueError(f"it computes what is not a number ({error})") from error
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value
