"""Detection of mutations: the quick analysis of a program finds all that functionalising it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.support.models import Does, doing
from tests.support.setups import served
from weightswap_exporter import export
from weightswap_exporter.capture.programs import functionalised_mutations, mutated_buffers
from weightswap_runtime import CaptureError

X = torch.ones(2, 4)
Act = Callable[[Any, torch.Tensor], torch.Tensor]


def does(act: Act) -> nn.Module:
    """Return a module that calls `act(self, x)`, which may change `state`."""
    held = {"norm": nn.BatchNorm1d(4), "table": nn.Embedding(3, 4, max_norm=1.0), "weight": nn.Parameter(torch.ones(4))}
    lasting = nn.Buffer(torch.zeros(4), persistent=False)
    return Does(act, **held, state=nn.Buffer(torch.zeros(2, 4)), lasting=lasting).eval()


def program_of(act: Act) -> torch.export.ExportedProgram:
    return torch.export.export(does(act), (X,), strict=False)


def in_region(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.state.add_(x)
    return x * model.state


def reading_region(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        angles = model.lasting.float() * 2
    with torch.autocast("cpu", enabled=False):
        return x * angles.cos()


def view_from_region(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        row = model.state[0]
    row.add_(1)
    return x + row


def of_a_split(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.state.split(1)[1].zero_()
    return x


def own_memory(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * model.weight
    y += model.state
    return y.relu_()


def a_branch(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + model.state, lambda x: x - model.state, (x,))


ACTS: dict[str, tuple[Act, set[str]]] = {
    "nothing": (lambda m, x: functional.linear(x, m.state, m.weight[:2]) + m.lasting.shape[0], set()),
    "in place": (lambda m, x: m.state.add_(x), {"state"}),
    "through views": (lambda m, x: m.state.view(-1)[2:4].t().mul_(2).sum() + x, {"state"}),
    "through a result that may be a view": (lambda m, x: m.state.contiguous().reshape(2, 4).add_(x), {"state"}),
    "through dropout that drops nothing": (lambda m, x: functional.dropout(m.state, training=False).add_(x), {"state"}),
    "through a part of a split": (of_a_split, {"state"}),
    "in a region without gradients": (in_region, {"state"}),
    "through a view from a region": (view_from_region, {"state"}),
    "a region that reads": (reading_region, set()),
    "memory of the call": (own_memory, set()),
    "out=": (lambda m, x: torch.add(x, x, out=m.state), {"state"}),
    "foreach": (lambda m, x: (torch._foreach_add_([m.state, m.lasting], 1), x)[1], {"state", "lasting"}),
    "index_put": (lambda m, x: (m.lasting.__setitem__(torch.tensor([1]), x[0, 0]), x)[1], {"lasting"}),
    "statistics": (lambda m, x: functional.batch_norm(x, m.lasting, m.state[0], training=True), {"lasting", "state"}),
    "statistics that rest": (lambda m, x: functional.batch_norm(x, m.lasting, m.state[0]), set()),
    "a branch": (a_branch, set()),
    "a size that follows from values": (lambda m, x: torch.unique_consecutive(x), set()),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("act", "expected"), ACTS.values(), ids=ACTS)
@pytest.mark.filterwarnings("ignore:.*torch.cond:UserWarning", "ignore:Pred is a Python constant")
def test_what_a_call_changes_is_found(act: Act, expected: set[str]) -> None:
    program = program_of(act)
    assert mutated_buffers(program) == functionalised_mutations(program) == expected


SECRET: dict[str, Act] = {
    "unsafe_split": lambda m, x: torch.unsafe_split(m.state, 1)[0].add_(1) + x,
    "unsafe_chunk": lambda m, x: torch.unsafe_chunk(m.state, 2)[0].view(-1).add_(1) + x[0],
    "after others": lambda m, x: m.state.add_(x) + torch.unsafe_split(m.state, 1)[0].add_(1),
    "_unsafe_view": lambda m, x: torch.ops.aten._unsafe_view(m.state, [4, 2]).mul_(2).sum() + x,
}


@pytest.mark.parametrize("act", SECRET.values(), ids=SECRET)
def test_a_write_that_torch_does_not_see_is_refused(act: Act) -> None:
    with pytest.raises(CaptureError, match="which may be a view: use the safe operator"):
        mutated_buffers(program_of(act))


def test_views_that_are_only_read_are_no_matter() -> None:
    assert mutated_buffers(program_of(lambda m, x: torch.unsafe_split(m.state, 1)[0] + x)) == frozenset()


@pytest.mark.parametrize("names", ["ab", "ba"])
@torch.no_grad()
def test_what_one_name_of_a_buffer_writes_the_other_reads(names: str, tmp_path: Path) -> None:
    buffer = nn.Buffer(torch.zeros(4))
    eager = Does(lambda m, x: doing(m.a.add_(x[0]), x + m.b), **dict.fromkeys(names, buffer)).eval()
    model = served(tmp_path, eager, X)
    assert [row.name for row in model.artifact.manifest.state] == [names[0]]
    with model.new_context() as context:
        for _ in range(3):
            assert torch.equal(model(X, context=context), eager(X))


@pytest.mark.parametrize("names", [("none", "a", "b"), ("a", "none", "b"), ("a", "b")])
def test_an_assigned_buffer_is_found_beside_one_that_is_none(names: tuple[str, ...], tmp_path: Path) -> None:
    model = Does(lambda m, x: doing(setattr(m, "a", m.a + x), m.a + m.b))
    for name in names:
        model.register_buffer(name, None if name == "none" else torch.zeros(2))
    artifact = export(model, (torch.ones(2),), out=tmp_path / "a")
    assert [row.name for row in artifact.manifest.state] == ["a"]
    assert tuple(model._buffers) == names
    assert torch.equal(model.a, torch.zeros(2))


def test_a_module_that_is_called_twice_in_one_call_has_one_state(tmp_path: Path) -> None:
    part = does(lambda m, x: x + m.state.add_(1) * m.weight)
    eager = nn.Sequential(part, part).eval()
    model = served(tmp_path, eager, X)
    assert [row.names for row in model.artifact.manifest.state] == [("0.state", "1.state")]
    context = model.new_context()
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(X, context=context), eager(X))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_weight_that_a_call_parametrises_is_not_changed(tmp_path: Path) -> None:
    """As PEFT's `target_parameters`: torch then sets the weight to itself."""

    def act(model: Any, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(model.linear, "weight", Doubled())
        output: torch.Tensor = model.linear(x)
        parametrize.remove_parametrizations(model.linear, "weight", leave_parametrized=False)
        return output

    eager, other = (Does(act, linear=nn.Linear(4, 3)).eval() for _ in range(2))
    model = served(tmp_path, eager, X)
    assert torch.equal(model(X), eager(X))
    model.swap(other)
    assert torch.equal(model(X), other(X))
