"""A model through its public API, over a hand-made artifact, in both residencies."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.forks import in_a_child
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import (
    CallError,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    StageClosed,
    StagingBusy,
    UnknownName,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    load,
)
from weightswap_runtime.memory.arena import HostArena


def test_swap_replaces_every_weight(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    assert (model.generation, model.graph_id) == (0, tiny.manifest.graph_id)
    assert serves(model, 0)
    receipt = model.swap(weight_file(1))
    assert serves(model, 1)
    assert (receipt.generation, receipt.weights_id) == (1, model.weights_id)
    assert receipt.previous_weights_id != receipt.weights_id
    assert receipt.source.endswith("v1.safetensors")
    assert receipt.bytes_read == 92
    assert (receipt.bytes_copied == 0) == (residency == "double")
    assert min(receipt.seconds_staged, receipt.seconds_verified, receipt.seconds_paused) >= 0


def test_without_weights_calls_are_refused_until_the_first_swap(
    tiny: TinyArtifact, weight_file: WriteWeights, residency: str
) -> None:
    model = load(tiny.path, residency=residency)
    assert (model.generation, model.weights_id) == (None, None)
    with pytest.raises(NoWeights, match=r"call model.swap\(path\) first"):
        model(X)
    with pytest.raises(NoWeights), model.pin():
        pass
    with pytest.raises(NothingToRollBack):
        model.rollback()
    with pytest.raises(WeightFileError):
        model.swap("nowhere.safetensors")
    assert model.swap(weight_file(3)).generation == 0
    assert serves(model, 3)


def test_stage_commit_discard(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    staged = model.stage(weight_file(1))
    assert torch.equal(staged(X), TinyArtifact.eager(1, X))
    assert serves(model, 0)
    with pytest.raises(StagingBusy):
        model.stage(weight_file(2))
    with pytest.raises(StagingBusy):
        model.swap(weight_file(2))
    with pytest.raises(StagingBusy):
        model.rollback()
    staged.discard()
    staged.discard()
    for use in (lambda: staged(X), staged.commit):
        with pytest.raises(StageClosed):
            use()
    assert serves(model, 0)
    with model.stage(weight_file(2)) as second:
        assert second.commit().weights_id == second.weights_id
        with pytest.raises(StageClosed):
            second.commit()
    assert serves(model, 2)


def test_single_residency_keeps_nothing_unless_asked(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    model.swap(weight_file(1))
    with pytest.raises(NothingToRollBack, match='keep_previous="host"'):
        model.rollback()
    assert serves(model, 1)


def test_a_staging_takes_the_place_of_the_previous_weights(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1))
    with pytest.raises(WeightFileError):
        model.swap("nowhere.safetensors")  # refused before a byte is written: the rollback is still there
    model.rollback()
    model.stage(weight_file(2)).discard()
    with pytest.raises(NothingToRollBack, match="a staging has overwritten them"):
        model.rollback()
    assert serves(model, 0)


def test_a_broken_in_place_commit_fails_the_model_until_a_swap_succeeds(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous="host")

    def breaking(arena: HostArena, other: HostArena, workers: object) -> None:
        arena.view("weight")[:] = bytes(60)
        raise RuntimeError("the device is gone")

    with model.stage(weight_file(1)) as staged:
        with monkeypatch.context() as patch:
            copies = iter([HostArena.write_to, breaking])  # the first one keeps the previous weights
            patch.setattr(HostArena, "write_to", lambda *args: next(copies)(*args))  # noqa: PLW0108
            with pytest.raises(ModelFailed, match="the device is gone"):
                staged.commit()
        assert model.failed
        for use in (partial(model, X), model.pin().__enter__):
            with pytest.raises(ModelFailed):
                use()
    model.rollback()
    assert not model.failed
    assert serves(model, 0)
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_a_pin_sees_one_version(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with model.pin() as session:
        pinned = session.weights_id
        model.swap(weight_file(1))
        assert serves(model, 1)
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
        assert (session.weights_id, session.generation) == (pinned, 0)
        with pytest.raises(WaitTimeout, match="this thread itself has pinned"):
            model.swap(weight_file(2))
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
    for use in (lambda: session(X), session.__enter__):
        with pytest.raises(CallError):
            use()
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_in_single_residency_a_commit_waits_for_pins_and_then_says_so(
    tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    pinned, done = threading.Event(), threading.Event()

    def hold() -> None:
        with model.pin() as session:
            pinned.set()
            done.wait(120)
            assert torch.equal(session(X), TinyArtifact.eager(0, X))
            assert serves(model, 0)  # a plain call within a pin is let through, or the two would wait for each other

    holder = threading.Thread(target=hold)
    holder.start()
    pinned.wait(120)
    with pytest.raises(WaitTimeout):
        model.swap(weight_file(1), timeout=0.05)
    assert serves(model, 0)
    threading.Timer(0.05, done.set).start()
    model.swap(weight_file(1))
    holder.join()
    assert serves(model, 1)


def test_inputs_are_checked_before_anything_runs(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with pytest.raises(TypeError, match=r"x: dimension 0 expected batch with batch in 0\.\.8, got 9"):
        model(torch.zeros(9, 3))
    assert torch.equal(model(x=X), model(X))


def test_methods_are_attributes(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    assert torch.equal(model.forward(X), model(X))
    assert torch.equal(model.method("forward")(X), model(X))
    with pytest.raises(UnknownName, match="nor a method of this artifact, which has: forward"):
        model.encode(X)
    assert not hasattr(model, "encode")
    with pytest.raises(UnknownName, match=r"did you mean swap\?"):
        model.swapp("v1.safetensors")


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "cuda"), ("engine", "onnx"), ("residency", "triple"), ("keep_previous", "disk")],
)
def test_unsupported_requests_are_refused_by_name(option: str, value: str, tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match=value):
        load(tiny.path, **{option: value})  # type: ignore[arg-type]


def test_a_forked_child_has_weights_of_its_own(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1))
    other = weight_file(2)
    assert in_a_child(lambda: [model.swap(other).generation for _ in range(2)] == [2, 3])
    assert serves(model, 1)
    model.rollback()
    assert serves(model, 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied(copied: Callable[[object], object], tiny: TinyArtifact) -> None:
    with pytest.raises(TypeError, match="a model cannot be copied or pickled; load its artifact"):
        copied(load(tiny.path))


def test_unknown_options_are_refused_by_name(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model, file, unknown = load(tiny.path, weight_file(0)), weight_file(1), {"verfy": "off"}
    for call in (model.swap, model.stage, model.watch, model.follow):
        with pytest.raises(TypeError, match="'verfy'"):
            call(file, **unknown)  # type: ignore[operator]
    with pytest.raises(TypeError, match="'only'"):  # a place desires whole sets
        model.follow(tmp_path, only="bias")  # type: ignore[call-arg]
    assert (serves(model, 0), model.watching) == (True, ())
