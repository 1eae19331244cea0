"""Composed tensors: their parts, and tensors that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.composed import Rows, Sum, summed
from tests.support.models import Does
from tests.support.setups import loaded
from weightswap_exporter import export
from weightswap_exporter.modules.tensors import kind_of, named_tensors, parts_of, put_together
from weightswap_runtime import CaptureError, Unsupported

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(7))


def nested(seed: int) -> nn.Module:
    """Return a layer whose weight is a sum of sums, of which two parts are one tensor."""
    torch.manual_seed(seed)
    shared = torch.randn(3, 3)
    whole = Sum(Sum(shared, torch.randn(3, 3)), Sum(shared, torch.randn(3, 3)), "outer")
    weight, bias = nn.Parameter(whole, requires_grad=False), nn.Parameter(torch.zeros(3))
    return Does(lambda m, x: nn.functional.linear(x, m.weight, m.bias), weight=weight, bias=bias).eval()


def test_parts_of_parts_have_paths_for_names() -> None:
    whole = nested(0).weight
    parts = parts_of("w", whole)
    assert list(parts) == ["w.one.one", "w.one.two", "w.two.one", "w.two.two"]
    again = put_together("w", whole, {name: part + 1 for name, part in parts.items()})
    inner = {"type": "Sum", "note": None}
    assert kind_of(again) == kind_of(whole) == {"type": "Sum", "note": "outer", "parts": {"one": inner, "two": inner}}
    assert torch.equal(again.two.one, whole.two.one + 1)


def test_a_graph_puts_parts_of_parts_together(tmp_path: Path) -> None:
    artifact, trained = export(nested(0), (X,), out=tmp_path / "a.artifact"), nested(1)
    assert torch.equal(loaded(artifact, tmp_path, trained)(X), trained(X))
    assert list(named_tensors(trained)) == [*parts_of("weight", trained.weight), "bias"]
    assert artifact.manifest.weights[0].aliases == ("weight.two.one",)
    assert json.loads((artifact.path / "parts.json").read_bytes()) == {"weight": kind_of(trained.weight)}


def test_a_failed_export_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Does(lambda m, x: m.layer(x) if x.sum().item() > 0 else x, layer=summed(nn.Linear(3, 3))).eval()
    weight, kind = model.layer.weight, type(model.layer)
    with pytest.raises(CaptureError):
        export(model, (X,), out=tmp_path / "a.artifact")
    assert (model.layer.weight is weight, type(model.layer) is kind, not model.layer._modules) == (True, True, True)
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]


def test_a_call_that_a_class_does_not_take_apart_is_refused(tmp_path: Path) -> None:
    model = Does(lambda m, x: x @ m.layer.weight, layer=summed(nn.Linear(3, 3)))
    with pytest.raises(CaptureError, match=r"must decompose this call in __torch_function__"):
        export(model.eval(), (X,), out=tmp_path / "a.artifact")


def with_buffer() -> nn.Module:
    return Does(lambda m, x: x, kept=nn.Buffer(Sum(torch.ones(2), torch.ones(2))))


def with_rows() -> nn.Module:
    return Does(lambda m, x: x, weight=nn.Parameter(torch.zeros(3, 3).as_subclass(Rows)))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    r"^weight is a Sum with a Generator in it, which an artifact cannot record": lambda: summed(
        nn.Linear(3, 3), {"random": [torch.Generator()]}
    ),
    r"^kept is a Sum, and only parameters may be made of other tensors": with_buffer,
    r"^weight is a Rows, which has only a part of the values. Export the": with_rows,
}


@pytest.mark.parametrize("says", REFUSED)
def test_other_tensors_are_refused_by_name(says: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=says):
        export(REFUSED[says](), (X,), out=tmp_path / "a.artifact")
    assert not (tmp_path / "a.artifact").exists()


def test_functions_of_torchao_are_recorded_by_name(tmp_path: Path) -> None:
    """As in torchao 0.17's tensors; other functions are refused, as two of one name may differ."""
    utils = pytest.importorskip("torchao.utils")
    model = nn.Sequential(summed(nn.Linear(3, 3), utils.find_multiple))
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    (kind,) = json.loads((artifact.path / "parts.json").read_bytes()).values()
    assert kind["note"] == "torchao.utils.find_multiple"
    for other in (summed, lambda x: x):
        with pytest.raises(Unsupported, match=r"is a Sum with a function in it"):
            export(nn.Sequential(summed(nn.Linear(3, 3), other)), (X,), out=tmp_path / "b.artifact")
