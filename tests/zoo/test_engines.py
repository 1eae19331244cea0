"""Each model of the zoo on the engines that it was compiled for. `torch` has tests of its own in test_zoo."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.compiled import needs_compiler
from tests.zoo.conftest import Shelf
from tests.zoo.entries import BY_NAME, LARGER, randomised
from tests.zoo.proving import near, prove
from tests.zoo.test_zoo import swappable
from weightswap_exporter import compile_engines
from weightswap_runtime import Artifact, CaptureError

# largest difference from eager, relative to the output's largest value; eager in float32 is up to 4e-6 from float64
TOLERANCE = 2e-5
# experts in one operator of the model's library, a Python function
REFUSED = {
    ("aoti", "mixtral"): "it calls transformers::grouped_mm_fallback",
    ("onnx", "mixtral"): "ONNX has no transformers.grouped_mm_fallback.default",
}
MARKS: dict[str, list[Any]] = {"aoti": [pytest.mark.slow, needs_compiler], "onnx": []}  # to compile takes 10 s a model
SLOW = {*LARGER, "bert", "fusion", "lstm", "qkv"}  # vit is a transformer, too
Compile = Callable[[str, str], Artifact]


def marks(engine: str, name: str) -> list[Any]:
    return [*MARKS[engine], *([pytest.mark.slow] if name in SLOW else [])]


@pytest.fixture(scope="module")
def compiled(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compiled(engine, name)` is an entry's artifact with what the engine needs, in a folder of its own."""

    @cache
    def take(engine: str, name: str) -> Artifact:
        folder = tmp_path_factory.mktemp(engine) / name
        shutil.copytree(shelf(BY_NAME[name]).hollow.path, folder)
        return compile_engines(folder, [engine], trial=False)

    return take


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, marks=marks(engine, name))
        for engine in MARKS
        for name in BY_NAME
        if (engine, name) not in REFUSED
    ],
)
@pytest.mark.slow
def test_the_proof(engine: str, name: str, compiled: Compile, tmp_path: Path) -> None:
    entry, artifact = BY_NAME[name], compiled(engine, name)
    models = {seed: randomised(entry, seed) for seed in (1, 2)}
    files = {seed: swappable(entry, model, artifact, tmp_path / f"v{seed}") for seed, model in models.items()}
    prove(entry, artifact, engine, models, files, near(TOLERANCE))


@pytest.mark.parametrize(
    ("engine", "name", "reason"),
    [pytest.param(*case, reason, marks=marks(*case)) for case, reason in REFUSED.items()],
)
def test_what_an_engine_cannot_express_is_named(engine: str, name: str, reason: str, compiled: Compile) -> None:
    with pytest.raises(CaptureError, match=reason):
        compiled(engine, name)


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tied", "whisper")]


@pytest.mark.parametrize("name", ["buffers", *LONG])
@pytest.mark.slow
def test_an_onnx_graph_has_every_weight_as_an_input_and_none_inside(name: str, compiled: Compile) -> None:
    artifact = compiled("onnx", name)
    model = onnx.load_from_string(artifact.read("engines/onnx/forward.onnx"))
    onnx.checker.check_model(model, full_check=True)
    taken = {item.name for item in model.graph.input}
    rows = [*artifact.manifest.weights, *artifact.manifest.state]
    assert [row.name for row in rows if taken.isdisjoint(row.names)] == []
    assert not {item.name for item in model.graph.initializer} & {name for row in rows for name in row.names}
    assert model.ByteSize() < 200_000
