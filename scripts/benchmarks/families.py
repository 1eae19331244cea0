"""Small models of families whose captures differ: in-place operators, residuals, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IMAGE = (2, 16, 16, 16)


class Block(nn.Module):
    """Residual block, as in a ResNet."""

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
    """Return twenty convolutions with norms and in-place activations, as in MobileNet."""
    parts = [
        part
        for _ in range(20)
        for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
    ]
    return nn.Sequential(*parts).eval(), torch.randn(*IMAGE)


def residual() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(8))).eval(), torch.randn(*IMAGE)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval(), torch.randn(2, 8, 32)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(20))), torch.randn(2, 32)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return nn.LSTM(32, 32, 2, batch_first=True).eval(), torch.randn(2, 8, 32)


def bert() -> tuple[nn.Module, torch.Tensor]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=64, **sizes)).eval(), torch.ones(2, 8, dtype=torch.int64)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    from transformers import ResNetConfig, ResNetModel

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [2, 2, 2, 2]}
    return ResNetModel(ResNetConfig(**sizes)).eval(), torch.randn(2, 3, 64, 64)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "Conv, BatchNorm, Hardswish(inplace), 20 times": chain,
    "residual blocks, 8": residual,
    "transformer layers, 6": transformer,
    "linear layers, 20": perceptron,
    "LSTM layers, 2": recurrent,
    "transformers' BERT, 2 layers": bert,
    "transformers' ResNet, 8 blocks": resnet,
}
