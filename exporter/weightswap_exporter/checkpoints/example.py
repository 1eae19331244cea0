"""Examples of checkpoints, given by the caller of `export()`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weightswap_exporter.adapter.tracing import CheckpointTensors
from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.tensors.torch_tensors import torch_dtype

from .reading_checkpoints import open_checkpoint
from .tensor import CheckpointTensor


def example_checkpoint(example: CheckpointTensors | str | os.PathLike[str]) -> CheckpointTensors:
    """Return the given tensors by key, or those in a path's checkpoint as meta tensors. Raises CheckpointError."""
    if isinstance(example, str | os.PathLike):
        return _from_path(Path(example))
    if not isinstance(example, Mapping):
        raise CheckpointError(f"checkpoint: expected a dict of tensors or a path, got a {type(example).__qualname__}")
    nested = [key for key, value in example.items() if isinstance(value, Mapping) and _has_tensors(value)]
    if nested and not _has_tensors(example):
        raise CheckpointError(f"checkpoint: has its tensors under {nested[0]!r}; give checkpoint[{nested[0]!r}]")
    return example


def _has_tensors(tree: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree.values())


def _from_path(path: Path) -> CheckpointTensors:
    with open_checkpoint(path) as opened:
        filled = [level for level in opened.levels if level.tensors]
        levels = [level for level in filled if not level.path] or filled
        if len(levels) != 1:
            paths = ", ".join(level.path for level in levels) or "none"
            raise CheckpointError(f"{path}: expected one state dict, found {paths}; give its tensors as a dict")
        return {key: _hollow(values) for key, values in levels[0].tensors.items()}


def _hollow(values: CheckpointTensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=torch_dtype(values.dtype), device="meta")
