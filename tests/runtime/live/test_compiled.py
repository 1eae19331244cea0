"""Variants on compiled engines."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.runtime.live.test_variants import Files, X, answer, interleave
from weightswap_exporter import compile_engines
from weightswap_exporter.engines.engine_check import differences
from weightswap_exporter.parity import Run, first_divergence
from weightswap_runtime import Artifact, Model, load
from weightswap_runtime.engines.aoti import AotiEngine
from weightswap_runtime.engines.onnx import OnnxChosen, OnnxEngine
from weightswap_runtime.engines.torch_calls import ChosenTensors


class Compiled(Files):
    """Files whose artifact is also compiled for one engine."""

    engine: str


@pytest.fixture(scope="module", params=["onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    files = Compiled(tmp_path_factory.mktemp("variants"))
    files.engine = request.param
    compile_engines(files.artifact, [files.engine])
    return files


@pytest.fixture
def model(files: Compiled) -> Model:
    model = load(files.artifact.path, files.weights[0], engine=files.engine)
    for seed, name in enumerate(("a", "b")):
        model.add_variant("low", name, files.path("low", seed))
    model.add_variant("shift", "s", files.path("shift", 2))
    return model


def call(model: Model, **options: Any) -> torch.Tensor:
    return torch.as_tensor(model(X.numpy() if model.engine == "onnx" else X, **options))


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


CHOICES: list[tuple[dict[str, str], dict[str, int]]] = [
    ({}, {}),
    ({"low": "a"}, {"low": 0}),
    ({"low": "b", "shift": "s"}, {"low": 1, "shift": 2}),
    ({"shift": "s"}, {"shift": 2}),
]


def test_calls_choose_side_by_side(model: Model, files: Compiled) -> None:
    expected = [answer(files, base, **seeds) for base in (0, 1) for _, seeds in CHOICES]
    assert not any(near(one, other) for one in expected for other in expected if one is not other)
    for base in (0, 1):
        model.swap(files.weights[base])
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda turn: call(model, variants=CHOICES[turn % 4][0]), range(80)))
        assert all(near(each, expected[4 * base + turn % 4]) for turn, each in enumerate(found))


def test_a_context_goes_on_with_what_each_call_chooses(model: Model, files: Compiled) -> None:
    context = model.new_context(on_swap="keep")
    total = torch.zeros_like(X)
    for wanted, seeds in (*CHOICES, *CHOICES):
        eager = files.eager(0, seeds)
        eager.total.copy_(total)
        with torch.no_grad():
            assert near(call(model, context=context, variants=wanted), eager(X))
        total = eager.total.clone()


def test_memory_goes_with_the_name_and_the_last_call(model: Model) -> None:
    context = model.new_context(on_swap="keep")
    call(model, variants={"low": "a"})
    call(model, variants={"low": "a", "shift": "s"})
    call(model, variants={"low": "a"}, context=context)
    assert model._variants is not None
    chosen: Any = model._variants._residents["low"]["a"].chosen
    memory = weakref.ref(chosen.tensors["low_a"] if isinstance(chosen, ChosenTensors) else chosen.arenas[0])
    del chosen
    model.remove_variant("low", "a")
    gc.collect()
    assert memory() is None


def test_a_compiled_method_that_ignores_its_variants_is_refused(
    files: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact.open(files.artifact.folder)
    assert list(differences(artifact, files.engine)) == []
    kind, nothing = (OnnxEngine, OnnxChosen({}, ())) if files.engine == "onnx" else (AotiEngine, ChosenTensors({}))
    monkeypatch.setattr(kind, "joined", lambda self, found: nothing)
    assert any("with variants: output: off by" in problem for problem in differences(artifact, files.engine))


def test_interleaved_with_contexts(files: Compiled) -> None:
    interleave(files, files.engine)


def test_where_they_part_is_looked_for(files: Compiled) -> None:
    """Both sides run without a variant, which means zeros and not uninitialised memory."""
    same, other = ([Run(files.weights[0], "torch"), Run(files.weights[seed], files.engine)] for seed in (0, 1))
    cases = {"forward": [((X,), {})]}
    assert first_divergence(files.artifact.path, *same, cases=cases) is None
    divergence = first_divergence(files.artifact.path, *other, cases=cases)
    assert divergence is not None
    assert (divergence.module, divergence.weights) == ("mix", ("mix.weight",))
