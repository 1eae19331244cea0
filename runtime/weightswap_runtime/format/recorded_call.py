"""Recorded calls of a method, and their check against the method's signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from weightswap_runtime.errors import InputMismatch
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.dtypes import DTYPES, Typed, describe

from .call_check import CallCheck
from .signature import Integer, Leaf, Signature, Tensor, call_arguments, input_leaves, leaves

Value = str | int | None
_DTYPE_NAMES = {name: name for name in DTYPES}


class GoldensPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the goldens' JSON objects."""


class Case(GoldensPart, frozen=True):
    """Recorded call of a method: its flat inputs and outputs, in the graph's order.

    A tensor is stored as the name of the file's tensor, an integer as itself, a literal as None: the signature has its
    value.
    """

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def case_problems(
    case: Case, signature: Signature, tensors: Mapping[str, TensorBytes], has_outputs: bool = True
) -> list[str]:
    """Return the reasons why a case cannot be a call of the method. `tensors` are those of the case's file."""
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
                text = type_problem(leaf, tensors[value])
                problems += [f"{leaf.name}{text}"] if text else []
    return problems


def _value_problems(
    kind: str, expected_leaves: Sequence[Leaf], values: Sequence[Value], tensors: Mapping[str, TensorBytes]
) -> Iterator[str]:
    if len(expected_leaves) != len(values):
        yield f"expected {len(expected_leaves)} {kind}, found {len(values)}"
        return
    for leaf, value in zip(expected_leaves, values, strict=True):
        if isinstance(leaf, Tensor):
            fits, expected = value in tensors, "the name of a tensor in the file"
        elif isinstance(leaf, Integer):
            fits, expected = type(value) is int, "an integer"
        else:
            fits, expected = value is None, "null, as the signature has the literal"
        if not fits:
            yield f"{leaf.name}: expected {expected}, found {value!r:.80}"


def _input_problems(case: Case, signature: Signature, tensors: Mapping[str, TensorBytes]) -> tuple[str, ...]:
    """Return the problems for which a server would refuse a call with these inputs."""
    flat = [tensors[value] if isinstance(value, str) else value for value in case.inputs]
    # a tensor of a file is on no device, so the check of the device is left out
    check = CallCheck(case.method, signature, TensorBytes, _DTYPE_NAMES, lambda _: None, id)
    try:
        check.flatten(*call_arguments(signature, flat))
    except InputMismatch as error:
        return error.problems
    return ()


def type_problem(leaf: Tensor, recorded: Typed) -> str | None:
    """Return why a recorded tensor cannot be the output `leaf`; None if it can. Dynamic sizes are not checked here."""
    fits = len(recorded.shape) == len(leaf.shape) and all(
        expected == size for expected, size in zip(leaf.shape, recorded.shape, strict=True) if isinstance(expected, int)
    )
    if fits and recorded.dtype == leaf.dtype:
        return None
    return f": expected {leaf.dtype}[{', '.join(map(str, leaf.shape))}], found {describe(recorded)}"
