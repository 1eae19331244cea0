"""A service for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.services import Service
from tests.support.tiny import TinyArtifact


@pytest.fixture
def service(tiny: TinyArtifact, tmp_path: Path) -> Service:
    return Service(tiny, tmp_path / "service")
