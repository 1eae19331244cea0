"""Names that mean something in Python, in C++, or in what compilers generate."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.support.compiled import needs_compiler
from tests.support.setups import loaded
from weightswap_exporter import MethodSpec, export

BUFFERS = ("class", "namespace", "buf0", "constants_", "tensor_0", "None")
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Named(nn.Module):
    """Model with tensors, modules, inputs, outputs and a method of such names."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("in", nn.Linear(4, 4))
        for name in BUFFERS:
            self.register_buffer(name, torch.rand(4))
        self.register_buffer("def", torch.rand(4), persistent=False)
        self.register_buffer("del", torch.zeros(4))
        setattr(self, "global", torch.rand(4))

    def forward(self, values: dict[str, torch.Tensor], **others: torch.Tensor) -> dict[str, torch.Tensor]:
        state = getattr(self, "del")
        state[:2].add_(1)  # a view: torch must say what it changes
        x = getattr(self, "in")(values["from"]) * others["lambda"] + others["a-b"] + getattr(self, "global")
        for name in BUFFERS:
            x = x.sin() + getattr(self, name)
        return {"if": x + getattr(self, "def"), "try": state + values["from"]}

    def only(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "class")


setattr(Named, "import", Named.only)


@pytest.mark.parametrize("engine", ["torch", "onnx", pytest.param("aoti", marks=[pytest.mark.slow, needs_compiler])])
def test_any_name_will_do(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [Named().eval() for _ in range(2)]
    for name in ("def", "global"):  # constants of the graph
        setattr(models[1], name, getattr(models[0], name))
    args, kwargs = ({"from": X},), {"lambda": X + 1, "a-b": X * 2}
    methods = {"forward": MethodSpec("forward", args, kwargs), "import": MethodSpec("import", (X,))}
    artifact = export(deepcopy(models[0]), methods=methods, out=tmp_path / "a.artifact", engines=[engine])
    served = loaded(artifact, tmp_path, models[1], engine=engine)
    for model in models:
        served.swap(model)
        with served.new_context() as context, torch.no_grad():
            for _ in range(2):
                got = served(*numpy(engine, args), **numpy(engine, kwargs), context=context)
                for name, expected in model(*args, **kwargs).items():
                    torch.testing.assert_close(torch.as_tensor(got[name]), expected, rtol=1e-4, atol=1e-5)
        got = getattr(served, "import")(*numpy(engine, (X,)))
        torch.testing.assert_close(torch.as_tensor(got), model.only(X))


def numpy(engine: str, values: Any) -> Any:
    return pytree.tree_map(torch.Tensor.numpy, values) if engine == "onnx" else values


class Numbered(nn.Module):
    """Weights that are called as the values that ONNX's exporter numbers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("tensor_2", "tensor_2_"):  # the literal below is the third
            self.register_parameter(name, nn.Parameter(torch.rand(4)))

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            x = (x * weight).sin() + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x + others["class"] - others["keyword_0"]


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_names_that_are_given_to_values_are_free_for_weights_and_arguments(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Numbered().eval(), {"class": X + 1, "keyword_0": X * 2}
    artifact = export(deepcopy(model), (X,), inputs, out=tmp_path / "a.artifact", engines=[engine])
    x, given = numpy(engine, (X, inputs))
    with torch.no_grad():
        found = torch.as_tensor(loaded(artifact, tmp_path, model, engine=engine)(x, **given))
        assert torch.allclose(found, model(X, **inputs), atol=1e-6)
