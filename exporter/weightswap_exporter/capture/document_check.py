"""Checks of a graph's document before torch opens it: what is allowed in it is listed here, all else is refused.

Opening an archive, torch evaluates sizes as Python, builds source code of names, and imports what operators name: an
artifact from elsewhere could run anything. So each text of torch's schema has a check of its own, and one without a
check is not allowed. Sizes must be harmless, and quick to evaluate: SymPy would take forever for a short text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from enum import IntEnum
from keyword import iskeyword
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch._export.serde import schema

from weightswap_runtime.engines.graph_archive import UnknownPart
from weightswap_runtime.engines.operators import ForeignFunction, MissingOperator, check_strings, find_operator

_MOST_CHARACTERS = 10_000  # of the text of a size; this and the next limits keep its evaluation quick
_MOST_CHOICES, _MOST_CHOSEN = 20, 8  # calls of Max and Min in a size, and their arguments: SymPy compares all pairs
_MOST_POWERS, _LARGEST_EXPONENT = 3, 99  # in a size
_MOST_DIGITS = 1000  # of the precision that a number in a size asks for
_MOST_BITS = 64  # of an integer in a size
_MOST_SHOWN = 80  # characters of a text in an error
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
_RECORD = re.compile(r"(weight|tensor)_\d+")
_QUOTES = frozenset("\"'\\")
_CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict"}
_fields = functools.cache(get_type_hints)


def program_problems(document: Any) -> Iterator[str]:
    """Yield what is not allowed in a program's document, as `json.loads` returns it."""
    return _problems(document, schema.ExportedProgram, "")


def tensor_problems(document: Any) -> Iterator[str]:
    """Yield what is not allowed in the document that lists a program's tensors."""
    return _problems(document, schema.PayloadConfig, "")


def _problems(value: Any, kind: Any, field: str) -> Iterator[str]:
    """Yield the problems of a value of the class and field `field`, whose type is `kind`."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
        if value is None:
            return
    if get_origin(kind) is list and isinstance(value, list):
        for item in value:
            yield from _problems(item, get_args(kind)[0], field)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _problems(key, str, f"keys of {field}")
            yield from _problems(item, get_args(kind)[1], field)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        yield from _part_problems(value, kind)
    else:
        yield from _leaf_problems(value, kind, field)


def _part_problems(value: dict[str, Any], kind: type) -> Iterator[str]:
    fields = _fields(kind)
    for name, item in value.items():
        if name not in fields:
            yield f"{kind.__name__} has no {name!r:.{_MOST_SHOWN}}"
        else:
            yield from _problems(item, fields[name], f"{kind.__name__}.{name}")
    if kind is schema.Node:
        yield from _call_problems(value)


def _leaf_problems(value: Any, kind: Any, field: str) -> Iterator[str]:
    if kind is str and isinstance(value, str):
        yield from _text_problems(value, field)
    elif kind is float:
        if not isinstance(value, int | float) and value not in ("Infinity", "-Infinity", "NaN"):
            yield f"{field}: {value!r:.{_MOST_SHOWN}} is not a number"
    elif not isinstance(value, int) or (kind not in (int, bool) and not issubclass(kind, IntEnum)):
        yield f"{field}: {value!r:.{_MOST_SHOWN}} is not allowed there"


def _text_problems(text: str, field: str) -> Iterator[str]:
    try:
        if field not in _TEXTS:
            yield f"{field} is not allowed in a graph"
        elif not _TEXTS[field](text):
            yield f"{field}: {text!r:.{_MOST_SHOWN}} is not allowed there"
    except (ForeignFunction, UnknownPart) as error:
        yield f"calls {error}"
    except MissingOperator:
        yield f"calls {text!r:.{_MOST_SHOWN}}, which this process does not have"


def _call_problems(node: dict[str, Any]) -> Iterator[str]:
    try:
        check_strings(find_operator(node["target"]), [item["arg"] for item in node["inputs"]])
    except ForeignFunction as error:
        yield f"calls {error}"
    except (MissingOperator, UnknownPart):
        pass  # _text_problems reports it


def is_identifier(text: str) -> bool:
    """Return whether a text can be the name of a variable, and is not one of Python's `__special__` names."""
    return text.isidentifier() and not iskeyword(text) and not _is_special(text)


def is_path(text: str) -> bool:
    """Return whether a text can be an FQN: torch writes its parts between quotes into source code."""
    return all(
        part and part.isprintable() and not _QUOTES.intersection(part) and not _is_special(part)
        for part in text.split(".")
    )


def _is_special(name: str) -> bool:
    """Return whether Python reserves a name; it normalises names, so full-width letters count too."""
    plain = unicodedata.normalize("NFKC", name)
    return plain.startswith("__") and plain.endswith("__")


def _is_tree(text: str) -> bool:
    """Return whether a text is torch's JSON for a tree of tuples, lists and dicts with plain keys."""
    return _is_valid_tree(text, _is_container)


def _is_inputs(text: str) -> bool:
    """Return whether a text is such a tree for a method's inputs, whose keywords become parameters of a function."""
    return _is_valid_tree(text, lambda tree: _is_container(tree) and _has_keywords(tree))


def _is_valid_tree(text: str, check: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        version, tree = json.loads(text)
        return version == 1 and check(tree)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _is_container(tree: dict[str, Any]) -> bool:
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    keys = json.loads(context) if context is not None else None
    plain = isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
    known = (kind is None and context is None) or (
        kind in _CONTAINERS and (plain if kind == "builtins.dict" else keys is None)
    )
    return known and len(tree) == 3 and all(map(_is_container, children))


def _has_keywords(tree: dict[str, Any]) -> bool:
    args, kwargs = tree["children_spec"]
    names = json.loads(kwargs["context"])
    kinds = [node["type"] for node in (tree, args, kwargs)]
    return kinds == ["builtins.tuple", "builtins.tuple", "builtins.dict"] and all(map(is_identifier, names))


@functools.cache
def is_size(text: str) -> bool:
    """Return whether a text is only arithmetic over torch's symbols and functions: harmless and quick to evaluate."""
    if len(text) > _MOST_CHARACTERS:
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
    return len(powers) <= _MOST_POWERS and sum(name in _CHOICES for name in called) <= _MOST_CHOICES


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
    known = _FUNCTIONS.fullmatch(name) is not None or (name in _CHOICES and len(arguments) <= _MOST_CHOSEN)
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
            return 0 < digits <= _MOST_DIGITS
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
            return abs(value) <= _LARGEST_EXPONENT
        case ast.Constant(value=float()) | ast.Call(func=ast.Name(id="Float" | "Rational")):  # a float stays one
            return _is_term(exponent)
    return False


# Checks of texts, by class and field of torch's schema; fields that are mappings have checks of their keys, too.
_TEXTS: dict[str, Callable[[str], bool]] = {
    "TensorArgument.name": is_identifier,
    "SymIntArgument.as_name": is_identifier,
    "SymFloatArgument.as_name": is_identifier,
    "SymBoolArgument.as_name": is_identifier,
    "GraphArgument.name": is_identifier,
    "Node.name": is_identifier,
    "NamedArgument.name": lambda text: text in ("", "from") or is_identifier(text),  # uniform_ has an argument `from`
    "InputToConstantInputSpec.name": is_identifier,
    "UserInputMutationSpec.user_input_name": is_identifier,
    "ModuleCallSignature.forward_arg_names": is_identifier,
    "keys of Argument.as_string_to_argument": is_identifier,
    "keys of Graph.tensor_values": is_identifier,
    "keys of Graph.sym_int_values": is_identifier,
    "keys of Graph.sym_bool_values": is_identifier,
    "keys of Graph.sym_float_values": is_identifier,
    "InputToParameterSpec.parameter_name": is_path,
    "InputToBufferSpec.buffer_name": is_path,
    "InputToTensorConstantSpec.tensor_constant_name": is_path,
    "BufferMutationSpec.buffer_name": is_path,
    "ModuleCallEntry.fqn": lambda text: not text or is_path(text),
    "keys of PayloadConfig.config": is_path,
    "PayloadMeta.path_name": lambda text: _RECORD.fullmatch(text) is not None,
    "ModuleCallSignature.in_spec": _is_inputs,
    "ModuleCallSignature.out_spec": _is_tree,
    "Node.target": lambda text: find_operator(text) is not None,
    "SymExpr.expr_str": is_size,
    "keys of ExportedProgram.range_constraints": is_size,
    "Device.type": lambda text: text in ("cpu", "cuda", "meta"),
    "Argument.as_string": lambda _: True,  # torch quotes it; _call_problems checks it
    "Argument.as_strings": lambda _: True,
    "ConstantValue.as_string": lambda _: True,
    "keys of Node.metadata": lambda text: text == "nn_module_stack",
    "Node.metadata": str.isprintable,
    "keys of ExportedProgram.opset_version": str.isidentifier,
    "ExportedProgram.verifiers": lambda text: text in ("ATEN", "TRAINING", "TOSA", "EDGE"),
    "ExportedProgram.torch_version": str.isprintable,
}
