"""Each model of the zoo on the engine `aoti`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.compiled import needs_compiler
from weightswap_exporter import compile_engines
from weightswap_runtime import Artifact, CaptureError, load

from .conftest import Shelf
from .entries import BY_NAME, Entry, randomised
from .proving import near, prove
from .test_zoo import swappable

pytestmark = [pytest.mark.slow, needs_compiler]
# largest difference from eager, relative to the output's largest value
TOLERANCE = 2e-5
REFUSED = {"mixtral": "it calls transformers::grouped_mm_fallback"}  # a Python function, which no server has
EXPRESSIBLE = sorted(BY_NAME.keys() - REFUSED.keys())
Compile = Callable[[Entry], Artifact]


@pytest.fixture(scope="module")
def compiled(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compiled(entry)` is the entry's artifact with packages, in a folder of its own."""

    @cache
    def take(entry: Entry) -> Artifact:
        folder = tmp_path_factory.mktemp("aoti") / entry.name
        shutil.copytree(shelf(entry).hollow.path, folder)
        return compile_engines(folder, ["aoti"])

    return take


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_proof(name: str, compiled: Compile, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    artifact = compiled(entry)
    models = {seed: randomised(entry, seed) for seed in (1, 2)}
    files = {seed: swappable(entry, model, artifact, tmp_path / f"v{seed}") for seed, model in models.items()}
    assert load(artifact, engine="auto").engine == "aoti"
    prove(entry, artifact, "aoti", models, files, near(TOLERANCE))


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_a_package_cannot_have_is_named(name: str, reason: str, compiled: Compile) -> None:
    with pytest.raises(CaptureError, match=reason):
        compiled(BY_NAME[name])
