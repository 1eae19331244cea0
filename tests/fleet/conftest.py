"""The fleet that the tests of a module have on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .clusters import Deployed, deployed_on


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Four replicas on three nodes."""
    with deployed_on(tmp_path_factory.mktemp("fleet"), 3) as made:
        yield made
