"""Validation of the JSON documents in a graph's archive, before torch reads them.

`torch.export.load` generates source code from names, follows dotted paths with `getattr`, and evaluates sizes and
guards. So each text must be valid for its field; a text in a field that is not listed here is refused.
"""

from __future__ import annotations

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

from weightswap_runtime.engines.graphs.operators import ForeignFunction, MissingOperator, check_strings, find_operator
from weightswap_runtime.engines.graphs.schema import UnknownPart

from .size_check import is_size

_MOST_SHOWN = 80
_RECORD = re.compile(r"(weight|tensor)_\d+")
_QUOTES = frozenset("\"'\\")
_CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict"}
_fields = functools.cache(get_type_hints)


def is_identifier(text: str) -> bool:
    """Return whether a text can be the name of a variable, and is not one of Python's `__special__` names."""
    return text.isidentifier() and not iskeyword(text) and not _is_special(text)


def is_path(text: str) -> bool:
    """Return whether a text can be an FQN: torch writes its parts between quotes into source code."""
    return all(
        part and part.isprintable() and not _QUOTES.intersection(part) and not _is_special(part)
        for part in text.split(".")
    )


def is_tree(text: str) -> bool:
    """Return whether a text is torch's JSON for a tree of tuples, lists and dicts with plain keys."""
    return _is_valid_tree(text, _is_container)


def is_inputs(text: str) -> bool:
    """Return whether a text is such a tree for a method's inputs, whose keywords become parameters of a function."""
    return _is_valid_tree(text, _is_inputs)


def _is_valid_tree(text: str, check: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        version, tree = json.loads(text)
        return version == 1 and _is_container(tree) and check(tree)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _is_special(name: str) -> bool:
    """Return whether Python reserves a name; it normalises names, so full-width letters count too."""
    plain = unicodedata.normalize("NFKC", name)
    return plain.startswith("__") and plain.endswith("__")


def _is_inputs(tree: dict[str, Any]) -> bool:
    args, kwargs = tree["children_spec"]
    names = json.loads(kwargs["context"])
    kinds = [node["type"] for node in (tree, args, kwargs)]
    return kinds == ["builtins.tuple", "builtins.tuple", "builtins.dict"] and all(map(is_identifier, names))


def _is_container(tree: dict[str, Any]) -> bool:
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    keys = json.loads(context) if context is not None else None
    plain = isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
    known = (kind is None and context is None) or (
        kind in _CONTAINERS and (plain if kind == "builtins.dict" else keys is None)
    )
    return known and len(tree) == 3 and all(map(_is_container, children))


def _any_text(_: str) -> bool:
    return True


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
    "ModuleCallSignature.in_spec": is_inputs,
    "ModuleCallSignature.out_spec": is_tree,
    "Node.target": lambda text: find_operator(text) is not None,
    "SymExpr.expr_str": is_size,
    "keys of ExportedProgram.range_constraints": is_size,
    "Device.type": lambda text: text in ("cpu", "cuda", "meta"),
    "Argument.as_string": _any_text,  # torch quotes it; _call_problems checks it
    "Argument.as_strings": _any_text,
    "ConstantValue.as_string": _any_text,
    "keys of Node.metadata": lambda text: text == "nn_module_stack",
    "Node.metadata": str.isprintable,
    "keys of ExportedProgram.opset_version": str.isidentifier,
    "ExportedProgram.verifiers": lambda text: text in ("ATEN", "TRAINING", "TOSA", "EDGE"),
    "ExportedProgram.torch_version": str.isprintable,
}


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
        check_strings(find_operator(node["target"]), (kind for item in node["inputs"] for kind in item["arg"]))
    except ForeignFunction as error:
        yield f"calls {error}"
    except (MissingOperator, UnknownPart):
        pass  # _text_problems reports it
