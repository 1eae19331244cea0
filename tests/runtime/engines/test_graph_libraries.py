"""Graphs with operators of a package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

LIBRARY = """
import torch

@torch.library.custom_op("weightswap_graphs::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)
"""


EXPORTS = """
import torch, weightswap_doubled
from torch import nn
from weightswap_exporter import export, pack

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.ops.weightswap_graphs.doubled(x) * self.scale

model = Model()
pack(model, export(model, (torch.ones(3),), out="own.artifact"), out="own.safetensors")
"""


SERVES = """
import torch
from weightswap_runtime import ArtifactError, Unsupported, load

try:
    load("own.artifact")
except ArtifactError as error:
    print(error)
try:
    load("own.artifact", op_libraries=["weightswap_nowhere"])
except Unsupported as error:
    print(error)
model = load("own.artifact", "own.safetensors", op_libraries=["weightswap_doubled"])
print(model(torch.ones(3)).tolist())
"""


@pytest.mark.slow
def test_operators_of_a_package_are_found_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "weightswap_doubled.py").write_text(LIBRARY)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def python(code: str, *arguments: str) -> str:
        command = [warm.python(), "-c", code, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python(EXPORTS)
    missing, nowhere, result = python(SERVES).splitlines()
    assert "needs torch.ops.weightswap_graphs.doubled.default, which this process lacks" in missing
    assert "registers the operators of weightswap_graphs" in missing
    assert "'weightswap_nowhere' cannot be loaded (ModuleNotFoundError" in nowhere
    assert result == "[2.0, 2.0, 2.0]"
    run = "from weightswap_tools.commands.swap import swap_command\nswap_command()"
    said = python(run, "own.artifact", "own.safetensors", "--op-library", "weightswap_doubled")
    assert "generation  0" in said
    run = "from weightswap_tools.bench.command import bench_command\nbench_command()"
    fast = ("--engine", "torch", "--seconds", "0", "--swaps", "1", "--json")
    measured = json.loads(python(run, "own.artifact", "own.safetensors", *fast, "--op-library", "weightswap_doubled"))
    assert [engine["calls"][0]["calls"] for engine in measured["engines"][:1]] == [1]
