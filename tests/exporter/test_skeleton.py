"""Skeletons: parameters without memory, everything else as it is, and the same export as from a real model."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.models import Everything
from weightswap_exporter import export, pack, skeleton
from weightswap_exporter.skeletons import is_fake
from weightswap_runtime import CaptureError, CheckpointError


class Zoo(nn.Module):
    """Initialisers, conversions, parametrizations and copies that touch parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.register_buffer("rotary", 1 / torch.arange(1, 17.0))
        own = nn.Parameter(torch.zeros(16))
        self.one, self.two = own, own
        nn.init.trunc_normal_(self.normed.bias, std=0.02)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        self.one.data.fill_(3.0)
        with torch.no_grad():
            self.normed.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.normed(self.encoder(x * self.rotary)))[0] + self.one + self.two


@pytest.mark.parametrize("convert", [lambda m: m, lambda m: m.half().float(), lambda m: m.to(torch.bfloat16)])
def test_the_export_is_that_of_the_real_model(convert: Any, tmp_path: Path) -> None:
    with skeleton():
        hollow = convert(Zoo()).eval()
    real = convert(Zoo()).eval()
    assert all(is_fake(parameter) for parameter in hollow.parameters())
    assert not any(is_fake(buffer) for buffer in hollow.buffers())
    assert hollow.one is hollow.two
    x = torch.zeros(2, 5, 16, dtype=next(real.parameters()).dtype)
    one = export(hollow, (x,), out=tmp_path / "one.artifact")
    two = export(real, (x,), out=tmp_path / "two.artifact")
    assert one.manifest == two.manifest


def test_parameters_cost_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with skeleton():
        model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(16)])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 > 4e9
    assert grown < 200_000  # kilobytes


def test_a_constructor_that_reads_a_value_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.scale = self.weight.sum().item()

    says = r"__init__ \(test_skeleton.py, line \d+\): the model's constructor needs the values .* is .*Reads.weight"
    with pytest.raises(CaptureError, match=says), skeleton():
        Reads()


def test_lazy_parameters_are_named() -> None:
    with pytest.raises(CaptureError, match=r"LazyLinear.weight: a lazy parameter has no shape"), skeleton():
        nn.LazyLinear(3)


def test_only_this_block_and_this_thread_are_touched() -> None:
    register, kaiming = nn.Module.register_parameter, nn.init.kaiming_uniform_
    built: list[nn.Module] = []
    with skeleton():
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        with pytest.raises(CaptureError, match="one at a time"), skeleton():
            pass
    assert not is_fake(built[0].weight)
    assert nn.Module.register_parameter is register
    assert nn.init.kaiming_uniform_ is kaiming
    assert not is_fake(nn.Linear(2, 2).weight)


def test_a_skeleton_cannot_be_packed(tmp_path: Path) -> None:
    with skeleton():
        model = Everything().eval()
    artifact = export(model, (torch.zeros(2, 1, 5, 5),), out=tmp_path / "a.artifact")
    with pytest.raises(CheckpointError, match="has no values"):
        pack(model, artifact, out=tmp_path / "v.safetensors")


def test_constants_computed_from_parameters_are_named(tmp_path: Path) -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("norm", self.weight.detach() * 2, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.norm

    with skeleton():
        model = Derived().eval()
    with pytest.raises(CaptureError, match="norm: constants and state go into the artifact"):
        export(model, (torch.zeros(3),), out=tmp_path / "a.artifact")
