"""Tensors of this process that cannot be the weights: after each refusal the served model is unchanged.

What every source can bring is in `test_every_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.tiny import TinyArtifact, Values, WriteWeights, serves
from weightswap_runtime import SwapError, WeightsMismatch, load


class Refused(NamedTuple):
    """What is changed in good values, the error, and a part of its text."""

    change: dict[Any, Any]
    error: type[SwapError]
    says: str


class Parts(torch.Tensor):
    """A tensor of a class of its own."""


def freed() -> torch.Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(4)
    return tensor


REFUSED = {
    "no values": Refused({"bias": torch.ones(5, device="meta")}, WeightsMismatch, "bias: has no values"),
    "not initialized": Refused({"bias": nn.UninitializedParameter()}, WeightsMismatch, "bias: has no values"),
    "sparse": Refused({"bias": torch.ones(5).to_sparse()}, WeightsMismatch, r"give a dense tensor, .* to_dense\(\)"),
    "memory that was freed": Refused({"bias": freed()}, WeightsMismatch, "its memory was freed"),
    "a class of its own": Refused(
        {"bias": torch.ones(5).as_subclass(Parts)}, WeightsMismatch, "bias: a Parts, not a plain tensor; give its parts"
    ),
    "a dtype that no weight has": Refused({"bias": torch.empty(5, dtype=torch.bits8)}, WeightsMismatch, "torch.bits8"),
    "an array of objects": Refused({"bias": np.array([None] * 5)}, WeightsMismatch, "numpy's dtype object"),
    "no tensor": Refused({"bias": [1.0] * 5}, WeightsMismatch, "bias: no tensor, but of the type list"),
    "a number": Refused({"step": 3}, WeightsMismatch, "step: no tensor, but of the type int"),
    "a name that is no text": Refused({3: torch.ones(5)}, WeightsMismatch, "3: a name of the type int"),
}


def changed(change: dict[Any, Any]) -> dict[Any, Any]:
    values: dict[Any, Any] = {**TinyArtifact.values(1), **change}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("form", ["mapping", "iterator", "background"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_nothing_changes(
    case: Refused, form: str, tiny: TinyArtifact, weight_file: WriteWeights, residency: Any
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    values = changed(case.change)
    with pytest.raises(case.error, match=case.says):
        model.stage(
            iter(values.items()) if form == "iterator" else values,
            allow_nonfinite=False,
            background=form == "background",
        ).wait()
    assert (model.generation, serves(model, 0)) == (0, True)
    model.swap(TinyArtifact.values(1))
    assert serves(model, 1)


def test_a_mapping_has_all_its_problems_named_at_once(tiny: TinyArtifact) -> None:
    with pytest.raises(WeightsMismatch) as caught:
        load(tiny.path).swap(changed({"bias": torch.ones(4), "weight": torch.ones(2), "odd": torch.ones(1)}))
    assert len(caught.value.problems) == 3
    with pytest.raises(WeightsMismatch) as caught:
        load(tiny.path).swap({"model": TinyArtifact.values(0), "step": 3})  # type: ignore[dict-item]
    assert caught.value.problems == (
        "model: a dict; if the tensors are in it, give that dict itself",
        "step: no tensor, but of the type int; give a torch.Tensor or a numpy.ndarray",
    )


class Lost(Exception):
    """What a trainer raises."""


def twice(values: Values) -> Iterator[Any]:
    yield from values.items()
    yield "bias", values["bias"]


def raising(values: Values) -> Iterator[Any]:
    yield next(iter(values.items()))
    raise Lost("the trainer is gone")


def no_pairs(values: Values) -> Iterator[Any]:
    yield next(iter(values.items()))
    yield "bias"


def too_late(values: Values) -> Iterator[Any]:
    """An iterator that goes on after an impossible name would be asked for no more."""
    yield "other", torch.ones(3)
    raise AssertionError("asked for more")


ITERATORS: dict[str, tuple[Callable[[Values], Iterator[Any]], type[Exception], str]] = {
    "a name twice": (twice, WeightsMismatch, "bias: came twice"),
    "an exception": (raising, Lost, "the trainer is gone"),
    "items that are no pairs": (no_pairs, WeightsMismatch, "item 1 is a str, not a name with a tensor"),
    "an impossible name": (too_late, WeightsMismatch, "other: unexpected"),
    "nothing": (lambda values: iter(()), WeightsMismatch, "bias: missing"),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("items", "error", "says"), ITERATORS.values(), ids=ITERATORS)
def test_an_iterator_that_fails_changes_nothing(
    items: Callable[[Values], Iterator[Any]],
    error: type[Exception],
    says: str,
    background: bool,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: Any,
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    with pytest.raises(error, match=says):
        model.stage(items(TinyArtifact.values(1)), background=background).wait()
    assert (model.generation, serves(model, 0)) == (0, True)
    model.swap(iter(TinyArtifact.values(1).items()))
    assert serves(model, 1)
