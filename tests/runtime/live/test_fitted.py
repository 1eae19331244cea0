"""Fitted models: a context holds the fit of an in-context learner, and can be saved without weights and moved."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.in_context import CAPACITY, FEATURES, InContext, methods, task
from tests.support.refusals import because
from weightswap_exporter import export, pack
from weightswap_runtime import Context, ContextError, InputMismatch, Model, load


class Files:
    def __init__(self, folder: Path) -> None:
        self.models = [InContext(seed).eval() for seed in range(2)]
        self.artifact = export(self.models[0], methods=methods(), out=folder / "a.artifact", engines=("torch", "onnx"))
        self.weights = [
            pack(model, self.artifact, out=folder / f"v{seed}.safetensors").path
            for seed, model in enumerate(self.models)
        ]

    def served(self, engine: str = "torch", seed: int = 0) -> Model:
        return load(self.artifact, self.weights[seed], engine=engine)  # type: ignore[arg-type]

    @torch.no_grad()
    def expected(self, seed: int, x: torch.Tensor, y: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        eager = deepcopy(self.models[seed])
        eager.fit(x, y)
        return eager.predict(new)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("fitted"))


NEW = task(99, 7)[0]


def call(model: Model, method: str, *given: torch.Tensor, context: Context) -> torch.Tensor:
    inputs: list[Any] = [*given] if model.engine == "torch" else [each.numpy() for each in given]
    return torch.as_tensor(model.method(method)(*inputs, context=context))


def same(model: Model, found: torch.Tensor, expected: torch.Tensor) -> bool:
    near = 0.0 if model.engine == "torch" else 1e-5
    return torch.allclose(found, expected, rtol=near, atol=near)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_members_over_one_base_are_fitted_apart(engine: str, files: Files) -> None:
    """Each context has a cache as long as its own training set, and can be fitted again."""
    model = files.served(engine)
    fits = [task(seed, rows) for seed, rows in enumerate((2, 9, CAPACITY))]
    contexts = [model.new_context() for _ in fits]
    for again in range(2):
        for context, (x, y) in zip(contexts, reversed(fits) if again else fits, strict=True):
            call(model, "fit", x, y, context=context)
        for context, (x, y) in zip(contexts, reversed(fits) if again else fits, strict=True):
            found = call(model, "predict", NEW, context=context)
            assert same(model, found, files.expected(0, x, y, NEW))


@pytest.mark.parametrize(("here", "there"), [("torch", "torch"), ("torch", "onnx"), ("onnx", "torch")])
def test_a_fit_is_taken_elsewhere_without_the_weights(here: str, there: str, files: Files, tmp_path: Path) -> None:
    x, y = task(3, 11)
    first, path, again = files.served(here), tmp_path / "fit.safetensors", tmp_path / "again.safetensors"
    with first.new_context() as context:
        call(first, "fit", x, y, context=context)
        expected = call(first, "predict", NEW, context=context)
        context.save(path)
    second = files.served(there)
    with second.load_context(path) as context:
        context.save(again)
    assert again.read_bytes() == path.read_bytes()
    with second.load_context(again) as context:
        found = call(second, "predict", NEW, context=context)
        assert same(second if here == "torch" else first, found, expected)
    saved = safetensors.torch.load_file(path)
    assert not any(torch.equal(value, weight) for value in saved.values() for weight in files.models[0].parameters())


def test_a_fit_over_another_base_or_with_a_part_gone_is_refused(files: Files, tmp_path: Path) -> None:
    model, path, x, y = files.served(), tmp_path / "fit.safetensors", *task(4, 5)
    with model.new_context() as context:
        call(model, "fit", x, y, context=context)
        context.save(path)
    other = files.served(seed=1)
    with pytest.raises(ContextError, check=because("mismatch")):
        other.load_context(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["layers.1.held"] = tensors.pop("layers.1.keys")
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(ContextError, check=because("file")):
        model.load_context(path)


def test_more_rows_than_there_is_room_for_are_refused(files: Files) -> None:
    model, (x, y) = files.served(), task(4, 5)
    with model.new_context() as context:
        call(model, "fit", x, y, context=context)
        before = call(model, "predict", NEW, context=context)
        with pytest.raises(InputMismatch):
            call(model, "fit", *task(0, CAPACITY + 1), context=context)
        with pytest.raises(InputMismatch):
            call(model, "predict", torch.zeros(1, FEATURES + 1), context=context)
        assert torch.equal(call(model, "predict", NEW, context=context), before)
