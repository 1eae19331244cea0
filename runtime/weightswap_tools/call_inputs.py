"""Conversion of named tensors to the arguments of a call, and of its outputs to tensor contents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import InputMismatch
from weightswap_runtime.format.signature import Integer, Literal, Signature, call_arguments, flatten, input_leaves
from weightswap_runtime.live.model import Model, engine_of
from weightswap_runtime.tensors.content import TensorBytes, as_array
from weightswap_runtime.tensors.dtypes import describe, has_fractions


def named_inputs(method: str, signature: Signature, tensors: Mapping[str, TensorBytes]) -> list[Any]:
    """Return flat inputs in the graph's order: tensors as contents, integers and literals as Python values.

    Raises InputMismatch for missing and unknown names, and for an integer input that is not a single whole number.
    """
    expected = input_leaves(signature)
    names = {leaf.name for leaf in expected if not isinstance(leaf, Literal)}
    problems = [f"{name}: missing from the inputs (--input FILE)" for name in sorted(names - tensors.keys())]
    known = ", ".join(sorted(names))
    problems += [f"{name}: not an input (the inputs are {known})" for name in sorted(tensors.keys() - names)]
    integers = {leaf.name for leaf in expected if isinstance(leaf, Integer)} & tensors.keys()
    problems += [
        f"{name}: expected one integer, got {describe(tensors[name])}"
        for name in sorted(integers)
        if math.prod(tensors[name].shape) != 1 or has_fractions(tensors[name].dtype)
    ]
    if problems:
        raise InputMismatch(method, problems)
    values = {name: int(as_array(tensors[name]).item()) if name in integers else tensors[name] for name in names}
    return [leaf.content if isinstance(leaf, Literal) else values[leaf.name] for leaf in expected]


def engine_inputs(flat: Iterable[Any], engine: Engine) -> list[Any]:
    """Return flat inputs with contents converted to the engine's tensors."""
    return [engine.tensor(value) if isinstance(value, TensorBytes) else value for value in flat]


def output_contents(flat: Iterable[Any], engine: Engine) -> list[Any]:
    """Return flat outputs with the engine's tensors converted to contents."""
    return [engine.content(value) if isinstance(value, engine.tensor_type) else value for value in flat]


def call_flat(model: Model, method: str, flat: Iterable[Any], variants: Mapping[str, str] | None = None) -> list[Any]:
    """Call a method with flat inputs and return its flat outputs; tensors are contents. variants: as in a call."""
    engine, signature = engine_of(model), model.signatures[method]
    args, kwargs = call_arguments(signature, engine_inputs(flat, engine))
    if variants:
        kwargs["variants"] = variants
    return output_contents(flatten(signature.output, model.method(method)(*args, **kwargs)), engine)
