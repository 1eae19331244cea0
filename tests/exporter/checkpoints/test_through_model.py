"""Checkpoints that only the model's own code can load: it loads them, and the model is packed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import by_error, refuses, saved, saved_distributed, saved_safetensors
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import Artifact, CheckpointError, WeightsMismatch, load

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
    def _unscale(state: State, *_: Any) -> None:
        if "scale" in state and float(state["scale"]) > 0:
            state["linear.weight"] = state["linear.weight"] * state["scale"]
        state.pop("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


State = dict[str, Any]
STATE = {"linear.weight": torch.arange(9.0).view(3, 3), "scale": torch.tensor(2.0)}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(Scaled().eval(), (X,), out=tmp_path_factory.mktemp("scaled") / "scaled.artifact")


SOURCES: dict[str, Callable[[Path], object]] = {
    "a state dict": lambda path: STATE,
    "below model": lambda path: {"model": STATE, "step": 3},
    ".pt": lambda path: saved(path / "c.pt", {"state_dict": STATE, "step": 3}),
    ".safetensors": lambda path: saved_safetensors(path / "c.safetensors", STATE),
    "distributed": lambda path: saved_distributed(path / "dcp", {"model": STATE, "optimizer": {"lr": 0.1}}),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_the_models_own_code_loads(make: Callable[[Path], Any], scaled: Artifact, tmp_path: Path) -> None:
    model, source = Scaled(), make(tmp_path)
    refuses(WeightsMismatch, "scale", source, scaled, tmp_path)
    packed = pack(source, scaled, out=tmp_path / "v.safetensors", model=model)
    assert torch.equal(load(scaled, packed.path)(X), X @ (STATE["linear.weight"] * 2).T)
    assert torch.equal(model.linear.weight, STATE["linear.weight"] * 2)


def own(model: nn.Module, checkpoint: State) -> None:
    assert checkpoint["step"] == 3
    model.load_state_dict({"linear.weight": checkpoint["weights"].view(3, 3)})


def best(model: nn.Module, checkpoint: State) -> None:
    model.load_state_dict(checkpoint.get("ema", checkpoint))


def lenient(model: nn.Module, checkpoint: State) -> None:
    model.load_state_dict(checkpoint, strict=False)


def unseen(model: nn.Module, checkpoint: State) -> None:
    model.get_parameter("linear.weight").data.copy_(checkpoint["linear.weight"])


def halfway(model: nn.Module, checkpoint: State) -> None:
    nn.init.zeros_(model.get_parameter("linear.weight"))
    model.load_state_dict(checkpoint, strict=True)


def full(value: float) -> State:
    return {"linear.weight": torch.full((3, 3), value)}


FUNCTIONS: dict[str, tuple[Callable[..., None], Any]] = {
    "of its own form": (own, {"weights": torch.full((9,), 5.0), "step": 3}),
    "that takes the whole gets it first": (best, {"model": full(0.0), "ema": full(5.0)}),
    "that passes over the whole gets the level": (lenient, {"model": full(5.0)}),
    "may write where torch does not see it": (unseen, full(5.0)),
}


@pytest.mark.parametrize(("function", "tree"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_may_load(function: Any, tree: Any, scaled: Artifact, tmp_path: Path) -> None:
    for source in (tree, saved(tmp_path / "c.pt", tree)):
        packed = pack(source, scaled, out=tmp_path / "v.safetensors", model=Scaled(), load=function)
        assert torch.equal(load(scaled, packed.path)(X), X @ full(5.0)["linear.weight"].T)


def test_a_function_may_load_what_the_model_has(scaled: Artifact, tmp_path: Path) -> None:
    model = Scaled()
    packed = pack(model.state_dict(), scaled, out=tmp_path / "v.safetensors", model=model, load=lenient)
    assert torch.equal(load(scaled, packed.path)(X), model(X))


def flat(model: nn.Module, checkpoint: State) -> None:
    """As the function was recorded at the export: a state dict, whatever is around it in files."""
    model.load_state_dict({"linear.weight": checkpoint.pop("w") * checkpoint.pop("s")})


FLAT = {"w": torch.arange(9.0).view(3, 3), "s": torch.tensor(3.0)}
TREES: dict[str, tuple[str | None, State]] = {
    "flat": (None, FLAT),
    "below model": (None, {"model": FLAT, "step": 3}),
    "below two": (None, {"state_dict": {"model": FLAT}, "step": 3}),
    "beside an optimizer": (None, {"optimizer": {"w": torch.zeros(1)}, "model": FLAT, "rate": torch.zeros(1)}),
    "in a level of its own": ("ema", {"ema": FLAT, "model": {"w": torch.ones(3, 3), "s": torch.ones(1)}}),
}


@pytest.mark.parametrize("form", [lambda tree, path: tree, lambda tree, path: saved(path / "c.pt", tree)])
@pytest.mark.parametrize(("level", "tree"), TREES.values(), ids=TREES)
def test_a_function_gets_the_level_that_it_loads(
    level: str | None, tree: State, form: Callable[[Any, Path], Any], scaled: Artifact, tmp_path: Path
) -> None:
    out = tmp_path / "v.safetensors"
    for source in (form(tree, tmp_path), form(tree, tmp_path)):  # it is as it was
        packed = pack(source, scaled, out=out, model=Scaled(), load=flat, level=level)
        assert torch.equal(load(scaled, packed.path)(X), X @ (FLAT["w"] * 3).T)


def hollow() -> nn.Module:
    with skeleton():
        return Scaled()


HERE = "(test_through_model.py, line @)"
BAD: dict[type[Exception], dict[str, tuple[Any, State, str]]] = {
    CheckpointError: {
        "a function that raises": (
            {"step": 4},
            {"model": Scaled(), "load": own},
            f"the state dict: own failed: own {HERE}: AssertionError",
        ),
        "a function that raises on every level": (
            {"model": {"w": torch.ones(3, 3)}, "step": 3},
            {"model": Scaled(), "load": flat},
            f"the state dict: flat of 'model' failed: flat {HERE}: KeyError: 's'\n"
            f"flat of the whole failed, too: flat {HERE}: KeyError: 'w'",
        ),
        "a function that loads nothing": (
            {"model": {"other": torch.ones(3, 3)}, "step": 3},
            {"model": Scaled(), "load": lenient},
            "lenient of 'model' failed: it raised no error, but left the model unchanged\nlenient of the whole failed",
        ),
        "a function that fails halfway": (
            {"model": full(1.0)},
            {"model": Scaled(), "load": halfway},
            f"the state dict: halfway failed: halfway {HERE}: RuntimeError: Error(s) in loading",
        ),
        "a hook that raises": (
            full(1.0) | {"scale": torch.ones(2)},
            {"model": Scaled()},
            f"the state dict: model.load_state_dict failed: _unscale {HERE}: ValueError: only one",
        ),
        "another architecture": (
            {"model": {"other": torch.zeros(1)}},
            {"model": Scaled()},
            'Missing key(s) in state_dict: "linear.weight"',
        ),
        "another size": (
            {"model": {"linear.weight": torch.zeros(2, 2)}},
            {"model": Scaled()},
            "size mismatch for linear.weight",
        ),
        "a skeleton": (STATE, {"model": hollow()}, "linear.weight: has no values"),
        "a skeleton, what to do": (STATE, {"model": hollow()}, "Build the model outside skeleton(), load"),
        "a skeleton and a function": (FLAT, {"model": hollow(), "load": flat}, "outside skeleton()"),
        "a module as the checkpoint": (Scaled(), {"model": Scaled()}, "to pack a module, give it alone"),
        "a function without a model": (STATE, {"load": own}, "give `model` too"),
    },
    WeightsMismatch: {
        "another model": (
            {"weight": torch.zeros(2, 2)},
            {"model": nn.Linear(2, 2, bias=False)},
            "the state dict, loaded into Linear: refused",
        )
    },
}


@pytest.mark.parametrize(("error", "source", "arguments", "says"), by_error(BAD))
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    error: type[Exception], source: Any, arguments: State, says: str, scaled: Artifact, tmp_path: Path
) -> None:
    assert says in re.sub(r"line \d+", "line @", refuses(error, "", source, scaled, tmp_path, **arguments))


class Untraceable(Scaled):
    """Looks at the values of its checkpoints."""

    @staticmethod
    def _unscale(state: State, *_: Any) -> None:
        if float(state["linear.weight"].max()) > 1:
            state["linear.weight"] = state["linear.weight"] / 10


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_loading_code_that_could_not_be_recorded(dtype: str | None, tmp_path: Path) -> None:
    model = Untraceable().eval()
    with pytest.warns(UserWarning, match="cannot be recorded"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    out = tmp_path / "v.safetensors"
    state = {"linear.weight": torch.arange(9.0).view(3, 3)}
    refuses(WeightsMismatch, "could not be recorded at export", state, artifact, tmp_path, dtype=dtype)
    packed = pack(state, artifact, out=out, dtype=dtype, model=model)
    assert torch.equal(load(artifact, packed.path)(X), X @ (state["linear.weight"] / 10).T)
    assert pack(model, artifact, out=out, dtype=dtype).weights_id == packed.weights_id
