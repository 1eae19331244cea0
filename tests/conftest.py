"""Seeds, devices, and a tiny artifact made by hand, so that the runtime's tests do not need the exporter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from .tiny import TinyArtifact


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=["double", "single"])
def residency(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyArtifact:
    """An affine map with tied and untied weights, a constant and a counter; see tests/tiny.py."""
    return TinyArtifact(tmp_path / "tiny.artifact")


@pytest.fixture
def weight_file(tiny: TinyArtifact, tmp_path: Path) -> Callable[[int], Path]:
    """`weight_file(seed)` writes one set of weights for the tiny artifact and returns its path."""

    def write(seed: int) -> Path:
        return tiny.write(tmp_path / f"v{seed}.safetensors", tiny.values(seed))

    return write
