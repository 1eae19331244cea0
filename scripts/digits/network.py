"""Source code of the model. The server process never imports this module."""

from __future__ import annotations

import torch
from torch import nn


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class DigitsNet(nn.Module):
    """Small CNN with BatchNorm and dropout: float32 images [n, 1, 8, 8] to logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(_block(1, 16), _block(16, 32), nn.MaxPool2d(2), _block(32, 32))
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits
