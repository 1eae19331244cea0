"""What is proven of every engine with every model that it can express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.support.accelerators import moved, use_own_stream
from tests.support.setups import equal
from tests.support.storm import storm
from tests.zoo.entries import Entry
from weightswap_runtime import Artifact, Model, load

THREADS, SWAPS = 4, 2
Near = Callable[[Any, Any], bool]


def tensors(output: Any) -> Any:
    """The output with tensors in place of arrays."""
    return pytree.tree_map(lambda value: torch.as_tensor(value) if isinstance(value, np.ndarray) else value, output)


def near(tolerance: float) -> Near:
    """Whether two trees are the same but for differences of so much of each tensor's largest value."""

    def compare(found: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return found.keys() == expected.keys() and all(compare(found[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            return len(found) == len(expected) and all(map(compare, found, expected))
        same_type = found.dtype == expected.dtype and found.shape == expected.shape
        return same_type and _deviation(found, expected) <= tolerance

    return compare


def _deviation(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel() or equal(one, other) or (one.isnan().all() and other.isnan().all()):
        return 0.0
    gap = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
    return float(gap.nan_to_num(nan=torch.inf))


def inputs(entry: Entry, model: Model) -> list[dict[str, Any]]:
    """For every size of the entry, as the model's engine takes them; the same at each call."""
    torch.manual_seed(7)
    made = [entry.inputs(*sizes) for sizes in entry.sizes]
    if model.engine != "onnx":
        return [moved(dict(each), model.device) for each in made]
    return [{name: value.numpy() for name, value in each.items()} for each in made]


def answers(entry: Entry, model: Model) -> list[Any]:
    """The outputs for every size."""
    with model.new_context() as context:
        return [moved(tensors(model(**each, context=context)), "cpu") for each in inputs(entry, model)]


@torch.no_grad()
def eager_answers(entry: Entry, model: nn.Module, device: str) -> list[Any]:
    """The same from the eager model, which stays as it is."""
    eager = deepcopy(model).to(device)
    for module in eager.modules():  # plain attributes, which `to` leaves where they are
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
    torch.manual_seed(7)
    made = [entry.inputs(*sizes) for sizes in entry.sizes]
    with torch.device(device):
        return [moved(eager(**moved(dict(each), device)), "cpu") for each in made]


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """A block in which a GPU gives the same bits each time, where it can."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(device != "cpu", warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # convolutions with it are not near the CPU's
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def prove(
    entry: Entry,
    artifact: Artifact,
    engine: Any,
    models: Mapping[int, nn.Module],
    files: Mapping[int, Path],
    same: Near,
    device: str = "cpu",
) -> None:
    """With two sets of weights: near eager, a swapped model equals a loaded one, and threads see no mixture."""
    cold = {seed: answers(entry, load(artifact, file, engine=engine, device=device)) for seed, file in files.items()}
    for seed, model in models.items():
        for found, expected, sizes in zip(cold[seed], eager_answers(entry, model, device), entry.sizes, strict=True):
            assert same(found, expected), (seed, sizes)
    one, two = cold
    assert not equal(cold[one], cold[two])
    for residency in ("double", "single"):
        warm = load(artifact, files[one], engine=engine, device=device, residency=residency)  # type: ignore[arg-type]
        assert equal(answers(entry, warm), cold[one]), residency
        warm.swap(files[two])
        assert equal(answers(entry, warm), cold[two]), residency
        if not entry.state:
            _prove_in_threads(entry, warm, list(files.values()), list(cold.values()))


def _prove_in_threads(entry: Entry, model: Model, files: list[Path], cold: list[list[Any]]) -> None:
    given = list(enumerate(inputs(entry, model)))

    def call(_: int) -> list[tuple[int, Any]]:
        return [(index, moved(tensors(model(**each)), "cpu")) for index, each in given]

    with storm(call, THREADS, lambda _: use_own_stream(model.device)) as seen:
        for number in range(SWAPS):
            model.swap(files[number % 2])
    for index, found in chain(*chain(*seen)):
        assert any(equal(found, expected[index]) for expected in cold), entry.sizes[index]
