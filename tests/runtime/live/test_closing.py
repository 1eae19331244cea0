"""Closed models: what ends, what goes on, and when their memory is freed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.sessions import sessions_of
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import Event, Model, ModelClosed, StageCancelled, StageClosed, Watcher, load
from weightswap_runtime.engines.torch_cpu import BoundTorch


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> Model:
    return load(tiny.path, weight_file(0), residency=residency, keep_previous="host")  # type: ignore[arg-type]


USES: dict[str, Callable[[Model, Path], object]] = {
    "call": lambda model, _: model(X),
    "named call": lambda model, _: model.forward(X),
    "swap": lambda model, path: model.swap(path),
    "stage": lambda model, path: model.stage(path),
    "background": lambda model, path: model.stage(path, background=True),
    "rollback": lambda model, _: model.rollback(),
    "pin": lambda model, _: model.pin(),
    "watch": lambda model, path: model.watch(path.parent),
    "share": lambda model, _: load(model.artifact, share=model),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_model_refuses_by_name(
    use: Callable[[Model, Path], object], model: Model, weight_file: WriteWeights
) -> None:
    model.close()
    model.close()
    with pytest.raises(ModelClosed, match=r"the model was closed; load\(\) it again"):
        use(model, weight_file(1))
    assert (model.weights_id, model.generation, model.labels, model.failed) == (None, None, {}, False)
    assert len(model.history) == 1
    assert model.residency in repr(model)


def test_leaving_the_block_closes_the_model(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with load(tiny.path, weight_file(0)) as model:
        assert serves(model, 0)
    with pytest.raises(ModelClosed):
        model(X)
    with pytest.raises(KeyError), load(tiny.path, weight_file(0)) as model:
        raise KeyError
    with pytest.raises(ModelClosed):
        model(X)


def test_a_staging_in_the_background_is_cancelled(model: Model, weight_file: WriteWeights) -> None:
    events: list[Event] = []
    model.listen(events.append)
    staged = model.stage(weight_file(1), background=True, rate_limit=SLOW)
    while staged.progress.phase != "reading":
        time.sleep(0.001)
    model.close()
    assert staged.done
    with pytest.raises(StageCancelled):
        staged.commit()
    assert events[-1].kind == "cancelled"


def test_a_staging_that_is_open_is_discarded(model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1))
    model.close()
    for use in (staged.commit, lambda: staged(X)):
        with pytest.raises(StageClosed):
            use()


def test_a_swap_of_another_thread_is_cancelled(model: Model, weight_file: WriteWeights) -> None:
    errors: list[BaseException] = []

    def swap() -> None:
        try:
            model.swap(weight_file(1), rate_limit=SLOW)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=swap)
    thread.start()
    while model.progress is None or model.progress.phase != "reading":
        time.sleep(0.001)
    model.close()
    thread.join(120)
    assert isinstance(errors[0], StageCancelled)


def test_watching_ends(model: Model, tmp_path: Path) -> None:
    watcher = model.watch(tmp_path / "box", 60.0)
    kept: list[Watcher] = [watcher, model.watch(tmp_path / "other", 60.0)]
    threads = [each._thread for each in kept]
    kept.clear()
    model.close()
    assert not any(thread.is_alive() for thread in threads)
    assert not watcher.alive


def test_a_callback_may_close_its_model(model: Model, weight_file: WriteWeights, tmp_path: Path) -> None:
    weight_file(1).rename(tmp_path / "box.safetensors")
    (tmp_path / "box").mkdir()
    watcher = model.watch(tmp_path / "box", 0.01, callback=lambda _: model.close())
    (tmp_path / "box.safetensors").rename(tmp_path / "box" / "v.safetensors")
    watcher._thread.join(120)
    assert not watcher.alive
    with pytest.raises(ModelClosed):
        model(X)


def memories(model: Model) -> list[weakref.ref[object]]:
    """Return weak references to the arenas' memory, which dies with the last view of it."""
    return [weakref.ref(session.arena.memory) for session in sessions_of(model)]  # type: ignore[attr-defined]


def freed(found: list[weakref.ref[object]]) -> bool:
    gc.collect()
    return all(memory() is None for memory in found)


def test_memory_goes_when_it_is_closed(model: Model, weight_file: WriteWeights) -> None:
    model.swap(weight_file(1))
    found = memories(model)
    assert len(found) == (2 if model.residency == "double" else 1)
    assert not freed(found)
    model.close()
    assert freed(found)


def test_a_pin_goes_on_and_memory_goes_with_it(model: Model) -> None:
    found = memories(model)
    with model.pin() as session:
        model.close()
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
        assert not freed(found)
        assert session.generation == 0
    assert freed(found)
    assert session.generation == 0


def test_a_call_that_has_begun_goes_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed, outputs = threading.Event(), threading.Event(), []
    original = BoundTorch.run
    found = memories(model)

    def run(bound: BoundTorch, method: str, inputs: list[torch.Tensor], *others: None) -> list[torch.Tensor]:
        begun.set()
        closed.wait(120)
        assert not freed(found)
        return original(bound, method, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(BoundTorch, "run", run)
        thread = threading.Thread(target=lambda: outputs.append(model(X)))
        thread.start()
        begun.wait(120)
        model.close()
        closed.set()
        thread.join(120)
    assert torch.equal(outputs[0], TinyArtifact.eager(0, X))
    assert freed(found)


def test_models_that_share_go_on(model: Model, weight_file: WriteWeights) -> None:
    other = load(model.artifact, share=model)
    found = memories(model)
    with model.pin() as session:
        model.close()
        with pytest.raises(ModelClosed):
            model(X)
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
        assert serves(other, 0)
    del session
    gc.collect()
    other.swap(weight_file(1))
    assert serves(other, 1)
    other.rollback()
    assert serves(other, 0)
    assert other._store._members.keys() == {other._member.id}
    assert not freed(found)
    other.close()
    assert freed(found)
    with pytest.raises(ModelClosed):
        other(X)


def test_a_dropped_model_does_not_keep_the_memory(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    other = load(tiny.path, share=model)
    found = memories(model)
    del model
    gc.collect()
    other.close()
    assert freed(found)


@pytest.mark.parametrize("use", ["swap", "rollback"])
def test_a_commit_that_waits_for_a_pin_is_refused(use: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous="host")
    model.swap(weight_file(1))
    store, errors = model._store, list[BaseException]()

    def work() -> None:
        try:
            model.swap(weight_file(2), timeout=60) if use == "swap" else model.rollback(timeout=60)
        except (StageCancelled, ModelClosed) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    with model.pin() as session:
        thread.start()
        time.sleep(0.1)  # it waits
        model.close()
        thread.join(120)
        assert torch.equal(session(X), TinyArtifact.eager(1, X))
    assert isinstance(errors[0], StageCancelled if use == "swap" else ModelClosed)
    assert store.gate.current is None
