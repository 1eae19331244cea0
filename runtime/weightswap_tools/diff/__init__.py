"""Comparison of two sets of weights, or of two artifacts."""

from weightswap_runtime.tensors import TensorType

from .artifacts import ArtifactsDiff, compare_artifacts
from .documents import Change, Histogram, Largest, Overall, SetInfo, TensorDiff, Values, WeightsDiff
from .weights import Policy, compare_weights

__all__ = [
    "ArtifactsDiff",
    "Change",
    "Histogram",
    "Largest",
    "Overall",
    "Policy",
    "SetInfo",
    "TensorDiff",
    "TensorType",
    "Values",
    "WeightsDiff",
    "compare_artifacts",
    "compare_weights",
]
