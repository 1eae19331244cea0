"""Models of our own that are hard on an exporter or a conversion in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Tagger(nn.Module):
    """A recurrent network in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(input_ids))[0])


class Fusion(nn.Module):
    """A wrapper that no checkpoint knows of, like torchtune's FusionLayer: its state-dict hooks drop its level."""

    def __init__(self, layer: nn.Module, fusion: nn.Module) -> None:
        super().__init__()
        self.layer, self.fusion = layer, fusion
        self._register_state_dict_hook(self._drop)
        self.register_load_state_dict_pre_hook(self._insert)

    @staticmethod
    def _drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}layer.")]:
            state[prefix + key.removeprefix(f"{prefix}layer.")] = state.pop(key)

    @staticmethod
    def _insert(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        inner = [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}fusion.")]
        for key in inner:
            state[f"{prefix}layer." + key.removeprefix(prefix)] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.fusion(x))


class Fused(nn.Module):
    """Two fusion layers, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        inner = Fusion(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), nn.Linear(6, 6))
        self.layers = nn.ModuleList([inner, Fusion(nn.Linear(6, 6), nn.Linear(6, 6))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Three projections in memory, one tensor in the file: the hooks join them, transposed, and split them again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self._register_state_dict_hook(self._join)
        self.register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{name}.{kind}") for name in "qkv"]
            state[f"{prefix}qkv.{kind}"] = torch.cat([part.t() for part in parts], -1).contiguous()

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            parts = state.pop(f"{prefix}qkv.{kind}").chunk(3, -1)
            state |= {f"{prefix}{name}.{kind}": part.t() for name, part in zip("qkv", parts, strict=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Attentions(nn.Module):
    """Attention layers after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.Sequential(Attention(), Attention())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(x))


class Buffers(nn.Module):
    """Buffers of every kind: in a checkpoint or not, changed by calls or not, of several types, empty, scalar, none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("none", None)
        self.register_buffer("narrow", torch.linspace(0, 1, 4, dtype=torch.bfloat16))
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.plain = torch.full((4,), 3.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        y = self.linear(x)[:, self.order % 4] * self.scale + self.offset
        y = y.where(self.mask, self.table) + self.plain * self.narrow + self.mean
        return {"output": y, "steps": self.steps * 2, "empty": self.empty.sum()}


class Noted(nn.Module):
    """Extra state beside the tensors: a note, and a number that the loading code keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = "made by hand"

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note, "version": 3}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
