"""Validation of sizes in a graph's document: arithmetic over symbols in SymPy's `srepr`, which torch evaluates."""

from __future__ import annotations

import ast
import functools
import re

MOST_CHARACTERS = 10_000
MOST_CHOICES, MOST_CHOSEN = 20, 8  # calls of Max and Min in a size, and their arguments: SymPy compares all pairs
MOST_POWERS, LARGEST_EXPONENT = 3, 99
MOST_DIGITS = 1000
_MOST_BITS = 64
_SYMBOL = re.compile(r"[a-z]{1,4}\d+")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,80})?(e[-+]?\d{1,3})?")
_FUNCTIONS = re.compile(
    r"Add|Mul|Mod|Abs|Equality|Unequality|(Strict)?(Less|Greater)Than"
    r"|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|(Ceil|Floor|Trunc)To(Float|Int)|ToFloat|RoundToInt|RoundDecimal|FloorDiv|CeilDiv"
    r"|CleanDiv|(Int|Float)TrueDiv|ModularIndexing|PythonMod|FloatPow|RShift|Where|Identity|floor|ceiling"
)
_NUMBERS = {"Integer", "Rational", "Float"}
_POWERS = {"Pow", "PowByNatural", "LShift"}  # powers of floats are never large
_CHOICES = {"Max", "Min"}
_CONSTANTS = {"true", "false", "oo", "int_oo"}
_FLAGS = {"positive", "nonnegative", "integer"}
_OPERATORS = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod | ast.BitAnd | ast.BitOr


@functools.cache
def is_size(text: str) -> bool:
    """Return whether a text is only arithmetic over torch's symbols and functions: harmless and quick to evaluate."""
    if len(text) > MOST_CHARACTERS:
        return False
    try:
        tree = ast.parse(text, mode="eval").body
        return _is_term(tree) and _is_quick(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_quick(tree: ast.expr) -> bool:
    nodes = list(ast.walk(tree))
    called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    powers = [name for name in called if name in _POWERS] + [
        node for node in nodes if isinstance(node, ast.Pow | ast.LShift)
    ]
    return len(powers) <= MOST_POWERS and sum(name in _CHOICES for name in called) <= MOST_CHOICES


def _is_term(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=options):
            return _is_call(name, arguments, options)
        case ast.Name(id=name):
            return name in _CONSTANTS or _SYMBOL.fullmatch(name) is not None
        case ast.Constant(value=int() | float()):
            return _is_number(node)
        case ast.BinOp(left, ast.Pow() | ast.LShift(), right):
            return _is_power(left, right)
        case ast.BinOp(left, operation, right):
            return isinstance(operation, _OPERATORS) and _is_term(left) and _is_term(right)
        case ast.UnaryOp(operand=operand):
            return _is_term(operand)
        case ast.Compare(left=left, comparators=others):
            return _is_term(left) and all(map(_is_term, others))
    return False


def _is_call(name: str, arguments: list[ast.expr], options: list[ast.keyword]) -> bool:
    if name == "Symbol":
        return _is_symbol(arguments, options)
    if name in _NUMBERS:
        return all(map(_is_number, arguments)) and all(map(_is_precision, options))
    if options:
        return False
    if name in _POWERS:
        return len(arguments) == 2 and _is_power(*arguments)
    if name == "Piecewise":
        return all(isinstance(pair, ast.Tuple) and all(map(_is_term, pair.elts)) for pair in arguments)
    known = _FUNCTIONS.fullmatch(name) is not None or (name in _CHOICES and len(arguments) <= MOST_CHOSEN)
    return known and all(map(_is_term, arguments))


def _is_symbol(arguments: list[ast.expr], options: list[ast.keyword]) -> bool:
    flags = all(option.arg in _FLAGS and isinstance(option.value, ast.Constant) for option in options)
    match arguments:
        case [ast.Constant(value=str(name))]:
            return flags and _SYMBOL.fullmatch(name) is not None
    return False


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(text)):  # a number with many digits, as an argument of `Float`
            return _NUMBER.fullmatch(text) is not None
        case ast.Constant(value=int(number)):
            return number.bit_length() <= _MOST_BITS
        case ast.Constant(value=float()):
            return True
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_number(operand)
    return False


def _is_precision(option: ast.keyword) -> bool:
    match option:
        case ast.keyword(arg="precision" | "dps", value=ast.Constant(value=int(digits))):
            return 0 < digits <= MOST_DIGITS
    return False


def _is_power(base: ast.expr, exponent: ast.expr) -> bool:
    """Return whether the base is a symbol, a number, or Max or Min of them: others may take too long to evaluate."""
    match base:
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CHOICES:
            bases = arguments
        case _:
            bases = [base]
    return all(map(_is_atom, bases)) and _is_term(base) and _is_small(exponent)


def _is_atom(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Constant(value=int() | float()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name == "Symbol" or name in _NUMBERS
    return False


def _is_small(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Call(func=ast.Name(id="Integer"), args=[inner], keywords=[]) | ast.UnaryOp(ast.USub(), inner):
            return _is_small(inner)
        case ast.Constant(value=int(value)):
            return abs(value) <= LARGEST_EXPONENT
        case ast.Constant(value=float()) | ast.Call(func=ast.Name(id="Float" | "Rational")):  # a float stays one
            return _is_term(exponent)
    return False
