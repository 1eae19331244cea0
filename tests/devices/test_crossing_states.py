"""Contexts that cross devices: a state saved on one is the same, bit for bit, on the other and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import ACCELERATOR, on_accelerator
from tests.support.in_context import InContext, methods, task
from tests.support.standin import StandIn
from weightswap_exporter import export, pack
from weightswap_runtime import Model, load
from weightswap_runtime.engines import choosing
from weightswap_runtime.engines import torch_device as engines
from weightswap_runtime.engines.torch_cpu import BoundTorch, TorchEngine
from weightswap_runtime.memory.arena import Arena

NEW = task(99, 7)[0]


class OnStandIn(engines.AcceleratedEngine):
    """The engine of accelerators on a stand-in: states are on the device, weights in host memory."""

    bind = TorchEngine.bind  # type: ignore[assignment]
    _flat = TorchEngine._flat

    def _bound(self, calls: Any, arena: Arena) -> BoundTorch:
        return BoundOnStandIn(calls, arena, self._shared(), self.new_state)


class BoundOnStandIn(BoundTorch):
    def _run_with(self, call: Any, inputs: list[Any], state: Any, chosen: Any) -> list[Any]:
        with state.in_turn():
            return super()._run_with(call, inputs, state, chosen)


class Served:
    """Models of one artifact, on the CPU and elsewhere."""

    def __init__(self, folder: Path) -> None:
        model = InContext(0).eval()
        self.artifact = export(model, methods=methods(), out=folder / "a.artifact")
        self.weights = pack(model, self.artifact, out=folder / "v.safetensors").path

    def on(self, device: str) -> Model:
        return load(self.artifact, self.weights, engine="torch", device=device)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("crossing"))


def call(model: Model, method: str, *given: torch.Tensor, context: Any) -> torch.Tensor:
    found: torch.Tensor = model.method(method)(*(each.to(model.device) for each in given), context=context)
    return found.cpu()


def check_crossing(here: Model, there: Model, folder: Path, near: float) -> None:
    """Fit on one, then move to the other and back, twice, predicting on each."""
    path = folder / "0.safetensors"
    with here.new_context() as context:
        call(here, "fit", *task(3, 11), context=context)
        expected = call(here, "predict", NEW, context=context)
        context.save(path)
    fitted = path.read_bytes()
    for number, model in enumerate([there, here, there, here], 1):
        with model.load_context(path) as context:
            path = folder / f"{number}.safetensors"
            context.save(path)
            assert path.read_bytes() == fitted
            found = call(model, "predict", NEW, context=context)
            assert torch.allclose(found, expected, rtol=near, atol=near)


def test_to_the_stand_in_and_back(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = StandIn(0)
    device.torch = torch.device("cpu")
    device.default.foreign = True  # torch's tensors know nothing of the stand-in's streams
    here = served.on("cpu")
    monkeypatch.setattr(engines, "open_accelerator", lambda name: device)
    row = choosing.ENGINES["torch"]._replace(open=lambda artifact, name, options: OnStandIn(artifact, name))
    monkeypatch.setitem(choosing.ENGINES, "torch", row)
    there = served.on("cpu")
    for one, other in ((here, there), (there, here)):
        check_crossing(one, other, tmp_path, 0)
    with there.new_context() as context:
        assert isinstance(context._state, engines.AcceleratedState)
    device.drain()


@on_accelerator
@pytest.mark.parametrize("begins_here", [True, False])
def test_to_an_accelerator_and_back(device: str, begins_here: bool, served: Served, tmp_path: Path) -> None:
    pair = [served.on("cpu"), served.on(ACCELERATOR)]
    one, other = pair if begins_here else reversed(pair)
    check_crossing(one, other, tmp_path, 1e-4)
