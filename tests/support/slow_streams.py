"""What makes a missing wait show on a fast GPU: streams that are busy, and weights of which each call reads all."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightswap_exporter import export, pack, skeleton

EMULATED = hasattr(ctypes.CDLL(None), "emulated_pageable_copies")
CYCLES = 2_000_000_000  # a second of a GPU's clock, or more


def keep_busy(seconds: float) -> None:
    """Let the thread's current stream do nothing else for so long."""
    torch.cuda._sleep(int(seconds * CYCLES))


def slow_copies(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    """Let each of our copies begin late, by up to `most` seconds."""
    from weightswap_runtime.memory.device.torch_device import Accelerator

    copy, choose = Accelerator.copy, random.Random(7)

    def late(self: Accelerator, *arguments: Any) -> None:
        keep_busy(choose.random() * most)
        copy(self, *arguments)

    monkeypatch.setattr(Accelerator, "copy", late)


class Numbers(nn.Module):
    """Weights that are all one number. A call gives the least and the largest of each tensor, so two if they are mixed.

    Its kernels read the tensors one after another, each from its first byte to its last.
    """

    tensors = 8

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        count = nbytes // 4 // self.tensors
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(count)) for _ in range(self.tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([end for weight in self.weights for end in (weight.amin(), weight.amax())]) + x


class NumberFiles:
    """The artifact, and `count` files of about `nbytes`: all weights of file `k` are `k`."""

    def __init__(self, folder: Path, nbytes: int, count: int) -> None:
        with skeleton():
            model = Numbers(nbytes).eval()
        self.artifact = export(model, (torch.zeros(()),), out=folder / "numbers.artifact")
        self.files = []
        for number in range(count):
            tensor = torch.full((nbytes // 4 // Numbers.tensors,), float(number))
            tensors = {f"weights.{index}": tensor for index in range(Numbers.tensors)}
            self.files.append(pack(tensors, self.artifact, out=folder / f"v{number}.safetensors").path)

    @property
    def nbytes(self) -> int:
        """Of one set of weights."""
        return int(self.artifact.manifest.total_bytes)


def number(output: torch.Tensor) -> int:
    """What all weights were that an output was computed from. Raises AssertionError where they differed."""
    found = sorted({int(value) for value in output.tolist()})
    assert len(found) == 1, f"an output of a mixture: {found}"
    return found[0]
