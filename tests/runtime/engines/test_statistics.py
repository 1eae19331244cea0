"""Norms in training mode: statistics of the batch, and running ones, which are state, in contexts on every engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.accelerators import on_every_device
from tests.support.decoding import skip_without_provider
from tests.support.remembering import ENGINES
from weightswap_exporter import export, pack
from weightswap_runtime import Model, load

SHAPE = (6, 4, 3, 2)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=0.3)),
    "rows": lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4, eps=0.1)),
    "no weights": lambda: nn.BatchNorm2d(4, affine=False),
    "no running ones": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instances": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "instances alone": lambda: nn.InstanceNorm2d(4),
    "half": lambda: nn.BatchNorm2d(4).half(),
    "double": lambda: nn.BatchNorm2d(4).double(),
}
TOLERANCES = {torch.float16: 2e-3}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def served(model: nn.Module, engine: str, device: str, folder: Path) -> Model:
    if device != "cpu" and engine == "aoti":
        pytest.skip("machine code for GPUs has tests of its own")
    if device != "cpu" and engine == "onnx":
        skip_without_provider()
    shapes = ({0: Dim("rows", min=2, max=64)},)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the exported graph behaves as in training")
        artifact = export(model, (given(model, 6),), out=folder / "a", dynamic_shapes=shapes, engines=[engine])
    packed = pack(model, artifact, out=folder / "v.safetensors")
    return load(artifact, packed.path, engine=engine, device=device)  # type: ignore[arg-type]


def given(model: nn.Module, rows: int) -> torch.Tensor:
    dtype = next(iter(model.state_dict().values()), torch.zeros(0)).dtype
    return torch.randn(rows, *SHAPE[1:]).to(dtype) * rows + 1


@on_every_device
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
@pytest.mark.sampled(2)
def test_each_context_has_statistics_of_its_own(name: str, engine: str, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = MODELS[name]().train()
    model = served(eager, engine, device, tmp_path)
    contexts = [model.new_context() for _ in range(2)]
    copies = [deepcopy(eager) for _ in contexts]
    for step in range(8):
        which = step % 3 % 2
        x = given(eager, 2 + step)
        near(call(model, x, context=contexts[which]), copies[which](x))
        near(call(model, x), deepcopy(eager)(x))  # without one: the initial state
    for number, (context, copy) in enumerate(zip(contexts, copies, strict=True)):
        context.save(tmp_path / f"{number}.safetensors")
        later = load(model.artifact, tmp_path / "v.safetensors").load_context(tmp_path / f"{number}.safetensors")
        buffers = dict(copy.named_buffers())
        for row in model.artifact.manifest.state:
            found = later._state.tensors[row.name]  # type: ignore[attr-defined]
            near(found, buffers[row.name])


def call(model: Model, x: torch.Tensor, **options: Any) -> torch.Tensor:
    array = model.engine == "onnx" and model.device == "cpu"
    found = model(x.numpy() if array else x.to(model.device), **options)
    assert isinstance(found, np.ndarray) == array
    return torch.as_tensor(found).cpu()


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES.get(expected.dtype, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
