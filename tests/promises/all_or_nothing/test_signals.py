"""Interrupts and other exceptions that arrive during a commit, and signal handlers that call the model."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.forks import in_a_child
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import Event, Model, ModelFailed, StageClosed, load
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.store import WeightStore
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


@pytest.fixture
def _alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt: of SIGINT that is true only in the foreground."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_alarm")
def test_an_interrupt_in_a_commit_in_place_waits_for_its_end(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous="host")
    in_copies(model, monkeypatch, lambda: signal.raise_signal(signal.SIGALRM))
    events: list[Event] = []
    model.listen(events.append)
    for change, served in ((lambda: model.swap(weight_file(1)), 1), (model.rollback, 0)):
        with pytest.raises(KeyboardInterrupt):
            change()
        assert serves(model, served)
        assert not model.failed
    assert [event.kind for event in events] == ["staging", "staged", "committed", "rolled back"]
    assert [receipt.generation for receipt in model.history] == [0, 1, 2]


@pytest.mark.usefixtures("_alarm")
def test_an_interrupt_ends_a_wait_for_pins(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    staged = model.stage(weight_file(1))
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with model.pin():
            held.set()
            over.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(120)
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGALRM)).start()
    with pytest.raises(KeyboardInterrupt):
        staged.commit(timeout=None)
    assert serves(model, 0)
    over.set()
    thread.join(120)
    staged.commit()
    assert serves(model, 1)


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


def test_a_signal_handler_that_calls_the_model_gets_an_answer_after_the_commit(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    answers = []
    in_copies(model, monkeypatch, lambda: signal.raise_signal(signal.SIGALRM))
    signal.signal(signal.SIGALRM, lambda *_: answers.append(serves(model, 1)))
    try:
        model.swap(weight_file(1))
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert answers == [True]


@pytest.mark.usefixtures("_alarm")
def test_two_signals_at_once_let_a_commit_in_place_end(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def interrupts() -> None:
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.1)  # the copy is made after both were raised

    in_copies(model, monkeypatch, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.swap(weight_file(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert serves(model, 1)
    assert model.history[-1].generation == 1


@pytest.mark.parametrize("late", [False, True])
def test_what_an_interrupted_commit_has_staged_can_be_discarded(
    late: bool, tiny: TinyArtifact, weight_file: WriteWeights, residency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: the interrupt comes when the weights are served already, while the claim on stagings ends."""
    model = load(tiny.path, weight_file(0), residency=residency)
    staged = model.stage(weight_file(1))

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Job if late else WeightStore, "end" if late else "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        staged.commit()
    staged.discard()
    assert serves(model, int(late))
    model.stage(weight_file(2)).discard()  # not StagingBusy


def test_a_child_that_is_forked_in_a_commit_in_place_is_told_to_load(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    outcomes: list[bool] = []

    def fork() -> None:
        def child() -> bool:
            with pytest.raises(ModelFailed, match="was forked"):
                model(X)
            return True

        outcomes.append(in_a_child(child))

    in_copies(model, monkeypatch, fork)
    model.swap(weight_file(1))
    assert outcomes == [True]
    assert serves(model, 1)


def in_copies(model: Model, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call `then` in the middle of each commit in place."""
    copy = HostArena.write_to

    def write_to(arena: HostArena, *args: Any) -> None:
        if model._gate._held_since is not None:
            then()
        copy(arena, *args)

    monkeypatch.setattr(HostArena, "write_to", write_to)
