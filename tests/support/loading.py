"""Models whose checkpoints are not their weights, each in one way. `old(seed)` returns a checkpoint that they load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

State = dict[str, Any]


class Fused(nn.Module):
    """Saves q, k and v as one transposed tensor, and splits it on loading; one of them is tied."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.again = self.v
        self._register_state_dict_hook(self._fuse)
        self.register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _fuse(module: nn.Module, state: State, prefix: str, _: Any) -> None:
        parts = [state.pop(f"{prefix}{part}.weight").t() for part in "qkv"]
        state[f"{prefix}qkv"] = torch.cat(parts, dim=1)
        del state[f"{prefix}again.weight"]

    @staticmethod
    def _split(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        for part, value in zip("qkv", state.pop(f"{prefix}qkv").chunk(3, dim=1), strict=True):
            state[f"{prefix}{part}.weight"] = value.t().contiguous()
        state[f"{prefix}again.weight"] = state[f"{prefix}v.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.q(x) @ self.k(x).T @ self.v(x) + self.again(x))


class Nested(nn.Module):
    """Two fused blocks below other names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Fused(), Fused()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class Permuted(nn.Module):
    """Loads rows in another order than the model's: same key, same shape, other values."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)
        self.register_load_state_dict_pre_hook(self._permute)

    @staticmethod
    def _permute(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        order = torch.tensor([0, 2, 4, 1, 3, 5])
        for name in ("weight", "bias"):
            state[f"{prefix}proj.{name}"] = state[f"{prefix}proj.{name}"][order]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class Quantised(nn.Module):
    """Loads bytes and a scale for each row; `_load_from_state_dict` converts them to floats."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        if f"{prefix}packed" in state:
            scale = state.pop(f"{prefix}scale")
            state[f"{prefix}weight"] = (state.pop(f"{prefix}packed").float() - 8) * scale[:, None]
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)

    @staticmethod
    def old(seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 16, (3, 4), dtype=torch.uint8, generator=generator)
        return {"packed": packed, "scale": torch.rand(3, generator=generator)}


class Interpolated(nn.Module):
    """Resizes position embeddings of another grid on loading."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 36, 4))
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        stored = state[f"{prefix}positions"]
        side = int(stored.shape[1] ** 0.5)
        if side != 6:
            grid = stored.reshape(1, side, side, 4).permute(0, 3, 1, 2)
            grid = functional.interpolate(grid, size=(6, 6), mode="bicubic", align_corners=False)
            state[f"{prefix}positions"] = grid.permute(0, 2, 3, 1).reshape(1, 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions

    @staticmethod
    def old(seed: int) -> State:
        return {"positions": torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(seed))}


class Renaming(nn.Module):
    """Loads the names of an older version, which it no longer writes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_load_state_dict_pre_hook(self._rename)

        @staticmethod
        def _rename(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
            for name in ("weight", "bias"):
                if f"{prefix}{name}" in state:
                    state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}{name}")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    @staticmethod
    def old(seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"weight": (4, 4), "bias": (4,)}
        names = [f"blocks.{block}.{name}" for block in range(2) for name in shapes]
        return {name: torch.randn(*shapes[name.split(".")[-1]], generator=generator) for name in names}


class InPieces(nn.Module):
    """Writes into its parameters, like loaders of LLM servers: shards of a fused weight, and a doubled gain."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(6, 4))
        self.gain = nn.Parameter(torch.randn(4))

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.fused[:4].copy_(state.pop(f"{prefix}gate"))
            self.fused.data[4:] = state.pop(f"{prefix}up")
            self.gain.copy_(state.pop(f"{prefix}gain")).mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain) @ self.fused.T

    @staticmethod
    def old(seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"gate": (4, 4), "up": (2, 4), "gain": (4,)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class ExtraState(nn.Module):
    """Has an extra state that is a tensor, and another that is not."""

    class Noted(nn.Linear):
        def get_extra_state(self) -> str:
            return "a note"

        def set_extra_state(self, state: str) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.Noted(4, 4)

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class ReadsValues(nn.Module):
    """Has loading code that depends on values, so it cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self._rescale)

    @staticmethod
    def _rescale(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        if state[f"{prefix}linear.weight"].abs().max() > 1:
            state[f"{prefix}linear.weight"] = state[f"{prefix}linear.weight"] / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
