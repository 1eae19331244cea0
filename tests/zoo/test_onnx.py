"""Each model of the zoo on the engine `onnx`, and the graphs that it runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
import pytest

from weightswap_exporter import compile_engines
from weightswap_runtime import Artifact, CaptureError

from .conftest import Shelf
from .entries import BY_NAME, Entry, randomised
from .proving import near, prove
from .test_zoo import swappable

# largest difference from eager, relative to the output's largest value; eager in float32 is up to 4e-6 from float64
TOLERANCE = 2e-5
WITHOUT_EQUIVALENT = {"mixtral": "ONNX has no transformers.grouped_mm_fallback.default"}
UNUSED = {"buffers": []}
EXPRESSIBLE = sorted(BY_NAME.keys() - WITHOUT_EQUIVALENT.keys())
Compile = Callable[[Entry], Artifact]


@pytest.fixture(scope="module")
def compiled(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compiled(entry)` is the entry's artifact with ONNX graphs, in a folder of its own."""

    @cache
    def take(entry: Entry) -> Artifact:
        folder = tmp_path_factory.mktemp("onnx") / entry.name
        shutil.copytree(shelf(entry).hollow.path, folder)
        return compile_engines(folder, ["onnx"])

    return take


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_proof(name: str, compiled: Compile, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    artifact = compiled(entry)
    models = {seed: randomised(entry, seed) for seed in (1, 2)}
    files = {seed: swappable(entry, model, artifact, tmp_path / f"v{seed}") for seed, model in models.items()}
    prove(entry, artifact, "onnx", models, files, near(TOLERANCE))


@pytest.mark.parametrize("name", ["llama-tied", "whisper", "buffers"])
def test_the_graph_has_every_weight_as_an_input_and_none_inside(name: str, compiled: Compile) -> None:
    artifact = compiled(BY_NAME[name])
    model = onnx.load_from_string(artifact.read("engines/onnx/forward.onnx"))
    onnx.checker.check_model(model, full_check=True)
    taken = {item.name for item in model.graph.input}
    rows = [*artifact.manifest.weights, *artifact.manifest.state]
    fqns = {name for row in rows for name in row.names}
    assert [row.name for row in rows if taken.isdisjoint(row.names)] == UNUSED.get(name, [])
    assert not {item.name for item in model.graph.initializer} & fqns
    assert model.ByteSize() < 200_000


@pytest.mark.parametrize(("name", "reason"), WITHOUT_EQUIVALENT.items())
def test_what_onnx_cannot_express_is_named(name: str, reason: str, compiled: Compile, shelf: Shelf) -> None:
    with pytest.raises(CaptureError, match=reason):
        compiled(BY_NAME[name])
    assert shelf(BY_NAME[name]).hollow.manifest.methods
