"""Models that are each hard for an exporter in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Does(nn.Module):
    """Module that returns `act(self, x)`, with what it holds by name: modules, parameters, `nn.Buffer`s, anything."""

    def __init__(self, act: Callable[[Any, torch.Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.act = act
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self, x)


def doing(*values: Any) -> Any:
    """Return the last of what a lambda does."""
    return values[-1]


class Everything(nn.Module):
    """Model with buffers of every kind, tied weights, literals, plain tensor attributes, BatchNorm and dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout()
        self.embed = nn.Embedding(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)
        self.register_buffer("idle", torch.ones(3), persistent=False)
        self.register_buffer("offset", torch.randn(width))
        self.plain = torch.full((width,), 3.0)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        y = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        y = self.head(y) + self.table + self.plain + self.offset
        return {"logits": y, "scaled": (y + torch.tensor([0.25])) * scale}

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["logits"] + self.forward(x)["logits"]


class Counter(nn.Module):
    """Model with a step count and a running mean as state, changed by calls; `peek` only reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x) + self.mean + self.steps

    def peek(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.steps, self.mean


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Nested(nn.Module):
    """Model with nested inputs and outputs, extra positional and keyword arguments, and literals of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, parts: list[Any], *rest: torch.Tensor, options: dict[str, Any], flag: bool = True
    ) -> Any:
        y = self.linear(x) + parts[0] + parts[1]["deep"]
        y = y + rest[0] if flag else y
        y = y * options["gain"]
        return Pair(y, y.sum()), [x.shape[0], None, 2.5, "text", True], {"z": (y,), 3: options["gain"]}


class Views(nn.Module):
    """Model whose outputs are weights, constants, state or inputs themselves, or views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.state.add_(1)
        return self.weight, self.weight.t()[1:], self.table, self.state, x


class Renamed(nn.Module):
    """Model with submodules whose state-dict hooks drop a level of names, like torchtune's fusion layers."""

    class Fusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self._register_state_dict_hook(self._rename)

        @staticmethod
        def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for key in [key for key in state if key.startswith(f"{prefix}layer.")]:
                state[key.replace(f"{prefix}layer.", prefix)] = state.pop(key)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Fusion(), self.Fusion()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))

    def get_extra_state(self) -> str:
        return "a note"

    def set_extra_state(self, state: str) -> None: ...


def fill(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model
