"""Methods on different engines that share one context's state: calls in any order equal the eager model's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compiled import needs_compiler
from tests.support.decoding import ROOM, ROW, Caller, Decoder, Files
from weightswap_runtime import Context

ENGINES = ["onnx", pytest.param("aoti", marks=[pytest.mark.slow, needs_compiler])]
SCALES = st.integers(-3, 3)
STEPS = st.one_of(
    st.tuples(st.just("prefill"), st.builds(lambda rows, scale: rows_of(rows) * scale, st.integers(1, ROOM), SCALES)),
    st.tuples(st.just("decode"), SCALES.map(lambda scale: ROW * scale)),
    st.tuples(st.just("plain"), SCALES.map(lambda scale: ROW * scale)),
    st.tuples(st.just("alone"), SCALES.map(lambda scale: ROW * scale)),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("move"), st.integers(0, 2)),
    st.tuples(st.just("swap"), st.integers(0, 2)),
)


def rows_of(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * count).reshape(count, 4)


class Places:
    """One model loaded three times: with `decode` on another engine, with `prefill` on it, and all on `torch`."""

    def __init__(self, folder: Path, engine: str, residency: str) -> None:
        self.folder = folder
        self.files = [Files(folder / method, engine, alone=method) for method in ("decode", "prefill")]
        models = [files.load(residency=residency) for files in self.files]
        self.callers = [Caller(model) for model in (*models, self.files[0].load(engine="torch", residency=residency))]
        assert len({caller.model.graph_id for caller in self.callers}) == 1

    def swap(self, seed: int) -> None:
        for caller in self.callers:
            caller.model.swap(self.files[0].weights[seed])

    def moved(self, context: Context, place: int) -> Context:
        path = self.folder / "context.safetensors"
        context.save(path)
        context.close()
        return self.callers[place].model.load_context(path, on_swap="keep", allow_other_weights=True)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["double", "single"])
def places(request: pytest.FixtureRequest, engine: str, tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp(f"{engine}-{request.param}"), engine, request.param)


class Pair:
    """Context that moves between the models, and an eager model that gets the same calls."""

    def __init__(self, places: Places, place: int) -> None:
        self.places, self.place = places, place
        self.context = places.callers[place].model.new_context(on_swap="keep")
        self.eager = deepcopy(places.files[0].models[0])

    def take(self, step: str, value: Any) -> None:
        call = self.places.callers[self.place]
        if step == "reset":
            self.context.reset()
            forget(self.eager)
        elif step == "move":
            self.context, self.place = self.places.moved(self.context, value), value
        elif step == "alone":  # calls without a context start from the initial state
            near(call("decode", value), forget(deepcopy(self.eager)).decode(value))
        else:
            near(call(step, value, context=self.context), getattr(self.eager, step)(value))


def forget(eager: Decoder) -> Decoder:
    """Reset the eager model to the initial state, and return it."""
    for value in eager.buffers():
        value.zero_()
    return eager


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(begin=st.tuples(*[st.integers(0, 2)] * 2), steps=st.lists(st.tuples(st.integers(0, 1), STEPS), max_size=12))
@torch.no_grad()
@pytest.mark.sampled(1)
def test_any_order_of_calls_equals_eager(
    places: Places, begin: tuple[int, int], steps: list[tuple[int, tuple[str, Any]]]
) -> None:
    places.swap(0)
    pairs = [Pair(places, place) for place in begin]
    for number, (step, value) in steps:
        if step == "swap":
            places.swap(value)
            for pair in pairs:
                for name, parameter in places.files[0].models[value].named_parameters():
                    pair.eager.get_parameter(name).copy_(parameter)
        else:
            pairs[number].take(step, value)
    for pair in pairs:
        pair.take("decode", ROW)  # the last calls read the whole state
        pair.context.close()
