"""Sizes in a graph's document: arithmetic over symbols, as SymPy's `srepr` writes it. torch evaluates them."""

from __future__ import annotations

import ast
import functools
import re

MOST_CHARACTERS = 10_000
MOST_POWERS = 3
LARGEST_EXPONENT = 99
_MOST_BITS = 64
_SYMBOL = re.compile(r"[a-z]{1,4}\d+")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,80})?(e[-+]?\d{1,3})?")
_FUNCTIONS = re.compile(
    r"Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Mod|Abs|Equality|Unequality|(Strict)?(Less|Greater)Than"
    r"|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|(Ceil|Floor|Trunc)To(Float|Int)|ToFloat|RoundToInt|RoundDecimal|FloorDiv|CeilDiv"
    r"|CleanDiv|(Int|Float)TrueDiv|ModularIndexing|PythonMod|PowByNatural|FloatPow|LShift|RShift|Where|Identity"
    r"|Piecewise|floor|ceiling"
)
_CONSTANTS = {"true", "false", "oo", "int_oo"}
_OPTIONS = {"positive", "nonnegative", "integer", "precision"}
_POWERS = {"Pow", "PowByNatural", "LShift"}  # of floats no power is large
_PLAIN = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.Compare, ast.BoolOp, ast.Tuple)


@functools.cache
def is_size(text: str) -> bool:
    """Whether a text is arithmetic over torch's symbols and functions, and so harmless to evaluate."""
    if len(text) > MOST_CHARACTERS:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    powers = [exponent for node in nodes if (exponent := _exponent(node)) is not None]
    return len(powers) <= MOST_POWERS and all(map(_is_small, powers)) and all(map(_is_known, nodes))


def _is_known(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=options):
            return _FUNCTIONS.fullmatch(name) is not None and all(option.arg in _OPTIONS for option in options)
        case ast.Name(id=name):
            return name in _CONSTANTS or any(kind.fullmatch(name) for kind in (_SYMBOL, _FUNCTIONS))
        case ast.Constant(value=str(value)):  # of a symbol, or of a number that has many digits
            return any(kind.fullmatch(value) for kind in (_SYMBOL, _NUMBER))
        case ast.Constant(value=value):
            return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MOST_BITS)
        case ast.BinOp(op=operation):
            return not isinstance(operation, ast.MatMult)
        case ast.UnaryOp() | ast.keyword():
            return True
    return isinstance(node, _PLAIN)


def _exponent(node: ast.AST) -> ast.expr | None:
    """What a power or a shift is taken by; `node` itself where that cannot be told."""
    match node:
        case ast.BinOp(op=ast.Pow() | ast.LShift(), right=exponent):
            return exponent
        case ast.Call(func=ast.Name(id=name), args=[_, exponent]) if name in _POWERS:
            return exponent
        case ast.Call(func=ast.Name(id=name)) if name in _POWERS:
            return node
    return None


def _is_small(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Call(func=ast.Name(id="Integer"), args=[inner]) | ast.UnaryOp(op=ast.USub(), operand=inner):
            return _is_small(inner)
        case ast.Constant(value=int(value)):
            return abs(value) <= LARGEST_EXPONENT
    return False
