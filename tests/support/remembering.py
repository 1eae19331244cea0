"""Model that accumulates its inputs in its state, with its artifact and contexts on each engine."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import nn

from tests.support.compiled import needs_compiler
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_runtime import Context, load
from weightswap_runtime.live.context import OnSwap

ENGINES = ["torch", "onnx", pytest.param("aoti", marks=[pytest.mark.slow, needs_compiler])]
Policy = Literal["invalidate", "reset", "keep", "pin"]
POLICIES: tuple[Policy, ...] = get_args(OnSwap)


class Remembering(nn.Module):
    """Adds up its inputs, multiplied by its weights: once in place, and once by assignment."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.ones((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(self.mix(x).sum(0))
        self.calls = self.calls + 1
        return self.total / self.calls

    def peek(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state itself, unchanged."""
        return self.total, self.calls

    def plain(self, context: torch.Tensor) -> torch.Tensor:
        """Compute without state; the input has the name of an argument of `Model.__call__`."""
        return context * 2


X = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = [Remembering(seed).eval() for seed in range(3)]
        methods = {
            "forward": MethodSpec("forward", (X,)),
            "peek": MethodSpec("peek"),
            "plain": MethodSpec("plain", (X,)),
        }
        self.artifact = export(self.models[0], methods=methods, out=folder / "a.artifact", engines=("torch", "onnx"))
        self.compiled = {"torch", "onnx"}
        self.weights = [
            pack(model, self.artifact, out=folder / f"v{seed}.safetensors").path
            for seed, model in enumerate(self.models)
        ]

    def compile(self, engine: str) -> None:
        if engine not in self.compiled:
            self.artifact = compile_engines(self.artifact, [engine])
            self.compiled.add(engine)

    def eager(self, seed: int) -> Remembering:
        return deepcopy(self.models[seed])


class Served:
    """Model on one engine, called with torch tensors whatever types the engine takes."""

    def __init__(self, files: Files, engine: str = "torch", **options: Any) -> None:
        files.compile(engine)
        self.files = files
        self.model = load(files.artifact, files.weights[0], engine=engine, **options)  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor = X, context: Context | None = None, of: Any = None) -> torch.Tensor:
        inputs = x.numpy() if self.model.engine == "onnx" else x
        return torch.as_tensor((of or self.model)(inputs, context=context) if context else (of or self.model)(inputs))

    def peek(self, context: Context) -> tuple[torch.Tensor, int]:
        total, calls = self.model.peek(context=context)
        return torch.as_tensor(total), int(calls)

    def equal(self, output: torch.Tensor, expected: torch.Tensor) -> bool:
        if self.model.engine == "torch":
            return torch.equal(output, expected)
        return torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
