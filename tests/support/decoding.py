"""Model whose methods run on different engines, with its artifact, weights and calls."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.compiled import needs_compiler
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_runtime import Model, load

ENGINES = ["onnx", pytest.param("aoti", marks=[pytest.mark.slow, needs_compiler])]
ROOM = 16


class Decoder(nn.Module):
    """Decoder with a cache of keys and its length; `decode` appends one row and reads the whole cache."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.key = nn.Linear(4, 4)
        self.norm = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("cache", torch.zeros(ROOM, 4))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))

    def prefill(self, rows: torch.Tensor) -> torch.Tensor:
        """Fill the cache with rows, [n, 4]."""
        keys = self.key(rows)
        self.cache.copy_(nn.functional.pad(keys, (0, 0, 0, ROOM - rows.shape[0])))
        self.length.copy_(torch.ones_like(rows[:, 0]).sum().long())
        return keys @ (self.norm / self.norm.sum())  # depends on weights only, so a prologue computes it

    def decode(self, row: torch.Tensor) -> torch.Tensor:
        """Append one row, [4]."""
        here = (torch.arange(ROOM) == self.length)[:, None]
        self.cache.copy_(torch.where(here, self.key(row), self.cache))
        self.length.add_(1)
        return (self.cache @ self.norm).sum(0)

    def plain(self, row: torch.Tensor) -> torch.Tensor:
        return self.key(row) * 2


ROWS, ROW = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 4)


def specs(**engines: tuple[str, ...]) -> dict[str, MethodSpec]:
    """Return the specs of the decoder's methods; `engines` maps some of them to engines."""
    rows = {"rows": {0: Dim("rows", min=1, max=ROOM)}}
    methods = {"prefill": MethodSpec("prefill", (ROWS,), dynamic_shapes=rows, engines=engines.get("prefill"))}
    return methods | {name: MethodSpec(name, (ROW,), engines=engines.get(name)) for name in ("decode", "plain")}


class Files:
    """Weights, and an artifact of which one method runs on another engine."""

    def __init__(self, folder: Path, engine: str, *, alone: str = "decode") -> None:
        self.engine, self.alone = engine, alone
        self.models = [Decoder(seed).eval() for seed in range(3)]
        engines: dict[str, tuple[str, ...]] = {alone: ("torch", engine)}
        self.artifact = export(self.models[0], methods=specs(**engines), out=folder / "a.artifact")
        self.weights = [
            pack(model, self.artifact, out=folder / f"v{seed}.safetensors").path
            for seed, model in enumerate(self.models)
        ]

    def load(self, device: str = "cpu", **options: Any) -> Model:
        """Load the model on an engine; skip the test if the engine does not support the device."""
        if device != "cpu" and self.engine == "onnx":
            skip_without_provider()
        if device != "cpu" and self.engine == "aoti":
            self._compile_for_gpus()
        return load(self.artifact, self.weights[0], **{"engine": self.engine, "device": device, **options})

    @functools.cache  # noqa: B019  of a few
    def _compile_for_gpus(self) -> None:
        if torch.version.cuda is None:
            pytest.skip("AOTInductor compiles for CUDA alone here")
        self.artifact = compile_engines(self.artifact, ["aoti"], methods=[self.alone], device="cuda")


def skip_without_provider() -> None:
    """Skip the test if ONNX Runtime has no CUDA provider."""
    from onnxruntime import get_available_providers

    if "CUDAExecutionProvider" not in get_available_providers():
        pytest.skip("this build of onnxruntime has no CUDAExecutionProvider")


class Caller:
    """Calls a model with torch tensors, whatever types its engine takes."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, method: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
        array = self.model.engine == "onnx" and self.model.device == "cpu"
        output = self.model.method(method)(x.numpy() if array else x.to(self.model.device), **options)
        assert isinstance(output, np.ndarray) == array
        return torch.as_tensor(output).cpu()


def near(output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
