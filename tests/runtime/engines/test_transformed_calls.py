"""Calls within torch.func's transformations and forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.tiny import TinyArtifact, WriteWeights, X
from weightswap_runtime import InputMismatch, Model, load

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, of forward mode
Transform = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]
TRANSFORMS: dict[str, Transform] = {
    "vmap": lambda call: torch.vmap(lambda x: call(x[None]))(X),
    "vmap of vmap": lambda call: torch.vmap(torch.vmap(lambda x: call(x.expand(2, 3))))(X),
    "vmap of something else": lambda call: torch.vmap(lambda x: x + call(X)[0, 0])(X),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(X),
    "vjp": lambda call: torch.func.vjp(call, X),
    "jvp": lambda call: torch.func.jvp(call, (X,), (X,)),
    "jvp of something else": lambda call: torch.func.jvp(lambda x: x + call(X).sum(), (X,), (X,)),
    "jacrev": lambda call: torch.func.jacrev(call)(X),
    "jacfwd": lambda call: torch.func.jacfwd(call)(X),
    "hessian": lambda call: torch.func.hessian(lambda x: call(x).sum())(X),
    "functionalize": lambda call: torch.func.functionalize(call)(X),
}


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights) -> Model:
    return load(tiny.path, weight_file(0))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transformed_call_is_refused_by_name(transform: Transform, model: Model) -> None:
    with model.pin() as session, model.stage(model.history[-1].source) as staged:
        for call in (model, session, staged):
            with pytest.raises(InputMismatch, match="transforms: instead of vmap, pass it the whole batch") as caught:
                transform(call)
            assert caught.value.method == "forward"
            assert caught.value.problems
    assert torch.equal(model(X), TinyArtifact.eager(0, X))


def test_dual_tensors_are_refused(model: Model) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(InputMismatch, match="dual tensors, as its outputs have no tangents"):
            model(dual)
        assert torch.equal(model(X), TinyArtifact.eager(0, X))
        assert torch.equal(model(forward_ad.unpack_dual(dual).primal), TinyArtifact.eager(0, X))


def test_inputs_that_require_gradients_are_fine(model: Model) -> None:
    x = X.clone().requires_grad_()
    output = model(x)
    assert not output.requires_grad
    assert torch.equal(output, TinyArtifact.eager(0, X))
    with torch.no_grad():
        assert torch.equal(model(x), TinyArtifact.eager(0, X))


@pytest.mark.slow
def test_a_compiled_function_may_call_it(model: Model, weight_file: WriteWeights) -> None:
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager")
    assert torch.equal(compiled(X), TinyArtifact.eager(0, X) + 1)
    model.swap(weight_file(1))
    assert torch.equal(compiled(X), TinyArtifact.eager(1, X) + 1)
    with pytest.raises(InputMismatch):
        torch.compile(torch.vmap(lambda row: model(row[None])), backend="eager")(X)
    with forward_ad.dual_level(), pytest.raises(InputMismatch):
        compiled(forward_ad.make_dual(X, torch.ones_like(X)))
