"""Seeds, devices, and a tiny artifact made by hand, so that the runtime's tests do not need the exporter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from .tiny import TinyArtifact

TOGETHER = ("tests/zoo/", "tests/runtime/test_aoti")

# how long an example takes says nothing of the code
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers, what shares fixtures goes to one: a module, the whole zoo, and what is compiled."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((start for start in TOGETHER if path.startswith(start)), path)

    return Together(config, log)


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
