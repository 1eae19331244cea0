"""Compiled models and a captured graph, made once for each process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.compiled import Mixtures
from tests.support.graphs import Whole, numbers
from tests.support.varied import RichFiles
from weightswap_exporter import compile_engines, export


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
    """An artifact with sizes, strings, a subgraph and a split."""

    def forward(x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 1, lambda z: z.sin(), lambda z: z.cos(), (x,))
        first, second = y.split([1, y.shape[0] - 1])
        return nn.functional.gelu(first, approximate="tanh"), second * math.inf

    path = tmp_path_factory.mktemp("small") / "small.artifact"
    export(Whole(forward), (numbers(4, 3),), out=path, dynamic_shapes=(({0: Dim("rows", min=3, max=9)},),))
    return path
