"""What several files here have exported."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import Renamed
from weightswap_exporter import export
from weightswap_runtime import Artifact


@pytest.fixture(scope="session")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact of `Renamed`, which takes three columns."""
    return export(Renamed().eval(), (torch.zeros(2, 3),), out=tmp_path_factory.mktemp("renamed") / "renamed.artifact")
