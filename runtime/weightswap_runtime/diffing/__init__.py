"""What changed between two sets of weights, or between two artifacts."""

from .artifacts import ArtifactsDiff, compare_artifacts
from .policies import Policy
from .report import Change, Histogram, Largest, Overall, SetInfo, TensorDiff, TensorType, Values, WeightsDiff
from .weights import compare_weights

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
