"""Opening the graphs of an artifact. Needs torch."""

from __future__ import annotations

import io

import torch
from torch.export import ExportedProgram

from .archives import check_archive
from .artifact import Artifact
from .errors import ArtifactError


def open_program(artifact: Artifact, name: str) -> ExportedProgram:
    """Open the graph in the artifact's file `name`. Raises ArtifactError."""
    raw = artifact.read(name)
    where = str(artifact.path / name)
    check_archive(raw, where)
    try:
        return torch.export.load(io.BytesIO(raw))
    except Exception as error:
        raise ArtifactError(
            f"{where}: torch {torch.__version__} cannot open the graph that torch "
            f"{artifact.manifest.producer.torch} wrote ({error}). Install that torch and the packages whose operators "
            "the model uses, or export again."
        ) from error
