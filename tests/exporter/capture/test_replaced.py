"""Calls that replace buffers by other tensors: the next call sees them, as in eager mode, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.setups import equal
from weightswap_exporter import export, pack
from weightswap_runtime import CaptureError, load


class Does(nn.Module):
    """Module that calls `act(self, x)`, which replaces buffers."""

    def __init__(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("one", torch.zeros(2, 4))
        self.register_buffer("two", torch.ones(2, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("tied", self.calls)

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self, x)


def doing(*values: Any) -> Any:
    """The last of what a lambda does."""
    return values[-1]


def returns_the_old(model: Any, x: torch.Tensor) -> Any:
    old = model.one
    model.one = model.one + x * model.weight
    return {"old": old, "row": old[0], "new": model.one}


def exchanges(model: Any, x: torch.Tensor) -> Any:
    model.one, model.two = model.two, model.one
    return x * model.weight + model.one


def exchanges_views(model: Any, x: torch.Tensor) -> Any:
    model.one, model.two = model.two.detach(), model.one[:]
    return x * model.weight + model.one


def delays(model: Any, x: torch.Tensor) -> Any:
    model.one = model.two
    model.two = model.two + x
    return model.one * model.weight


@pytest.mark.parametrize("deep", [0, 1, 2])
@pytest.mark.parametrize("act", [returns_the_old, exchanges, exchanges_views, delays])
@torch.no_grad()
def test_the_next_call_sees_what_is_assigned(act: Callable[..., Any], deep: int, tmp_path: Path) -> None:
    eager: nn.Module = Does(act)
    for _ in range(deep):
        eager = nn.Sequential(eager)
    eager.eval()
    artifact = export(eager, (torch.ones(2, 4),), out=tmp_path / "a.artifact")
    served = load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)
    with served.new_context() as context:
        for _ in range(3):
            x = torch.randn(2, 4)
            assert equal(served(x, context=context), eager(x))


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "another shape": (
        Does(lambda m, x: doing(setattr(m, "one", x.sum(0, keepdim=True)), m.one * m.weight)),
        "a call replaces 0.one with a tensor of another dtype or shape",
    ),
    "another dtype": (
        Does(lambda m, x: doing(setattr(m, "calls", m.calls + 0.5), x * m.calls)),
        "a call replaces 0.calls with a tensor of another dtype or shape",
    ),
    "an alias": (
        Does(lambda m, x: doing(setattr(m, "one", m.two.view(2, 4)), m.two.add_(x))),
        "a call changes which tensors share memory with 0.one,",
    ),
    "tied no longer": (
        Does(lambda m, x: doing(setattr(m, "calls", m.calls + 1), x * m.tied)),
        "a call changes which tensors share memory with 0.calls,",
    ),
    "other values": (
        Does(lambda m, x: doing(setattr(m.one, "data", m.one + x), m.one * m.weight)),
        "a call replaces 0.one in a way that a graph cannot express",
    ),
}


@pytest.mark.parametrize(("model", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_keep_is_refused(model: nn.Module, says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export(nn.Sequential(model).eval(), (torch.ones(2, 4),), out=tmp_path / "a.artifact")
    assert list(tmp_path.iterdir()) == []


class Slices(nn.Module):
    """A buffer, and another that is a part of it."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4, 4))
        self.register_buffer("part", part(self.whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(x[: len(self.part)])
        return self.whole + x


@pytest.mark.parametrize("part", [lambda whole: whole[1:3], lambda whole: whole.t()], ids=["rows", "turned"])
def test_views_of_state_that_are_buffers_themselves_are_refused(part: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"(whole and part|part and whole) share memory that calls change"):
        export(Slices(part).eval(), (torch.ones(4, 4),), out=tmp_path / "a.artifact")
