"""Operators with a token, the tiny model with the weights of seed 1, and a desired store where these are desired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.administered import TOKEN, Operator, operated
from tests.support.quick import quick_servers
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import DesiredStore, Model, load


@pytest.fixture(scope="session", autouse=True)
def _quick_servers() -> Iterator[None]:
    with quick_servers():
        yield


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
        yield


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights) -> Model:
    return load(tiny.path, weight_file(1))


@pytest.fixture
def operator(model: Model, tiny: TinyArtifact, tmp_path: Path) -> Iterator[Operator]:
    with operated(model, tiny, tmp_path) as found:
        yield found


@pytest.fixture
def desired_store(weight_file: WriteWeights, tmp_path: Path) -> DesiredStore:
    (tmp_path / "service").mkdir()
    found = DesiredStore(tmp_path / "service")
    found.set(weight_file(1), revision=0, by="ana")
    return found
