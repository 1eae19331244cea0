"""The memory that saving and loading a context take: one more tensor, and the size of the file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import ROOT
from weightswap_exporter import export, pack

TENSORS, SIZE = 4, 4 << 20  # elements of each
STATE = TENSORS * SIZE * 4
SLACK = 8 << 20
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # what is freed goes back at once, which glibc leaves to chance

SAVE = """
import sys
import torch
from tests.support.peaks import taken
from weightswap_runtime import load

model, loaded = load(sys.argv[1], sys.argv[2]), []
context = model.new_context()
model(torch.ones(()), context=context)
print(taken(lambda: context.save(sys.argv[3])))
print(taken(lambda: loaded.append(model.load_context(sys.argv[3]))))
"""


class Large(nn.Module):
    """A module that adds its input to every element of a large state."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))
        for number in range(TENSORS):
            self.register_buffer(f"kept_{number}", torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(TENSORS):
            getattr(self, f"kept_{number}").add_(x + self.bias)
        return x + self.bias


@pytest.mark.slow
def test_saving_and_loading_take_the_memory_of_the_state(tmp_path: Path) -> None:
    module = Large().eval()
    artifact = export(module, (torch.ones(()),), out=tmp_path / "a.artifact")
    weights = pack(module, artifact, out=tmp_path / "v.safetensors").path
    arguments = [sys.executable, "-c", SAVE, str(artifact.path), str(weights), str(tmp_path / "c.safetensors")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | GIVE_BACK)
    saving, loading = map(int, done.stdout.split())
    assert saving < SIZE * 4 + SLACK
    assert loading < 2 * STATE + SIZE * 4 + SLACK  # the new state, what the file has, and one tensor
    assert (tmp_path / "c.safetensors").stat().st_size > STATE
