"""Artifacts that AOTInductor has compiled, for tests of the engine `aoti`. Compiling takes seconds for each method."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.export import Dim

from tests.support.setups import different
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import Artifact
from weightswap_runtime.engines.aoti_package import machine_targets

CAN_COMPILE = bool(machine_targets()) and shutil.which("g++") is not None and hasattr(config.cpp, "march")
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="needs g++, torch 2.13 and a machine that is a target")
# relative and absolute tolerance of fused arithmetic; models of the zoo stay far below it
RTOL, ATOL = 1e-4, 1e-5
ROWS, WORDS, WIDTH = 64, 30, 16
SIZES = (1, 2, 5, 17, ROWS)


class Mixture(nn.Module):
    """Model with everything that a compiler treats specially: small weights, lookups, integers, literals, writes.

    The output contains a weight, a constant and an input unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.ones(1, 1))
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.linspace(0, 1, 3), persistent=False)
        self.plain = torch.full((3,), 3.0)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor, times: int, flag: bool = True) -> dict[str, Any]:
        seen.add_(1)
        x = self.embed(ids)
        y = self.body(x) * self.scalar + self.table + self.plain + self.one
        return {
            "y": (y + torch.tensor([0.25])) * times + seen.sum() + self.empty.sum(),
            "logits": self.head(x),
            "as they are": (self.scalar, self.body[3].bias, self.table, ids),
            "numbers": [times + 1, ids.shape[0], None, 2.5, "text", flag],
        }


def sample(rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.randint(0, WORDS, (rows,)), torch.rand(3, 4), 3


class Mixtures:
    """Artifact for the engines `torch` and `aoti`, with sets of weights and their eager models."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        shapes = {"ids": {0: Dim("rows", max=ROWS)}, "seen": None, "times": Dim.DYNAMIC}
        methods = {"forward": MethodSpec("forward", sample(4), dynamic_shapes=shapes)}
        self.models = [different(Mixture, seed) for seed in range(count)]
        out = folder / "mixture.artifact"
        self.artifact: Artifact = export(self.models[0], methods=methods, out=out, engines=("torch", "aoti"))
        self.files = [folder / f"v{seed}.safetensors" for seed in range(count)]
        for model, file in zip(self.models, self.files, strict=True):
            pack(model, self.artifact, out=file)
