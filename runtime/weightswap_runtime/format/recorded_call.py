"""One recorded call of a method, and whether it fits the method's signature."""

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
    """A part of the goldens' JSON."""


class Case(GoldensPart, frozen=True):
    """One call of a method: its flat inputs and outputs, in the graph's order.

    A tensor is the name of an entry of the file, an integer is itself, a literal is None: the signature has its value.
    """

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def case_problems(
    case: Case, signature: Signature, tensors: Mapping[str, TensorBytes], has_outputs: bool = True
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
                text = type_problem(leaf, tensors[value])
                problems += [f"{leaf.name}{text}"] if text else []
    return problems


def _value_problems(
    what: str, wanted: Sequence[Leaf], values: Sequence[Value], tensors: Mapping[str, TensorBytes]
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


def _input_problems(case: Case, signature: Signature, tensors: Mapping[str, TensorBytes]) -> tuple[str, ...]:
    """What a server would refuse in a call with these inputs."""
    flat = [tensors[value] if isinstance(value, str) else value for value in case.inputs]
    # a tensor of a file is on no device, so on no wrong one
    check = CallCheck(case.method, signature, TensorBytes, _DTYPE_NAMES, lambda _: None, id)
    try:
        check.flatten(*call_arguments(signature, flat))
    except InputMismatch as error:
        return error.problems
    return ()


def type_problem(leaf: Tensor, recorded: Typed) -> str | None:
    """Why a recorded tensor cannot be that output; None if it can. Sizes that vary are left to a run."""
    fits = len(recorded.shape) == len(leaf.shape) and all(
        wanted == size for wanted, size in zip(leaf.shape, recorded.shape, strict=True) if isinstance(wanted, int)
    )
    if fits and recorded.dtype == leaf.dtype:
        return None
    expected = f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return f": expected {expected}, found {describe(recorded)}"
