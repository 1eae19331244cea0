"""Load that makes a missing wait show on a fast GPU: busy streams, and weights that each call reads completely."""

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
CYCLES = 2_000_000_000  # at least a second of a GPU's clock


def keep_busy(seconds: float) -> None:
    """Block the thread's current stream for some seconds."""
    torch.cuda._sleep(int(seconds * CYCLES))


def slow_copies(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    """Delay the start of each of our copies by up to `most` seconds."""
    from weightswap_runtime.memory.torch_device import Accelerator

    copy, choose = Accelerator.copy, random.Random(7)

    def late(self: Accelerator, *arguments: Any) -> None:
        keep_busy(choose.random() * most)
        copy(self, *arguments)

    monkeypatch.setattr(Accelerator, "copy", late)


class Numbers(nn.Module):
    """Weights that are all one number. A call returns the minimum and maximum of each tensor.

    If weights are mixed, these differ. The kernels read the tensors one after another, from the first byte to the last.
    """

    tensors = 8

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        count = nbytes // 4 // self.tensors
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(count)) for _ in range(self.tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([end for weight in self.weights for end in (weight.amin(), weight.amax())]) + x


class NumberFiles:
    """Artifact, and `count` files of about `nbytes`: all weights of file `k` are `k`."""

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
        """Size of one set of weights."""
        return int(self.artifact.manifest.total_bytes)


def number(output: torch.Tensor) -> int:
    """Return the number of all weights behind an output. Raises AssertionError if they differ."""
    found = sorted({int(value) for value in output.tolist()})
    assert len(found) == 1, f"an output of a mixture: {found}"
    return found[0]
