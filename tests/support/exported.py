"""A model that was exported, packed and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from weightswap_exporter import compile_engines, export, pack
from weightswap_runtime import Model, load


def exported(eager: nn.Module, args: tuple[Any, ...], folder: Path, engine: Any = "torch", **options: Any) -> Model:
    """Export a model to `NAME.artifact` in a folder, NAME being its class, and load it with its weights.

    options: more of `export`.
    """
    name = type(eager).__name__
    artifact = export(eager, args, out=folder / f"{name}.artifact", **options)
    if engine != "torch":
        artifact = compile_engines(artifact, [engine], trial=False)
    return load(artifact, pack(eager, artifact, out=folder / f"{name}.safetensors").path, engine=engine)
