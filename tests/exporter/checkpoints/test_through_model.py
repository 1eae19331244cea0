"""Checkpoints that only the model's own code can load: it loads them, and the model is packed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import saved, saved_distributed, saved_safetensors
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import Artifact, CheckpointError, WeightsMismatch, WeightswapError, load

X = torch.tensor(
    [[2.0, -3.0, 1.0], [5.0, 4.0, -7.0]]
)  # whole: sums are exact in any order, whichever kernel makes them


class Scaled(nn.Module):
    """Its checkpoints hold the weight over its largest value; which keys are used depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self._register_load_state_dict_pre_hook(self._unscale)

    @staticmethod
    def _unscale(state: dict[str, Any], *_: Any) -> None:
        if "scale" in state and float(state["scale"]) > 0:
            state["linear.weight"] = state["linear.weight"] * state["scale"]
        state.pop("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


STATE = {"linear.weight": torch.arange(9.0).view(3, 3), "scale": torch.tensor(2.0)}


@pytest.fixture
def scaled(tmp_path: Path) -> Artifact:
    return export(Scaled().eval(), (X,), out=tmp_path / "scaled.artifact")


SOURCES: dict[str, Callable[[Path], object]] = {
    "a state dict": lambda path: STATE,
    "below model": lambda path: {"model": STATE, "step": 3},
    ".pt": lambda path: saved(path / "c.pt", {"state_dict": STATE, "step": 3}),
    ".safetensors": lambda path: saved_safetensors(path / "c.safetensors", STATE),
    "distributed": lambda path: saved_distributed(path / "dcp", {"model": STATE, "optimizer": {"lr": 0.1}}),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_the_models_own_code_loads(make: Callable[[Path], Any], scaled: Artifact, tmp_path: Path) -> None:
    model = Scaled()
    packed = pack(make(tmp_path), scaled, out=tmp_path / "v.safetensors", model=model)
    assert torch.equal(load(scaled, packed.path)(X), X @ (STATE["linear.weight"] * 2).T)
    assert torch.equal(model.linear.weight, STATE["linear.weight"] * 2)


def test_without_the_model_such_a_checkpoint_is_refused(scaled: Artifact, tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match="scale"):
        pack(STATE, scaled, out=tmp_path / "v.safetensors")


def own(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    assert checkpoint["step"] == 3
    model.load_state_dict({"linear.weight": checkpoint["weights"].view(3, 3)})


def test_a_function_may_load(scaled: Artifact, tmp_path: Path) -> None:
    source = saved(tmp_path / "c.pt", {"weights": torch.arange(9.0), "step": 3})
    packed = pack(source, scaled, out=tmp_path / "v.safetensors", model=Scaled(), load=own)
    assert torch.equal(load(scaled, packed.path)(X), X @ torch.arange(9.0).view(3, 3).T)


def flat(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """As the function was recorded at the export: a state dict, whatever is around it in files."""
    model.load_state_dict({"linear.weight": checkpoint.pop("w") * checkpoint.pop("s")})


FLAT = {"w": torch.arange(9.0).view(3, 3), "s": torch.tensor(3.0)}
TREES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "flat": (None, FLAT),
    "below model": (None, {"model": FLAT, "step": 3}),
    "below two": (None, {"state_dict": {"model": FLAT}, "step": 3}),
    "beside an optimizer": (None, {"optimizer": {"w": torch.zeros(1)}, "model": FLAT, "rate": torch.zeros(1)}),
    "in a level of its own": ("ema", {"ema": FLAT, "model": {"w": torch.ones(3, 3), "s": torch.ones(1)}}),
}


@pytest.mark.parametrize("form", [lambda tree, path: tree, lambda tree, path: saved(path / "c.pt", tree)])
@pytest.mark.parametrize(("level", "tree"), TREES.values(), ids=TREES)
def test_a_function_gets_the_level_that_it_loads(
    level: str | None, tree: dict[str, Any], form: Callable[[Any, Path], Any], scaled: Artifact, tmp_path: Path
) -> None:
    out = tmp_path / "v.safetensors"
    for source in (form(tree, tmp_path), form(tree, tmp_path)):  # it is as it was
        packed = pack(source, scaled, out=out, model=Scaled(), load=flat, level=level)
        assert torch.equal(load(scaled, packed.path)(X), X @ (FLAT["w"] * 3).T)


def test_a_function_that_takes_the_whole_gets_it_first(scaled: Artifact, tmp_path: Path) -> None:
    def best(model: nn.Module, checkpoint: dict[str, Any]) -> None:
        model.load_state_dict(checkpoint.get("ema", checkpoint))

    tree = {"model": {"linear.weight": torch.zeros(3, 3)}, "ema": {"linear.weight": torch.ones(3, 3)}}
    packed = pack(tree, scaled, out=tmp_path / "v.safetensors", model=Scaled(), load=best)
    assert torch.equal(load(scaled, packed.path)(X), X @ torch.ones(3, 3))


def lenient(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    model.load_state_dict(checkpoint, strict=False)


def test_a_function_that_passes_over_the_whole_gets_the_level(scaled: Artifact, tmp_path: Path) -> None:
    state = {"linear.weight": torch.ones(3, 3)}
    packed = pack({"model": state}, scaled, out=tmp_path / "v.safetensors", model=Scaled(), load=lenient)
    assert torch.equal(load(scaled, packed.path)(X), X @ torch.ones(3, 3))


def test_a_function_may_load_what_the_model_has(scaled: Artifact, tmp_path: Path) -> None:
    model = Scaled()
    packed = pack(model.state_dict(), scaled, out=tmp_path / "v.safetensors", model=model, load=lenient)
    assert torch.equal(load(scaled, packed.path)(X), model(X))


def unseen(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    model.get_parameter("linear.weight").data.copy_(checkpoint["w"])


def test_a_function_may_write_where_torch_does_not_see_it(scaled: Artifact, tmp_path: Path) -> None:
    packed = pack(FLAT, scaled, out=tmp_path / "v.safetensors", model=Scaled(), load=unseen)
    assert torch.equal(load(scaled, packed.path)(X), X @ FLAT["w"].T)


def halfway(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    nn.init.zeros_(model.get_parameter("linear.weight"))
    model.load_state_dict(checkpoint, strict=True)


def hollow() -> nn.Module:
    with skeleton():
        return Scaled()


BAD: dict[str, tuple[object, dict[str, Any], type[WeightswapError], str]] = {
    "a function that raises": (
        {"step": 4},
        {"model": Scaled(), "load": own},
        CheckpointError,
        "the state dict: own failed: own (test_through_model.py, line @): AssertionError",
    ),
    "a function that raises on every level": (
        {"model": {"w": torch.ones(3, 3)}, "step": 3},
        {"model": Scaled(), "load": flat},
        CheckpointError,
        "the state dict: flat of 'model' failed: flat (test_through_model.py, line @): KeyError: 's'\n"
        "flat of the whole failed, too: flat (test_through_model.py, line @): KeyError: 'w'",
    ),
    "a function that loads nothing": (
        {"model": {"other": torch.ones(3, 3)}, "step": 3},
        {"model": Scaled(), "load": lenient},
        CheckpointError,
        "lenient of 'model' failed: it raised no error, but left the model unchanged\nlenient of the whole failed",
    ),
    "a function that fails halfway": (
        {"model": {"linear.weight": torch.ones(3, 3)}},
        {"model": Scaled(), "load": halfway},
        CheckpointError,
        "the state dict: halfway failed: halfway (test_through_model.py, line @): RuntimeError: Error(s) in loading",
    ),
    "a hook that raises": (
        {"linear.weight": torch.ones(3, 3), "scale": torch.ones(2)},
        {"model": Scaled()},
        CheckpointError,
        "the state dict: model.load_state_dict failed: _unscale (test_through_model.py, line @): ValueError: only one",
    ),
    "another architecture": (
        {"model": {"other": torch.zeros(1)}},
        {"model": Scaled()},
        CheckpointError,
        'Missing key(s) in state_dict: "linear.weight"',
    ),
    "another size": (
        {"model": {"linear.weight": torch.zeros(2, 2)}},
        {"model": Scaled()},
        CheckpointError,
        "size mismatch for linear.weight",
    ),
    "another model": (
        {"weight": torch.zeros(2, 2)},
        {"model": nn.Linear(2, 2, bias=False)},
        WeightsMismatch,
        "the state dict, loaded into Linear: refused",
    ),
    "a skeleton": (STATE, {"model": hollow()}, CheckpointError, "linear.weight: has no values"),
    "a skeleton, what to do": (STATE, {"model": hollow()}, CheckpointError, "Build the model outside skeleton(), load"),
    "a skeleton and a function": (FLAT, {"model": hollow(), "load": flat}, CheckpointError, "outside skeleton()"),
    "a module as the checkpoint": (Scaled(), {"model": Scaled()}, CheckpointError, "to pack a module, give it alone"),
    "a function without a model": (STATE, {"load": own}, CheckpointError, "give `model` too"),
}


@pytest.mark.parametrize(("source", "arguments", "error", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    source: Any, arguments: dict[str, Any], error: type[WeightswapError], says: str, scaled: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(error) as refused:
        pack(source, scaled, out=tmp_path / "v.safetensors", **arguments)
    assert says in re.sub(r"line \d+", "line @", str(refused.value))
    assert not list(tmp_path.glob("*v.safetensors*"))


class Untraceable(Scaled):
    """Looks at the values of its checkpoints."""

    @staticmethod
    def _unscale(state: dict[str, Any], *_: Any) -> None:
        if float(state["linear.weight"].max()) > 1:
            state["linear.weight"] = state["linear.weight"] / 10


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_loading_code_that_could_not_be_recorded(dtype: str | None, tmp_path: Path) -> None:
    model = Untraceable().eval()
    with pytest.warns(UserWarning, match="cannot be recorded"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    out = tmp_path / "v.safetensors"
    state = {"linear.weight": torch.arange(9.0).view(3, 3)}
    with pytest.raises(WeightsMismatch, match="could not be recorded at export"):
        pack(state, artifact, out=out, dtype=dtype)
    packed = pack(state, artifact, out=out, dtype=dtype, model=model)
    assert torch.equal(load(artifact, packed.path)(X), X @ (state["linear.weight"] / 10).T)
    assert pack(model, artifact, out=out, dtype=dtype).weights_id == packed.weights_id
