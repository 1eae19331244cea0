"""Each model of the zoo on the engine `onnx`: near eager, before and after swaps, from several threads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.setups import equal
from weightswap_exporter import compile_engines
from weightswap_runtime import Artifact, CaptureError, Model, load

from .conftest import Shelf
from .entries import BY_NAME, Entry, Kwargs, randomised
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


def arrays(inputs: Kwargs) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.numpy() for name, value in inputs.items()}


def tensors(output: Any) -> Any:
    """The output with tensors in place of arrays."""
    return pytree.tree_map(lambda value: torch.as_tensor(value) if isinstance(value, np.ndarray) else value, output)


def near(found: Any, expected: Any) -> bool:
    """Whether two trees are the same but for rounding."""
    ours, theirs = pytree.tree_flatten(tensors(found)), pytree.tree_flatten(expected)
    return str(ours[1]) == str(pytree.tree_flatten(tensors(found))[1]) and all(
        one.dtype == other.dtype and one.shape == other.shape and deviation(one, other) <= TOLERANCE
        for one, other in zip(ours[0], theirs[0], strict=True)
    )


def deviation(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; 0 for empty tensors, infinite for another NaN."""
    if not one.numel() or equal(one, other) or (one.isnan().all() and other.isnan().all()):
        return 0.0
    gap = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
    return float(gap.nan_to_num(nan=torch.inf))


def answers(model: Model, entry: Entry) -> list[Any]:
    """The outputs for every size, with inputs that are the same at each call."""
    torch.manual_seed(7)
    return [tensors(model(**arrays(entry.inputs(*sizes)))) for sizes in entry.sizes]


@torch.no_grad()
def eager_answers(model: torch.nn.Module, entry: Entry) -> list[Any]:
    torch.manual_seed(7)
    return [model(**entry.inputs(*sizes)) for sizes in entry.sizes]


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_swapped_weights_give_what_eager_gives(name: str, compiled: Compile, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    artifact = compiled(entry)
    models = {seed: randomised(entry, seed) for seed in (1, 2)}
    files = {seed: swappable(entry, model, artifact, tmp_path / f"v{seed}") for seed, model in models.items()}
    cold = {seed: load(artifact, file, engine="onnx") for seed, file in files.items()}
    if not entry.state:  # where calls leave traces, eager's go on from one call to the next
        for seed, model in models.items():
            pairs = zip(answers(cold[seed], entry), eager_answers(model, entry), strict=True)
            assert all(near(found, expected) for found, expected in pairs), seed
    for residency in ("double", "single"):
        warm = load(artifact, files[1], engine="onnx", residency=residency)  # type: ignore[arg-type]
        answers(warm, entry)
        warm.swap(files[2])
        second = load(artifact, files[2], engine="onnx")
        assert equal(answers(warm, entry), answers(second, entry)), residency


@pytest.mark.parametrize("name", ["llama-tied", "whisper", "resnet", "lstm"])
def test_threads_get_what_one_gets(name: str, compiled: Compile, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    artifact = compiled(entry)
    model = load(artifact, swappable(entry, randomised(entry, 1), artifact, tmp_path / "v1"), engine="onnx")
    inputs = [arrays(entry.inputs(*sizes)) for sizes in entry.sizes] * 10
    expected = [tensors(model(**each)) for each in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: tensors(model(**each)), inputs))
    assert equal(found, expected)


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
