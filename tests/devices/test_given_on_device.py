"""Tensors on an accelerator, given to a swap: they are copied there, after the work that their owner has enqueued."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import ACCELERATOR, on_accelerator
from tests.support.slow_streams import Numbers, keep_busy, number
from weightswap_exporter import export, pack
from weightswap_runtime import load
from weightswap_runtime.memory import device_arena, torch_device
from weightswap_runtime.memory.device_arena import DeviceInspection

pytestmark = [pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs torch.cuda._sleep")]
NBYTES = 8 << 20


def filled(value: float) -> Numbers:
    model = Numbers(NBYTES).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@on_accelerator
@pytest.mark.parametrize("inspects", [True, False], ids=["hashed there", "hashed by the host"])
def test_what_was_enqueued_is_done_before_tensors_are_read(
    device: str, inspects: bool, residency: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[bool] = []
    plain = DeviceInspection.copy
    monkeypatch.setattr(
        DeviceInspection, "copy", lambda self, *arguments: copies.append(plain(self, *arguments)) or copies[-1]
    )
    artifact = export(filled(0), (torch.zeros(()),), out=tmp_path / "a.artifact")
    model = load(artifact, filled(1), device=device, residency=residency)
    monkeypatch.setattr(device_arena, "LEAST", 0 if inspects else 1 << 40)
    monkeypatch.setattr(torch_device, "_kernels", {})  # the emulation's kernel is distrusted at its first use
    given, x = deepcopy(filled(0)).to(device), torch.zeros((), device=device)
    for step, form in enumerate((lambda: given, given.state_dict, lambda: iter(given.state_dict().items())), 2):
        with torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
            keep_busy(0.05)
            for parameter in given.parameters():
                parameter.fill_(step)
            receipt = model.stage(form(), background=step == 3).commit()
            for parameter in given.parameters():
                parameter.fill_(-1)  # what is served is a copy
        assert number(model(x).cpu()) == step
        packed = pack(filled(step), artifact, out=tmp_path / "packed.safetensors")
        assert receipt.weights_id == packed.weights_id
    assert any(copies) == inspects


@on_accelerator
def test_tensors_of_both_kinds_are_taken_together(device: str, residency: Any, tmp_path: Path) -> None:
    artifact = export(filled(0), (torch.zeros(()),), out=tmp_path / "a.artifact")
    model, source = load(artifact, device=device, residency=residency), filled(5).state_dict()
    half = {name: value.to(device) if index % 2 else value for index, (name, value) in enumerate(source.items())}
    half |= {name: value.flip(0).flip(0) for name, value in half.items()}
    assert model.swap(half).weights_id == pack(source, artifact, out=tmp_path / "v.safetensors").weights_id
    assert number(model(torch.zeros((), device=device)).cpu()) == 5
