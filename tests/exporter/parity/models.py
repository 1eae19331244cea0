"""Models with places where a fault can be planted."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block with a square weight, a GELU and a constant."""

    def __init__(self, width: int, scale: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.square = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(nn.functional.gelu(self.square(self.norm(x)))) * self.scale


class Tied(nn.Module):
    """Two tied pairs of one shape around a stack of blocks, and a table that is a constant."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(16, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.left_head, self.right_head = nn.Linear(width, 16, bias=False), nn.Linear(width, 16, bias=False)
        self.left_head.weight, self.right_head.weight = self.left.weight, self.right.weight
        self.register_buffer("table", torch.linspace(-1, 1, width), persistent=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.left(ids) + self.right(ids.flip(-1)) * self.table
        for block in self.blocks:
            y = block(y)
        return {"left": self.left_head(y), "right": self.right_head(y)}


IDS = torch.arange(10).reshape(2, 5)
SHAPES = {"ids": {0: torch.export.Dim("batch", max=32), 1: torch.export.Dim("length", max=64)}}


def tied(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()
