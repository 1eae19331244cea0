"""Memory of a swap beside the arena: one computed weight and its inputs, whatever the model's size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from tests import ROOT
from tests.support.loading import Fused
from weightswap_exporter import export, skeleton

WIDTH, BLOCKS = 1448, 8
WEIGHT = WIDTH * WIDTH * 4
SLACK = 16 << 20  # pools of threads, huge pages
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # freed memory is returned at once, which glibc does not guarantee

SWAP = """
import sys
from tests.support.peaks import taken
from weightswap_runtime import load

model = load(sys.argv[1], residency="single")
model._member.open_transforms()  # reading the graph takes memory of its own
print(taken(lambda: model.swap(sys.argv[2])))
"""


@pytest.mark.slow
def test_computed_weights_take_the_memory_of_one(tmp_path: Path) -> None:
    with skeleton():
        model = nn.Sequential(*(Fused(WIDTH) for _ in range(BLOCKS))).eval()
    artifact = export(model, (torch.zeros(2, WIDTH),), out=tmp_path / "a.artifact")
    state = {f"{block}.qkv": torch.ones(WIDTH, 3 * WIDTH) for block in range(BLOCKS)}
    state |= {f"{block}.norm.{name}": torch.ones(WIDTH) for block in range(BLOCKS) for name in ("weight", "bias")}
    safetensors.torch.save_file(state, tmp_path / "c.safetensors")
    arguments = [sys.executable, "-c", SWAP, str(artifact.path), str(tmp_path / "c.safetensors")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | GIVE_BACK)
    beside = int(done.stdout) - artifact.manifest.total_bytes
    inputs, output = 3 * WEIGHT, WEIGHT
    assert beside < inputs + 2 * output + SLACK
    assert artifact.manifest.total_bytes > 2 * (inputs + 2 * output + SLACK)
