"""Models and calls whose goldens would prove nothing are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.goldens import LINEAR, ROWS, SETTINGS, everything_in, recorded, same
from tests.support.models import Does
from weightswap_exporter import export, pack, publish, skeleton
from weightswap_runtime import ExportError, ParityError


def noisy(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = model.linear(x)
    return {"plain": y, "noisy": y + torch.rand_like(y)}


def random() -> nn.Module:
    return Does(noisy, linear=nn.Linear(3, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout())


@pytest.mark.filterwarnings("ignore:the exported graph behaves as in training")
@pytest.mark.parametrize(("build", "output"), [(random, "noisy"), (dropping, "output")])
def test_a_model_that_is_not_deterministic_is_refused_by_name(
    build: Callable[[], nn.Module], output: str, tmp_path: Path
) -> None:
    model = build()
    before = everything_in(model)
    with pytest.raises(ParityError) as refused:
        export(model, (ROWS,), out=tmp_path / "m.artifact", goldens=[(ROWS,)])
    (problem,) = refused.value.problems
    assert problem.startswith(f"case 0, forward, {output} is not deterministic: two runs of the eager model differ at")
    assert str(refused.value).endswith("call model.eval().")
    assert same(before, everything_in(model))
    assert list(tmp_path.iterdir()) == []


def failing(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Count the calls, then look up rows that may not exist."""
    model.steps += 1
    return model.embed(ids)


def test_an_error_of_the_model_is_reported_and_leaves_it_unchanged(tmp_path: Path) -> None:
    model = Does(failing, embed=nn.Embedding(3, 2), steps=nn.Buffer(torch.zeros((), dtype=torch.int64))).eval()
    before, calls = everything_in(model), [(torch.tensor([0, 9]),), (torch.arange(2),)]
    with pytest.raises(ParityError) as refused:
        export(model, (torch.arange(2),), out=tmp_path / "m.artifact", goldens=calls)
    (problem,) = refused.value.problems
    assert re.match(r"case 0, forward: the model raised \w+ \(test_goldens_refused.py, line .*IndexError: ", problem)
    assert same(before, everything_in(model))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype and size": (
        {"goldens": [(torch.zeros(2, 4, dtype=torch.int64),), (ROWS[:, :2],)]},
        "case 0, forward: input: expected dtype F32, got I64\n"
        "  - case 0, forward: input: dimension 1 expected 3, got 4\n"
        "  - case 1, forward: input: dimension 1 expected 3, got 2\nGive inputs",
    ),
    "nothing given": ({"goldens": [()]}, "case 0, forward: input: missing"),
    "a tensor for a call": ({"goldens": [ROWS]}, "forward, call 0: expected (args, kwargs), got a Tensor"),
    "a call for a list": ({"goldens": (ROWS,)}, "forward: expected a list of calls, got a tuple"),
    "no calls": ({"goldens": []}, "no calls to record"),
    "another method": ({"goldens": {"encode": [(ROWS,)]}}, "no method 'encode'; the methods are forward"),
    "half a tolerance": ({"goldens": [(ROWS,)], "tolerance": (0.1,)}, "expected (rtol, atol), finite and not negative"),
    "a negative tolerance": ({"goldens": [(ROWS,)], "tolerance": (0.1, -1)}, "got (0.1, -1)"),
    "no number": ({"goldens": [(ROWS,)], "tolerance": (float("nan"), 0)}, "got (nan, 0)"),
    "a tolerance of nothing": ({"tolerance": (0.1, 0.1)}, "tolerance: sets how goldens are compared, but there are"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_wrong_requests_are_refused_by_all_that_record(options: Any, says: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2).eval()
    with pytest.raises(ParityError, match=re.escape(says)):
        export(model, methods=LINEAR, out=tmp_path / "m.artifact", **options)
    assert list(tmp_path.iterdir()) == []
    artifact = export(model, methods=LINEAR, out=tmp_path / "m.artifact")
    with pytest.raises(ParityError):
        pack(model, artifact, out=tmp_path / "v1.safetensors", **options)
    with pytest.raises(ParityError):
        publish(model, tmp_path / "out", artifact, step=1, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.artifact"]
    publish(model, tmp_path / "out", artifact, step=2).wait(120)  # nobody waits for what was refused


def test_a_skeleton_cannot_be_recorded_with_weights(tmp_path: Path) -> None:
    with skeleton():
        model = nn.Linear(3, 2).eval()
    artifact = export(model, (ROWS,), out=tmp_path / "m.artifact")
    real = pack(nn.Linear(3, 2), artifact, out=tmp_path / "v1.safetensors").path
    with pytest.raises(ExportError, match=r"2 tensors of the model have no values, the first is weight(.|\n)*outside"):
        pack(real, artifact, out=tmp_path / "v2.safetensors", model=model, goldens=[(ROWS,)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"goldens": [(torch.zeros(2, 7),)]}, "case 0, forward: input"),
        ({"goldens": [(torch.zeros(2, 3, device="meta"),)]}, "got one on meta"),
        ({"goldens": [(FakeTensorMode().from_tensor(torch.zeros(2, 3)),)]}, "input: has no values\nMake the inputs"),
    ],
)
def test_invalid_inputs_of_a_skeleton_are_refused(options: Any, says: str, tmp_path: Path) -> None:
    with skeleton():
        model = nn.Linear(3, 2).eval()
    with pytest.raises(ParityError, match=re.escape(says)):
        export(model, (ROWS,), out=tmp_path / "m.artifact", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_trains_is_refused_and_its_statistics_are_put_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    artifact = export(model, (ROWS,), out=tmp_path / "m.artifact")
    model.train()
    before = everything_in(model)
    with pytest.raises(ParityError) as refused:
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=[(ROWS,)])
    assert "a call changed 1.running_mean, which is not state" in refused.value.problems
    assert same(before, everything_in(model))


def test_a_method_without_an_attribute_of_its_name_is_refused(tmp_path: Path) -> None:
    setting = SETTINGS["several methods"]
    artifact, model, found = recorded(setting, tmp_path)
    with pytest.raises(ParityError, match="the model has no attribute 'code' to call for the method 'code'"):
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=setting.goldens)
    model.code = model.encode
    pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=setting.goldens)
    assert (tmp_path / "v1.goldens.safetensors").read_bytes() == artifact.read("goldens.safetensors")
    assert found.cases[2].method == "code"


def choosing(model: Any, x: torch.Tensor) -> Any:
    y = model.linear(x)
    return {"y": y, "more": y} if model.more else {"y": y}


def test_a_model_with_other_outputs_is_refused(tmp_path: Path) -> None:
    """It returns a different tree for other inputs, which the capture cannot see."""
    model = Does(choosing, linear=nn.Linear(3, 3), more=False).eval()
    artifact = export(model, (ROWS,), out=tmp_path / "m.artifact")
    model.more = True
    with pytest.raises(ParityError, match="expected the outputs y, the model gives y, more"):
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=[(ROWS,)])
