"""Interrupts and other exceptions that arrive during a commit, and signal handlers that call the model."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.forks import in_a_child
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import BaseMismatch, Event, Model, ModelFailed, StageClosed, load
from weightswap_runtime.jobs import Claim
from weightswap_runtime.live.gate import Hold
from weightswap_runtime.memory.arena import HostArena


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> Model:
    return load(tiny.path, weight_file(0), residency=residency)  # type: ignore[arg-type]


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_an_exception_in_a_commit_listener_finds_the_commit_done(
    raised: type[BaseException], model: Model, weight_file: WriteWeights
) -> None:
    def leave(event: Event) -> None:
        if event.kind == "committed":
            raise raised

    stop = model.listen(leave)
    staged = model.stage(weight_file(1))
    with pytest.raises(raised):
        staged.commit()
    stop()
    assert staged.progress.phase == "committed"
    with pytest.raises(StageClosed):
        staged.commit()
    assert [receipt.generation for receipt in model.history] == [0, 1]
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_an_interrupt_in_an_in_place_commit_leaves_a_model_that_says_that_it_failed(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous="host")
    copy, interrupts = HostArena.write_to, list[KeyboardInterrupt]()

    def interrupted(arena: HostArena, other: HostArena, workers: object) -> None:
        copy(arena, other, workers)  # type: ignore[arg-type]
        if interrupts and gate_holds(model):
            raise interrupts.pop()

    monkeypatch.setattr(HostArena, "write_to", interrupted)
    failures: list[Event] = []
    model.listen(lambda event: failures.append(event) if event.kind == "failed" else None)
    for change in (lambda: model.swap(weight_file(1)), model.rollback):
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            change()
        assert not interrupts
        assert model.failed
        with pytest.raises(ModelFailed, match="in-place commit failed"):
            model(X)
    assert [type(event.error) for event in failures] == [KeyboardInterrupt, KeyboardInterrupt]
    model.rollback()
    assert serves(model, 0)
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_broken_weights_are_no_base_while_another_thread_holds_the_commit(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    ends = Claim.end

    def broken(arena: HostArena, other: HostArena, workers: object) -> None:
        raise KeyboardInterrupt

    def kept(claim: Claim) -> None:
        if isinstance(claim, Hold):
            raise KeyboardInterrupt
        ends(claim)

    monkeypatch.setattr(HostArena, "write_to", broken)
    monkeypatch.setattr(Claim, "end", kept)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        model.swap(weight_file(1))
    monkeypatch.undo()
    assert gate_holds(model)
    with pytest.raises(BaseMismatch, match="the model has failed"):
        model.stage(weight_file(2), only="bias")
    del interrupted


def gate_holds(model: Model) -> bool:
    return model._gate._holder() is not None


def test_a_signal_handler_may_call_the_model(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    def work() -> bool:
        model = load(tiny.path, weight_file(0))
        rung = 0

        def ring(number: int, frame: object) -> None:
            nonlocal rung
            rung += 1
            model(X)
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + rung % 37 * 1e-5)

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            model(X)
            with model.pin() as session:
                session(X)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return rung > 10 and serves(model, 0) and model._store.leases == 0

    assert in_a_child(work)


def test_a_signal_handler_is_refused_while_its_thread_commits_in_place(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    copy, refused = HostArena.write_to, []

    def handled(arena: HostArena, other: HostArena, workers: object) -> None:
        if gate_holds(model):
            with pytest.raises(ModelFailed, match="a signal handler cannot call"):
                model(X)
            refused.append(1)
        copy(arena, other, workers)  # type: ignore[arg-type]

    monkeypatch.setattr(HostArena, "write_to", handled)
    model.swap(weight_file(1))
    assert refused == [1]
    assert serves(model, 1)
