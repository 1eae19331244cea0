"""weightswap, the server's side: put any checkpoint of an exported architecture behind its graph, live."""

from ._version import __version__
from .artifact import Artifact
from .errors import (
    ArtifactError,
    CallError,
    CaptureError,
    CheckpointError,
    DigestMismatch,
    ExportError,
    FormatVersionError,
    GraphMismatch,
    InputMismatch,
    LeaseTimeout,
    MissingExtra,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    OutOfMemory,
    PinReleased,
    RecipeError,
    StageClosed,
    StagingBusy,
    SwapError,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    WeightswapError,
)
from .model import Model, load
from .pinned import Pinned
from .staged import Staged, SwapReceipt
from .weightfile import WeightFile

__all__ = [
    "Artifact",
    "ArtifactError",
    "CallError",
    "CaptureError",
    "CheckpointError",
    "DigestMismatch",
    "ExportError",
    "FormatVersionError",
    "GraphMismatch",
    "InputMismatch",
    "LeaseTimeout",
    "MissingExtra",
    "Model",
    "ModelFailed",
    "NoWeights",
    "NothingToRollBack",
    "OutOfMemory",
    "PinReleased",
    "Pinned",
    "RecipeError",
    "StageClosed",
    "Staged",
    "StagingBusy",
    "SwapError",
    "SwapReceipt",
    "Unsupported",
    "WeightFile",
    "WeightFileError",
    "WeightsMismatch",
    "WeightswapError",
    "__version__",
    "load",
]
