"""Contexts: each caller has a copy of the state, and a swap treats it as its policy says."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.forks import in_a_child
from tests.support.graph_calls import hold_calls
from tests.support.refusals import because
from tests.support.remembering import ENGINES, POLICIES, Files, Served, X
from weightswap_runtime import (
    CallError,
    Context,
    ContextError,
    InputMismatch,
    Model,
    ModelClosed,
    NoWeights,
    StaleState,
    Unsupported,
    WaitTimeout,
    load,
)
from weightswap_runtime.engines import torch_calls as state
from weightswap_runtime.engines.torch_calls import GraphCall


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("contexts"))


@pytest.fixture(params=ENGINES)
def served(request: pytest.FixtureRequest, files: Files) -> Served:
    return Served(files, request.param)


@pytest.fixture
def model(files: Files) -> Model:
    return load(files.artifact, files.weights[0])


@torch.no_grad()
def test_a_call_without_a_context_leaves_no_trace(served: Served, files: Files) -> None:
    context = served.model.new_context()
    first = served(X, context)
    assert [served.equal(served(), files.eager(0)(X)) for _ in range(3)] == [True] * 3
    assert served.equal(first, served())
    assert served.peek(context)[1] == 2


def test_calls_with_contexts_run_side_by_side(served: Served, files: Files) -> None:
    contexts = [served.model.new_context() for _ in range(4)]
    answers: list[list[torch.Tensor]] = [[] for _ in contexts]

    def work(number: int) -> None:
        for step in range(30):
            answers[number].append(served(X * (number + step), contexts[number]))

    with ThreadPoolExecutor(len(contexts)) as threads:
        list(threads.map(work, range(len(contexts))))
    for number, found in enumerate(answers):
        eager = files.eager(0)
        with torch.no_grad():
            expected = [eager(X * (number + step)) for step in range(30)]
        assert all(map(served.equal, found, expected))


def test_outputs_are_no_windows_on_the_state(served: Served) -> None:
    context = served.model.new_context()
    served(X, context)
    total, _ = served.model.peek(context=context)
    before = served.peek(context)[0].clone()
    total += 7
    assert torch.equal(served.peek(context)[0], before)


@torch.no_grad()
def test_what_a_swap_does_is_the_contexts_policy(served: Served, files: Files) -> None:
    contexts = {policy: served.model.new_context(on_swap=policy) for policy in POLICIES}
    unused = served.model.new_context()
    eager = files.eager(0)
    eager(X)
    for context in contexts.values():
        served(X, context)
    old = served.model.weights_id
    receipt = served.model.swap(files.weights[1])
    assert receipt.contexts == {"invalidated": 1, "kept": 1, "pinned": 1, "reset": 1}
    with pytest.raises(StaleState) as stale:
        served(X, contexts["invalidate"])
    assert (stale.value.made_with, stale.value.served) == (old, served.model.weights_id)
    assert served.equal(served(X, contexts["pin"]), eager(X))
    assert (contexts["pin"].weights_id, contexts["keep"].weights_id) == (old, old)
    assert served.equal(served(X, contexts["reset"]), files.eager(1)(X))
    assert served.equal(served(X, unused), files.eager(1)(X))
    kept = files.eager(1)
    kept.load_state_dict(files.models[1].state_dict())
    first = files.eager(0)
    first(X)
    kept.total, kept.calls = first.total, first.calls
    assert served.equal(served(X, contexts["keep"]), kept(X))
    assert contexts["keep"].weights_id == served.model.weights_id
    contexts["pin"].close()
    assert served.model.swap(files.weights[1]).contexts == {"invalidated": 1}


def test_a_pinned_context_keeps_its_weights_until_it_is_closed(residency: str, files: Files) -> None:
    served = Served(files, residency=residency)
    model, context = served.model, served.model.new_context(on_swap="pin")
    if residency == "double":
        model.swap(files.weights[1])
    found: list[str] = []

    def swap() -> None:
        try:
            model.swap(files.weights[2], timeout=0.1)
        except WaitTimeout as error:
            found.append(str(error))

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join(120)
    assert "still held by 1 pinned context" in found[0]
    with pytest.raises(WaitTimeout):
        model.swap(files.weights[2])
    with torch.no_grad():
        assert torch.equal(model(X, context=context), files.eager(0)(X))
    context.close()
    model.swap(files.weights[2], timeout=0)


def test_a_pinned_context_that_is_forgotten_holds_nothing(files: Files) -> None:
    model = load(files.artifact, files.weights[0], residency="single")
    context = model.new_context(on_swap="pin")
    reference = weakref.ref(context)
    del context
    gc.collect()
    assert reference() is None
    assert model.swap(files.weights[1], timeout=0).contexts == {}


def test_pins_and_stagings_take_contexts_too(model: Model, files: Files) -> None:
    context, tried = model.new_context(), model.new_context()
    with model.pin() as pinned, model.stage(files.weights[1]) as staged, torch.no_grad():
        eager, other = files.eager(0), files.eager(1)
        assert torch.equal(pinned(X, context=context), eager(X))
        assert torch.equal(staged(X, context=tried), other(X))
        with pytest.raises(StaleState):
            staged(X, context=context)
        staged.commit()
        assert torch.equal(model(X, context=tried), other(X))
        assert torch.equal(pinned(X, context=context), eager(X))


def test_a_pinned_context_is_answered_by_its_weights_alone(model: Model, files: Files) -> None:
    with model.new_context(on_swap="pin") as context, model.stage(files.weights[1]) as staged, torch.no_grad():
        with pytest.raises(StaleState):
            staged(X, context=context)
        assert torch.equal(model(X, context=context), files.eager(0)(X))


def test_a_forked_child_keeps_to_its_parents_pins(residency: Any, files: Files) -> None:
    """Pins of the forking thread hold in the child, whichever thread swaps; those of other threads do not."""
    model, contexts = load(files.artifact, files.weights[0], residency=residency), list[Context]()
    thread = threading.Thread(target=lambda: contexts.append(model.new_context(on_swap="pin")))
    thread.start()
    thread.join(120)
    own = model.new_context(on_swap="pin")
    refused: list[object] = []

    def swap() -> None:
        try:
            for number in (1, 2):
                model.swap(files.weights[number], timeout=0.1)
        except WaitTimeout as error:
            refused.append(error)

    def child() -> bool:
        other = threading.Thread(target=swap)
        other.start()
        other.join(120)
        with pytest.raises(ContextError, check=because("closed")):
            model(X, context=contexts[0])
        with torch.no_grad():
            return bool(refused) and torch.equal(model(X, context=own), files.eager(0)(X))

    assert in_a_child(child)


def test_two_calls_at_once_with_one_context_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold_calls(monkeypatch)
    context, answers = model.new_context(), list[torch.Tensor]()
    thread = threading.Thread(target=lambda: answers.append(model(X, context=context)))
    thread.start()
    assert held.inside.wait(120)
    uses: list[Callable[[], Any]] = [
        lambda: model(X, context=context),
        context.reset,
        context.close,
        lambda: context.save("nowhere.safetensors"),
    ]
    for use in uses:
        with pytest.raises(ContextError, check=because("busy")):
            use()
    held.go_on.set()
    thread.join(120)
    assert len(answers) == 1
    model(X, context=context)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, CallError])  # of a handler that calls with the context
def test_a_call_that_broke_off_leaves_no_half_state_behind(
    interrupt: type[BaseException], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = model.new_context()
    model(X, context=context)
    with pytest.raises(InputMismatch):
        model(X[:, :2], context=context)
    model(X, context=context)

    def broken(self: GraphCall, *args: Any) -> Any:
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(GraphCall, "__call__", broken)
        with pytest.raises(interrupt):
            model(X, context=context)
    for use in (lambda: model(X, context=context), lambda: context.save("nowhere.safetensors")):
        with pytest.raises(ContextError, check=because("interrupted")):
            use()
    context.reset()
    assert torch.equal(model(X, context=context), model(X))


def test_a_reset_that_breaks_off_leaves_no_half_state(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    context = model.new_context()
    model(X, context=context)

    def broken(live: torch.Tensor, value: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "_put", broken)
        with pytest.raises(KeyboardInterrupt):
            context.reset()
    with pytest.raises(ContextError, check=because("interrupted")):
        model(X, context=context)
    context.reset()
    assert torch.equal(model(X, context=context), model(X))


def test_a_context_is_of_one_model_and_can_be_closed(model: Model, files: Files) -> None:
    with load(files.artifact, files.weights[0]) as other:
        context = other.new_context()
        with pytest.raises(ContextError, check=because("mismatch")):
            model(X, context=context)
        with context:
            other(X, context=context)
        context.close()
        assert context.closed
        for use in (lambda: other(X, context=context), context.reset, lambda: context.save("nowhere.safetensors")):
            with pytest.raises(ContextError, check=because("closed")):
                use()
        left = other.new_context()
    with pytest.raises(ModelClosed):
        other(X, context=left)
    with pytest.raises(ModelClosed):
        other.new_context()


def test_a_method_may_have_an_input_called_context(model: Model) -> None:
    assert torch.equal(model.plain(context=X), X * 2)
    with model.new_context() as context:
        assert torch.equal(model.plain(X, context=context), X * 2)
        assert context.weights_id is None  # no state was touched


def test_policies_and_models_that_cannot_be(model: Model, files: Files) -> None:
    with pytest.raises(Unsupported, match="on_swap='drop': expected 'invalidate', 'reset', 'keep', 'pin'"):
        model.new_context(on_swap="drop")  # type: ignore[arg-type]
    empty = load(files.artifact)
    context = empty.new_context()
    with pytest.raises(NoWeights):
        empty(X, context=context)
    with pytest.raises(NoWeights):
        empty.new_context(on_swap="pin")
    empty.swap(files.weights[0])
    assert torch.equal(empty(X, context=context), model(X))


def test_thousands_of_contexts_cost_their_state_and_no_more(model: Model) -> None:
    contexts = [model.new_context() for _ in range(3000)]
    model(X, context=contexts[0])
    assert [int(model.peek(context=context)[1]) for context in contexts[:3]] == [2, 1, 1]
    reference = weakref.ref(contexts[1])
    contexts.clear()
    gc.collect()
    assert reference() is None


def test_a_forked_child_goes_on_with_its_own_copy(model: Model) -> None:
    context = model.new_context()
    model(X, context=context)

    def child() -> bool:
        before = int(model.peek(context=context)[1])
        model(X, context=context)
        return (before, int(model.peek(context=context)[1])) == (2, 3)

    assert in_a_child(child)
    assert int(model.peek(context=context)[1]) == 2
