"""Giving an eager model the weights of a file or checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from weightswap_exporter.adapter.tracing import Load
from weightswap_exporter.checkpoints.through_model import load_into
from weightswap_exporter.goldens.recording import type_problems
from weightswap_exporter.models.tensors import named_tensors, unwrapped
from weightswap_exporter.packing import pack
from weightswap_runtime import Artifact, read_weights
from weightswap_runtime.errors import CheckpointError, WeightFileError
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.messages import listed

PathLike = str | os.PathLike[str]


def fill_model(model: nn.Module, artifact: Artifact, weights: PathLike, load: Load | None = None) -> None:
    """Put weights into the model that an artifact was exported from.

    A packed weight file's tensors are put in by name. Anything else is loaded by the model's own code, or `load`, as
    `pack(..., model=model)` does; what that refuses but the artifact's adapter does not is packed first.

    Raises CheckpointError and what reading raises.
    """
    plain = unwrapped(model)
    if _is_packed(weights):
        _fill(plain, artifact, weights)
        return
    try:
        with load_into(plain, weights, load):
            return
    except CheckpointError:
        if load is not None:
            raise
        with TemporaryDirectory(prefix="weightswap-") as folder:
            _fill(plain, artifact, pack(weights, artifact, out=Path(folder) / "weights.safetensors").path)


def _fill(model: nn.Module, artifact: Artifact, weights: PathLike) -> None:
    """Put a packed file's tensors in by name. Raises CheckpointError."""
    tensors, values = named_tensors(model), read_weights(weights, framework="torch")
    problems = list(type_problems(model, artifact.manifest))
    problems += [f"{row.name}: not in the file" for row in artifact.manifest.weights if row.name not in values]
    if not problems:
        pairs = [(row.name, tensors[row.name], values[row.name]) for row in artifact.manifest.weights]
        problems = [
            f"{name}: {list(one.shape)}, not {list(other.shape)}"
            for name, one, other in pairs
            if one.shape != other.shape
        ]
    if problems:
        raise CheckpointError(f"{weights}: is not for this model: {listed(problems, between='; ')}")
    with torch.no_grad():
        for _, tensor, value in pairs:
            tensor.copy_(value)


def _is_packed(weights: PathLike) -> bool:
    try:
        with open_weights(weights) as opened:
            return opened.stamp is not None
    except WeightFileError:
        return False
