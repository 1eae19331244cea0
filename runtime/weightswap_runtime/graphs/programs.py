"""Opening an artifact's graphs as torch does, which takes a millisecond for each call in them."""

from __future__ import annotations

import io

import torch
from torch.export import ExportedProgram

from weightswap_runtime.artifact import Artifact
from weightswap_runtime.errors import ArtifactError

from .archives import check_archive, operators


def open_program(artifact: Artifact, name: str) -> ExportedProgram:
    """Open the graph in the artifact's file `name`. Raises ArtifactError."""
    raw = artifact.read(name)
    where = str(artifact.path / name)
    check_archive(raw, where)
    if missing := sorted(name for name in operators(raw) if not _is_registered(name)):
        raise ArtifactError(
            f"{where}: needs {', '.join(missing)}, which this process lacks. Import the package that registers the "
            "operator before the artifact is opened, or export without it."
        )
    try:
        return torch.export.load(io.BytesIO(raw))
    except Exception as error:
        raise ArtifactError(
            f"{where}: torch {torch.__version__} cannot open the graph that torch "
            f"{artifact.manifest.producer.torch} wrote ({error}). Install that torch, or export again."
        ) from error


def _is_registered(name: str) -> bool:
    found: object = torch.ops
    try:
        for part in name.removeprefix("torch.ops.").split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return True
