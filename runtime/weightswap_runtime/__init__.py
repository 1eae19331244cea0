"""weightswap, the server's side: put any checkpoint of an exported architecture behind its graph, live."""

from ._version import __version__
from .artifact import Artifact
from .deltafile import Delta, write_delta
from .errors import (
    ArtifactError,
    BaseMismatch,
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
    PublishTimeout,
    RecipeError,
    StageCancelled,
    StageClosed,
    StageTimeout,
    StagingBusy,
    SwapError,
    UnexpectedWeights,
    UnknownMethod,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    WeightswapError,
)
from .events import Event
from .job import Progress
from .model import Model, load
from .pinned import Pinned
from .receipts import SwapReceipt
from .staged import Staged
from .tools import read_weights
from .weightfile import WeightFile

__all__ = [
    "Artifact",
    "ArtifactError",
    "BaseMismatch",
    "CallError",
    "CaptureError",
    "CheckpointError",
    "Delta",
    "DigestMismatch",
    "Event",
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
    "Progress",
    "PublishTimeout",
    "RecipeError",
    "StageCancelled",
    "StageClosed",
    "StageTimeout",
    "Staged",
    "StagingBusy",
    "SwapError",
    "SwapReceipt",
    "UnexpectedWeights",
    "UnknownMethod",
    "Unsupported",
    "WeightFile",
    "WeightFileError",
    "WeightsMismatch",
    "WeightswapError",
    "__version__",
    "load",
    "read_weights",
    "write_delta",
]
