"""The server side of weightswap: load an exported model, call it, and swap its weights while it serves."""

from weightswap_runtime.following.desired_state import DesiredState, DesiredWeights, Hold
from weightswap_runtime.following.desired_store import DesiredStore
from weightswap_runtime.following.watching import Follower, FollowStatus, Watcher
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.delta import Delta, write_delta
from weightswap_runtime.format.merging import merge_deltas
from weightswap_runtime.format.safetensors import WeightFile
from weightswap_runtime.live.context import Context
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.live.receipt import Event, SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.variants import VariantReceipt
from weightswap_runtime.model.generation import TokenStream
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import Pinned
from weightswap_runtime.process_groups import process_group
from weightswap_runtime.staging.sets import read_weights
from weightswap_runtime.transfer.group import GroupReceiver
from weightswap_runtime.transfer.keeping import KeptFiles
from weightswap_runtime.transfer.receiver import Receiver
from weightswap_runtime.transfer.sender import Sender, Sending

from ._version import __version__
from .errors import (
    ArtifactError,
    BaseMismatch,
    CallError,
    CaptureError,
    CheckpointError,
    ContextError,
    DesiredError,
    DeviceError,
    DigestMismatch,
    ExportError,
    GoldenMismatch,
    GraphMismatch,
    InputMismatch,
    MissingExtra,
    ModelClosed,
    ModelFailed,
    NonFiniteWeights,
    NothingToRollBack,
    NotPromoted,
    NoWeights,
    OutOfMemory,
    ParityError,
    RanksLost,
    RanksRefused,
    RevisionConflict,
    SourceChanged,
    StageCancelled,
    StageClosed,
    StagingBusy,
    StaleState,
    SwapError,
    TransferFailed,
    UnexpectedWeights,
    UnknownName,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    WeightsMismatch,
    WeightswapError,
)
from .jobs import Progress

__all__ = [
    "Artifact",
    "ArtifactError",
    "BaseMismatch",
    "CallError",
    "CaptureError",
    "CheckpointError",
    "Context",
    "ContextError",
    "Delta",
    "DesiredError",
    "DesiredState",
    "DesiredStore",
    "DesiredWeights",
    "DeviceError",
    "DigestMismatch",
    "Event",
    "ExportError",
    "FollowStatus",
    "Follower",
    "GoldenMismatch",
    "GraphMismatch",
    "GroupReceiver",
    "Hold",
    "InputMismatch",
    "KeptFiles",
    "MissingExtra",
    "Model",
    "ModelClosed",
    "ModelFailed",
    "NoWeights",
    "NonFiniteWeights",
    "NotPromoted",
    "NothingToRollBack",
    "OutOfMemory",
    "ParityError",
    "Pinned",
    "Progress",
    "Ranks",
    "RanksLost",
    "RanksRefused",
    "Receiver",
    "RevisionConflict",
    "Sender",
    "Sending",
    "SourceChanged",
    "StageCancelled",
    "StageClosed",
    "Staged",
    "StagingBusy",
    "StaleState",
    "SwapError",
    "SwapReceipt",
    "TokenStream",
    "TransferFailed",
    "UnexpectedWeights",
    "UnknownName",
    "Unsupported",
    "VariantReceipt",
    "WaitTimeout",
    "Watcher",
    "WeightFile",
    "WeightFileError",
    "WeightsMismatch",
    "WeightswapError",
    "__version__",
    "load",
    "merge_deltas",
    "process_group",
    "read_weights",
    "write_delta",
]
