"""The fleets of tests: in one process, and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .clusters import Deployed, deployed_on
from .nodes import Fleet, NodeAgent, serving_zero


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Two nodes that serve number 0, at revision 1."""
    with serving_zero(tmp_path, 2, monkeypatch) as made:
        yield made


@pytest.fixture
def agent(fleet: Fleet) -> NodeAgent:
    """The agent of the first node."""
    return fleet.agents["n0"]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Four replicas on three nodes."""
    with deployed_on(tmp_path_factory.mktemp("fleet"), 3) as made:
        yield made
