"""Calls that replace buffers by other tensors: the next call sees them, as in eager mode, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Does, doing
from tests.support.setups import equal, served
from weightswap_exporter import export
from weightswap_runtime import CaptureError


def does(act: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    """Return a module that calls `act(self, x)`, which replaces buffers."""
    buffers = {"one": nn.Buffer(torch.zeros(2, 4)), "two": nn.Buffer(torch.ones(2, 4))}
    calls = nn.Buffer(torch.zeros((), dtype=torch.int64))
    return Does(act, weight=nn.Parameter(torch.ones(4)), **buffers, calls=calls, tied=calls)


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
    eager = does(act)
    for _ in range(deep):
        eager = nn.Sequential(eager)
    model = served(tmp_path, eager.eval(), torch.ones(2, 4))
    with model.new_context() as context:
        for _ in range(3):
            x = torch.randn(2, 4)
            assert equal(model(x, context=context), eager(x))


OTHER = "with a tensor of another dtype or shape"
REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "another shape": (
        lambda m, x: doing(setattr(m, "one", x.sum(0, keepdim=True)), m.one * m.weight),
        f"a call replaces 0.one {OTHER}",
    ),
    "another dtype": (
        lambda m, x: doing(setattr(m, "calls", m.calls + 0.5), x * m.calls),
        f"a call replaces 0.calls {OTHER}",
    ),
    "an alias": (
        lambda m, x: doing(setattr(m, "one", m.two.view(2, 4)), m.two.add_(x)),
        "a call changes which tensors share memory with 0.one,",
    ),
    "tied no longer": (
        lambda m, x: doing(setattr(m, "calls", m.calls + 1), x * m.tied),
        "a call changes which tensors share memory with 0.calls,",
    ),
    "other values": (
        lambda m, x: doing(setattr(m.one, "data", m.one + x), m.one * m.weight),
        "a call replaces 0.one in a way that a graph cannot express",
    ),
}


@pytest.mark.parametrize(("act", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_keep_is_refused(act: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export(nn.Sequential(does(act)).eval(), (torch.ones(2, 4),), out=tmp_path / "a.artifact")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", [lambda whole: whole[1:3], lambda whole: whole.t()], ids=["rows", "turned"])
def test_views_of_state_that_are_buffers_themselves_are_refused(part: Callable[..., Any], tmp_path: Path) -> None:
    whole = nn.Buffer(torch.zeros(4, 4))
    act = lambda m, x: doing(m.part.add_(x[: len(m.part)]), m.whole + x)  # noqa: E731
    with pytest.raises(CaptureError, match=r"(whole and part|part and whole) share memory that calls change"):
        export(Does(act, whole=whole, part=nn.Buffer(part(whole))), (torch.ones(4, 4),), out=tmp_path / "a.artifact")
