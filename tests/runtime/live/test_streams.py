"""Streams of calls to stateful modules: each context equals the eager module, run step by step."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import load
from weightswap_runtime.engines.choosing import EngineName


class Normalised(nn.Module):
    """A normalisation by batch statistics that also updates its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.mix(x))
        return y + self.norm.running_mean + self.norm.num_batches_tracked


class Carried(nn.Module):
    """An LSTM whose state is carried from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5)
        self.register_buffer("hidden", torch.zeros(1, 1, 5))
        self.register_buffer("cell", torch.zeros(1, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (hidden, cell) = self.lstm(x[:, None], (self.hidden, self.cell))
        self.hidden.copy_(hidden)
        self.cell.copy_(cell)
        return y[:, 0]  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the exported graph behaves as in training")
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(Normalised, "torch"),
        pytest.param(Normalised, "aoti", marks=pytest.mark.slow),
        pytest.param(Carried, "torch"),
        pytest.param(Normalised, "onnx"),
        pytest.param(Carried, "onnx"),
        pytest.param(Carried, "aoti", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_a_stream_equals_the_eager_module_step_by_step(
    kind: type[nn.Module], engine: EngineName, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, xs = kind().train(kind is Normalised), torch.randn(6, 3, 4)
    engines: Any = ("torch",) if engine == "torch" else ("torch", engine)
    artifact = export(module, (xs[0],), out=tmp_path / "a.artifact", engines=engines)
    model = load(artifact, pack(module, artifact, out=tmp_path / "v.safetensors").path, engine=engine)
    eager = [deepcopy(module) for _ in range(2)]
    contexts = [model.new_context() for _ in range(2)]
    for step, x in enumerate(xs):
        which = step % 3 % 2  # two streams, in turns
        found = torch.as_tensor(model(x.numpy() if engine == "onnx" else x, context=contexts[which]))
        torch.testing.assert_close(found, eager[which](x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(eager[0](xs[0]), eager[1](xs[0]), rtol=1e-3)
