"""Artifacts with their weights, and the comparison of trees, shared by tests of both packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_runtime import Artifact, Model, load


def served(folder: Path, eager: nn.Module, *args: Any, weights: Any = None, **options: Any) -> Model:
    """Return an exported model with its own weights, or others; args and options: of `export()`."""
    artifact = export(eager, args, out=folder / "a", **options)
    return loaded(artifact, folder, eager if weights is None else weights)


def loaded(artifact: Artifact, folder: Path, weights: Any, **options: Any) -> Model:
    """Return a model with weights that are packed for it; options: of `load()`."""
    return load(artifact, pack(weights, artifact, out=folder / "w.safetensors").path, **options)


def different(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model whose weights and statistics differ from those of every other seed."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1)
    return model


class Setup:
    """Artifact exported from a skeleton, `count` sets of weights, and the eager models that they come from."""

    def __init__(
        self, folder: Path, build: Callable[[], nn.Module], methods: dict[str, MethodSpec], count: int = 10
    ) -> None:
        with skeleton():
            hollow = build().eval()
        self.artifact: Artifact = export(hollow, methods=methods, out=folder / "model.artifact")
        self.models = [different(build, seed) for seed in range(count)]
        self.files = [folder / f"v{seed}.safetensors" for seed in range(count)]
        for model, file in zip(self.models, self.files, strict=True):
            pack(model.state_dict(), self.artifact, out=file)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) and type(one) is type(other)
