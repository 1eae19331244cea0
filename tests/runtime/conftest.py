"""Fixtures of several modules."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.compiled import Mixtures
from tests.desk import Desk
from tests.graphs import Whole, numbers
from tests.handmade import Stage
from tests.runtime.blocks import make_blocks_small
from tests.tiny import TinyArtifact, WriteDelta, WriteWeights
from tests.varied import RichFiles
from tests.watched import Directory
from weightswap_exporter import compile_engines, export
from weightswap_runtime import Model, load, write_delta


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Nothing but the last reference frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def model(tiny: TinyArtifact, residency: Any) -> Model:
    return load(tiny.path, residency=residency)


@pytest.fixture
def stage(tiny: TinyArtifact, tmp_path: Path) -> Stage:
    return Stage(tiny, tmp_path)


@pytest.fixture(params=[1 << 20, 16], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_small(monkeypatch, request.param)


@pytest.fixture
def delta(weight_file: WriteWeights, tmp_path: Path) -> WriteDelta:
    """`delta(0, 1)` leads from the weights of seed 0 to those of seed 1."""

    def write(base: int, new: int) -> Path:
        return write_delta(weight_file(base), weight_file(new), tmp_path / f"d{base}-{new}.safetensors").path

    return write


@pytest.fixture
def directory(tiny: TinyArtifact, tmp_path: Path) -> Directory:
    return Directory(tiny, tmp_path / "run")


@pytest.fixture
def desk(tiny: TinyArtifact, tmp_path: Path) -> Desk:
    return Desk(tiny, tmp_path / "run")


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Mixtures:
    return Mixtures(tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    files = RichFiles(tmp_path_factory.mktemp("rich"), 3)
    files.artifact = compile_engines(files.artifact, ["aoti"])
    return files


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with sizes, texts, a subgraph and a loop of results."""

    def forward(x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 1, lambda z: z.sin(), lambda z: z.cos(), (x,))
        first, second = y.split([1, y.shape[0] - 1])
        return nn.functional.gelu(first, approximate="tanh"), second * math.inf

    path = tmp_path_factory.mktemp("small") / "small.artifact"
    export(Whole(forward), (numbers(4, 3),), out=path, dynamic_shapes=(({0: Dim("rows", min=3, max=9)},),))
    return path
