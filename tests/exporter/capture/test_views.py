"""Writes through possible views: the analysis of a program finds exactly what an eager call changes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from weightswap_exporter.capture.programs import mutated_buffers
from weightswap_exporter.modules.tensors import named_tensors
from weightswap_runtime import CaptureError

View = Callable[[torch.Tensor], torch.Tensor]
X = torch.arange(8.0).reshape(2, 4) + 1
VIEWS: dict[str, View] = {
    "reshape": lambda t: t.reshape(4, -1),
    "reshape of a transpose": lambda t: t.mT.reshape(-1, 2),
    "contiguous": lambda t: t.contiguous(),
    "contiguous of a transpose": lambda t: t.mT.contiguous(),
    "chunk": lambda t: t.chunk(2)[1],
    "tensor_split": lambda t: torch.tensor_split(t, 2)[0],
    "unflatten": lambda t: t.unflatten(-1, (-1, 2)).flatten(0, 1),
    "ravel": lambda t: t.ravel().unsqueeze(0),
    "to": lambda t: t.to(torch.float32),
    "to the device": lambda t: t.to("cpu"),
    "to a copy": lambda t: t.to(torch.float32, copy=True),
    "to another type": lambda t: t.double(),
    "type_as": lambda t: t.type_as(X),
    "dropout": lambda t: functional.dropout(t, 0.5, training=False),
    "alpha_dropout": lambda t: functional.alpha_dropout(t, 0.5, training=False),
    "positive": torch.positive,
    "real": torch.real,
    "conj": lambda t: t.conj().resolve_conj().resolve_neg(),
    "expand_as": lambda t: t.expand_as(t),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, t)[0],
    "movedim": lambda t: t.movedim(0, -1),
    "atleast_3d": lambda t: torch.atleast_3d(t).squeeze(-1),
    "to_dense": lambda t: t.to_dense(),
    "einsum": lambda t: torch.einsum("ij->ji", t),
    "meshgrid": lambda t: torch.meshgrid(t[0], t[0], indexing="ij")[0][:, 0],
    "detach": lambda t: t.detach(),
    "a cat of one": lambda t: torch.cat([t]),
    "linear": lambda t: functional.linear(t, t),
    "pad by nothing": lambda t: functional.pad(t, (0, 0)),
    "flip": lambda t: t.flip(0),
    "an index": lambda t: t[torch.tensor([0, 1])],
}
CHAINED = VIEWS.keys() - {"meshgrid", "an index", "linear", "einsum", "tensor_split", "chunk"}  # of any shape


class Writes(nn.Module):
    """Module that adds to the result of `views` of a parameter or a buffer."""

    def __init__(self, name: str, views: list[View]) -> None:
        super().__init__()
        self.name, self.views = name, views
        self.weight = nn.Parameter(torch.ones(2, 4), requires_grad=False)
        self.register_buffer("state", torch.ones(2, 4))
        self.register_buffer("other", torch.ones(2, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = getattr(self, self.name)
        for view in self.views:
            value = view(value)
        value.add_(1)
        return x + self.other + value.sum()


def changed_by_a_call(model: nn.Module) -> set[str]:
    """Return the FQNs of parameters and buffers that an eager call changes."""
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with torch.no_grad():
        model(X)
    return {name for name, tensor in named_tensors(model).items() if not torch.equal(tensor, before[name])}


def found_in_the_program(model: nn.Module) -> set[str]:
    program = torch.export.export(model, (X,), strict=False)
    try:
        return set(mutated_buffers(program))
    except CaptureError as error:
        return set(re.findall(r"changes the parameter\(s\) (\w+);", str(error)))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_write_through_what_may_be_a_view_is_found(view: View) -> None:
    model = Writes("weight", [view]).eval()
    found = found_in_the_program(model)
    assert found == changed_by_a_call(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_writes_through_several_of_them_are_found(seed: int) -> None:
    views = random.Random(seed).choices([VIEWS[name] for name in sorted(CHAINED)], k=3)
    model = Writes("state", views).eval()
    found = found_in_the_program(model)
    assert found == changed_by_a_call(model)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.conv(x)))
        y += x
        return self.act(y)


def blocks(act: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), act]


IMAGE = torch.ones(2, 4, 8, 8)
IN_PLACE: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "activations": (nn.Sequential(*blocks(nn.Hardswish(inplace=True)), *blocks(nn.SiLU(inplace=True))), IMAGE),
    "residuals": (nn.Sequential(Block(), Block()), IMAGE),
    "other norms": (nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.ReLU6(inplace=True)), IMAGE),
    "upwards": (nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ELU(inplace=True)), IMAGE),
    "linear": (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.LeakyReLU(inplace=True)), IMAGE),
    "a composed activation": (nn.Sequential(nn.RReLU(), nn.Dropout(inplace=True)), IMAGE),
}


@pytest.mark.parametrize(("model", "x"), IN_PLACE.values(), ids=IN_PLACE)
def test_what_is_written_to_results_of_layers_is_not_functionalised(model: nn.Module, x: torch.Tensor) -> None:
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: Dim("batch", max=9)},), strict=False)
    with mock.patch.object(ExportedProgram, "run_decompositions") as costly:
        assert mutated_buffers(program) == frozenset()
    costly.assert_not_called()
