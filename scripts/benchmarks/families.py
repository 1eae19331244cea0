"""Small models of families whose captures differ: with their own writes in place, residuals, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IMAGE = (2, 16, 16, 16)


class Block(nn.Module):
    """As in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm(self.conv(x)))))
        y += x
        return self.act(y)


def chain() -> tuple[nn.Module, torch.Tensor]:
    """Twenty convolutions with norms and activations in place, as in MobileNet."""
    parts = [
        part
        for _ in range(20)
        for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
    ]
    return nn.Sequential(*parts).eval(), torch.randn(*IMAGE)


def residual() -> tuple[nn.Module, torch.Tensor]:
    """Eight blocks of two convolutions."""
    return nn.Sequential(*(Block() for _ in range(8))).eval(), torch.randn(*IMAGE)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Six layers of an encoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval(), torch.randn(2, 8, 32)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "Conv, BatchNorm, Hardswish(inplace), 20 times": chain,
    "residual blocks, 8": residual,
    "transformer layers, 6": transformer,
}
