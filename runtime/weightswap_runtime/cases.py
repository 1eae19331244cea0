"""One recorded call of a method, and whether it fits the method's signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .dtypes import DTYPES, describe
from .errors import InputMismatch
from .header import FileTensor
from .inputs import Inputs
from .signature import Integer, Leaf, Node, Signature, Tensor, leaves, unflatten

Value = str | int | None
_DTYPE_NAMES = {name: name for name in DTYPES}


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the goldens' JSON."""


class Case(Document, frozen=True):
    """One call of a method: its flat inputs and outputs, in the graph's order.

    A tensor is the name of an entry of the file, an integer is itself, a literal is None: the signature has its value.
    """

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def case_problems(
    case: Case, signature: Signature, tensors: Mapping[str, FileTensor], has_outputs: bool = True
) -> list[str]:
    """What keeps a case from being a call of the method. `tensors` are those of its file."""
    inputs = input_leaves(signature)
    outputs = leaves(signature.output) if has_outputs else []
    problems = [
        *_value_problems("inputs", inputs, case.inputs, tensors),
        *_value_problems("outputs", outputs, case.outputs, tensors),
    ]
    if not problems:
        problems += _input_problems(case, signature, tensors)
        for leaf, value in zip(outputs, case.outputs, strict=True):
            if isinstance(leaf, Tensor) and isinstance(value, str):
                text = type_problem(leaf, tensors[value].dtype, tensors[value].shape)
                problems += [f"{leaf.name}{text}"] if text else []
    return problems


def input_leaves(signature: Signature) -> list[Leaf]:
    """The flat inputs of a method, in the graph's order."""
    return [leaf for _, node in (*signature.args, *signature.kwargs) for leaf in leaves(node)]


def _value_problems(
    what: str, wanted: Sequence[Leaf], values: Sequence[Value], tensors: Mapping[str, FileTensor]
) -> Iterator[str]:
    if len(wanted) != len(values):
        yield f"expected {len(wanted)} {what}, found {len(values)}"
        return
    for leaf, value in zip(wanted, values, strict=True):
        if isinstance(leaf, Tensor):
            fits, expected = value in tensors, "the name of a tensor in the file"
        elif isinstance(leaf, Integer):
            fits, expected = type(value) is int, "an integer"
        else:
            fits, expected = value is None, "null, as the signature has the literal"
        if not fits:
            yield f"{leaf.name}: expected {expected}, found {value!r:.80}"


def _input_problems(case: Case, signature: Signature, tensors: Mapping[str, FileTensor]) -> tuple[str, ...]:
    """What a server would refuse in a call with these inputs."""
    values = iter([tensors[value] if isinstance(value, str) else value for value in case.inputs])

    def tree(node: Node) -> Any:
        return unflatten(node, [next(values) for _ in leaves(node)])

    check = Inputs(case.method, signature, FileTensor, _DTYPE_NAMES, _nowhere, tuple)
    try:
        args = tuple(tree(node) for _, node in signature.args)
        check.flatten(args, {name: tree(node) for name, node in signature.kwargs})
    except InputMismatch as error:
        return error.problems
    return ()


def _nowhere(tensor: FileTensor) -> None:
    """A tensor of a file is on no device, so on no wrong one."""


def type_problem(leaf: Tensor, dtype: str, shape: Sequence[int]) -> str | None:
    """Why a recorded tensor cannot be that output; None if it can. Sizes that vary are left to a run."""
    fits = len(shape) == len(leaf.shape) and all(
        wanted == size for wanted, size in zip(leaf.shape, shape, strict=True) if isinstance(wanted, int)
    )
    if fits and dtype == leaf.dtype:
        return None
    expected = f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return f": expected {expected}, found {describe(dtype, shape)}"
