"""The exported zoo: each model once from a skeleton and once as it is, shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.zoo.entries import LARGER, ZOO, Entry
from weightswap_exporter import export, skeleton
from weightswap_runtime import Artifact, CaptureError


class Exported(NamedTuple):
    """An entry with its artifacts."""

    entry: Entry
    hollow: Artifact
    real: Artifact


Shelf = Callable[[Entry], Exported]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """`shelf(entry)` exports an entry the first time that it is asked for."""

    @cache
    def take(entry: Entry) -> Exported:
        folder = tmp_path_factory.mktemp(entry.name)
        torch.manual_seed(0)
        real = entry.build().eval()
        with skeleton():
            hollow = entry.build().eval()
        sample = entry.inputs(*entry.sizes[0])
        try:
            artifacts = [
                export(model, kwargs=sample, dynamic_shapes=entry.dynamic, out=folder / name)
                for name, model in (("hollow", hollow), ("real", real))
            ]
        except CaptureError as error:
            if "export with torch 2.13" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} cannot export it")
        return Exported(entry, *artifacts)

    return take


@pytest.fixture(
    params=[pytest.param(entry, marks=[pytest.mark.slow] if entry.name in LARGER else []) for entry in ZOO], ids=str
)
def exported(request: pytest.FixtureRequest, shelf: Shelf) -> Exported:
    """Each entry of the zoo in turn."""
    return shelf(request.param)
