"""Models of the engine `aoti`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.compiled import ATOL, RTOL, Mixtures
from tests.support.varied import RichFiles
from weightswap_runtime import Model, load

Residency = Literal["double", "single"]


def opened(files: Mixtures | RichFiles, weights: Path, residency: Residency = "double") -> Model:
    return load(files.artifact, weights, engine="aoti", residency=residency, keep_previous="host")


def near(one: Any, other: Any) -> bool:
    """Return True if two trees are equal except for rounding."""
    if isinstance(other, torch.Tensor):
        same = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, False)
        return same and torch.allclose(one, other, rtol=RTOL, atol=ATOL)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return type(one) is type(other) and one == other
