"""Background stagings: progress, waiting, cancelling, the rate limit, and the order of several stagings."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.damage import damaged
from tests.support.forks import in_a_child
from tests.support.tiny import SLOW, TinyArtifact, WriteDelta, WriteWeights, X, serves
from tests.support.watched import eventually
from weightswap_runtime import (
    DigestMismatch,
    Event,
    Model,
    StageCancelled,
    StageClosed,
    Staged,
    StagingBusy,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    load,
)
from weightswap_runtime.jobs import Job
from weightswap_runtime.live import staged
from weightswap_runtime.model.served import Pinned
from weightswap_runtime.threads import Background


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> Model:
    return load(tiny.path, weight_file(0), residency=residency)


def test_a_cancelled_staging_leaves_nothing(model: Model, weight_file: WriteWeights) -> None:
    threads, taken = threading.active_count(), []
    for _ in range(5):
        staged = model.stage(weight_file(1), background=True, rate_limit=SLOW)
        while staged.progress.phase != "reading":
            time.sleep(0.001)
        start = time.perf_counter()
        staged.cancel()
        taken.append(time.perf_counter() - start)
        assert (staged.done, staged.progress.phase) == (True, "cancelled")
        for use in (staged.wait, staged.commit):
            with pytest.raises(StageCancelled, match="nothing was changed"):
                use()
        assert serves(model, 0)
    assert min(taken) < 1  # 50 ms in the benchmarks; here only that it does not wait for the rate
    model.swap(weight_file(2))
    assert serves(model, 2)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("leave", [lambda staged: staged.__exit__(), lambda staged: staged.discard()])
def test_leaving_the_block_cancels(model: Model, weight_file: WriteWeights, leave: Callable[[Staged], None]) -> None:
    staged = model.stage(weight_file(1), background=True, rate_limit=SLOW)
    leave(staged)
    assert staged.done
    assert serves(model, 0)
    model.swap(weight_file(2))


@pytest.mark.parametrize("options", [{}, {"background": True, "rate_limit": SLOW}])
def test_dropping_the_last_reference_discards(options: Any, model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1), **options)
    del staged
    gc.collect()
    model.swap(weight_file(2), busy="wait" if options else "refuse")
    assert serves(model, 2)


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_while_its_thread_starts_cancels_the_staging(
    begins: bool, model: Model, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starter cannot know whether the thread runs. If it does, nobody else may stage until it has ended."""
    started: list[threading.Thread] = []

    class Interrupted(Background):
        def start(self) -> None:
            started.append(self)
            if begins:
                super().start()
                eventually(lambda: events[-1:] == ["staging"])
            raise KeyboardInterrupt

    events: list[str] = []
    model.listen(lambda event: events.append(event.kind))
    monkeypatch.setattr(staged, "Background", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.stage(weight_file(2), background=True, rate_limit=SLOW)
    assert not any(thread.is_alive() for thread in started)
    model.swap(weight_file(1))
    if not begins:
        threading.Thread.start(started[0])  # late: it does nothing
        started[0].join(120)
    assert events == [*(["staging", "cancelled"] if begins else []), "staging", "staged", "committed"]
    assert serves(model, 1)


def test_a_thread_that_has_not_quite_ended_keeps_nobody_from_staging(
    model: Model, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last reference to a staging is dropped while its thread is still ending."""
    threads: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (threads.append(self), start(self))[1])
    for _ in range(3):
        model.stage(weight_file(2), background=True).wait(SLOW)
    assert len(threads) >= 3
    model.swap(weight_file(2))


def test_a_background_error_is_raised_by_wait_and_commit(model: Model, weight_file: WriteWeights) -> None:
    missing = model.stage("nowhere.safetensors", background=True)
    for use in (missing.wait, missing.commit, lambda: missing(X)):
        with pytest.raises(WeightFileError):
            use()
    with pytest.raises(DigestMismatch):
        model.stage(damaged(weight_file(1)), background=True).wait(120)
    assert serves(model, 0)
    model.swap(weight_file(2))


def test_invalid_arguments_are_refused_at_once(model: Model, weight_file: WriteWeights) -> None:
    rates = [{"rate_limit": rate} for rate in (0, -1.0, "200MB", float("inf"), float("nan"))]
    others: list[dict[str, Any]] = [{"busy": "never"}, {"keys": "other"}, {"expect": "12"}]
    for wrong in (*rates, *others):
        with pytest.raises(Unsupported, match=next(iter(wrong))):
            model.stage(weight_file(1), background=True, **wrong)
    model.swap(weight_file(1))


def test_an_expected_id_that_is_cut_off(model: Model, weight_file: WriteWeights) -> None:
    whole = str(model.swap(weight_file(1)).weights_id)
    for wrong, says in ((whole[:12], "this has 12. "), ("v1", "this has 2. "), (whole + "0", "this has 65. ")):
        with pytest.raises(Unsupported, match=says):
            model.swap(weight_file(1), expect=wrong)


@pytest.mark.parametrize("timeout", [math.nan, -1, True, "5", 10**400, []])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1))
    asked: list[Callable[..., object]] = [staged.wait, lambda timeout: staged.commit(timeout=timeout)]
    asked += [lambda timeout: model.rollback(timeout=timeout), partial(model.stage, weight_file(2), busy="wait")]
    for ask in asked:
        with pytest.raises(Unsupported, match=r"^timeout=.*: expected seconds, 0 or more, or None for no limit"):
            ask(timeout=timeout)
    assert staged.commit(timeout=math.inf).generation == 1
    assert serves(model, 1)


def test_a_second_staging_waits_if_asked(model: Model, weight_file: WriteWeights) -> None:
    first = model.stage(weight_file(1))
    second = model.stage(weight_file(2), background=True, busy="wait")
    assert eventually(lambda: second.progress.phase == "waiting")
    first.commit()
    assert second.commit().generation == 2
    assert serves(model, 2)
    with model.stage(weight_file(3)), pytest.raises(StagingBusy, match=r"waited 0\.05 s"):
        model.swap(weight_file(1), busy="wait", timeout=0.05)
    with model.stage(weight_file(3)):
        waiting = model.stage(weight_file(1), background=True, busy="wait", timeout=None)
        waiting.cancel()
        with pytest.raises(StageCancelled):
            waiting.wait()
    assert serves(model, 2)


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1), background=True, rate_limit=SLOW)

    def work() -> bool:
        staged.cancel()
        model.swap(weight_file(2))
        return serves(model, 2)

    assert in_a_child(work)
    staged.cancel()
    assert serves(model, 0)


def test_a_child_may_be_forked_before_the_staging_s_thread_has_begun(
    model: Model, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, run = threading.Event(), Background.run
    monkeypatch.setattr(Background, "run", lambda thread: (go_on.wait(120), run(thread)))
    staged = model.stage(weight_file(1), background=True)
    try:
        assert in_a_child(lambda: model.swap(weight_file(2)) is not None and serves(model, 2))
        with pytest.raises(StagingBusy):
            model.swap(weight_file(2))
    finally:
        go_on.set()
    staged.wait(120).commit()
    assert serves(model, 1)


def test_a_rollback_does_not_wait_for_a_swap_and_undo_it(model: Model, weight_file: WriteWeights) -> None:
    swap = threading.Thread(target=lambda: model.swap(weight_file(1), rate_limit=200))
    swap.start()
    while model.generation == 0 and not model._store.job:
        time.sleep(0.001)
    with pytest.raises(StagingBusy):
        model.rollback()
    swap.join()
    assert serves(model, 1)
    with pytest.raises(Unsupported, match="busy='never'"):
        model.rollback(busy="never")  # type: ignore[arg-type]
    if model.residency == "double":
        with model.stage(weight_file(2)), pytest.raises(StagingBusy, match=r"waited 0\.02 s"):
            model.rollback(busy="wait", timeout=0.02)


def test_copies_within_memory_keep_the_rate_and_are_cancelled(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    model = load(tiny.path, weight_file(0), keep_previous="host")
    model.swap(weight_file(1))
    for path in (delta(1, 2), weight_file(2)):  # the first saves the previous set before it copies the live one
        staged = model.stage(path, background=True, rate_limit=1500)
        while not (staged.done or staged.progress.phase == "copying"):
            time.sleep(0.001)
        assert staged.progress.bytes_total == 1024
        staged.cancel()
        assert staged.progress.phase == "cancelled"
        assert serves(model, 1)
        model.rollback()
        assert serves(model, 0)
        model.swap(weight_file(1))


def test_what_a_lost_thread_has_staged_is_not_committed_in_a_child(
    tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0))
    staged = model.stage(weight_file(1), background=True).wait(120)

    def work() -> bool:
        model.swap(weight_file(2))
        with pytest.raises(StageClosed):
            staged.commit()
        return serves(model, 2)

    assert in_a_child(work)
    staged.commit()
    assert serves(model, 1)


def test_forked_children_do_not_wait_for_locks_of_other_threads(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    staged = model.stage(weight_file(1))

    def work() -> bool:
        staged.discard()
        model.swap(weight_file(2))
        return serves(model, 2)

    locks = (model._gate._lock, model._store.turns._claim_lock, model._store.closing, staged._closing)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in (*locks, staged._work.job._lock):
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_a_child(work)
    finally:
        done.set()
        thread.join()
    staged.commit()
    assert serves(model, 1)


def test_misuse_is_refused_by_name(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with pytest.raises(WeightFileError, match="is empty"):
        model.swap("")
    for listen in (model.listen, model.observe):
        with pytest.raises(Unsupported, match="'print' is not callable"):
            listen("print")  # type: ignore[arg-type]


def test_a_listener_cannot_commit_in_the_staging_s_own_thread(model: Model, weight_file: WriteWeights) -> None:
    refused: list[BaseException] = []
    begun = threading.Event()
    found: list[Staged] = []

    def commit(event: Event) -> None:
        if event.kind == "staged":
            begun.wait(120)
            try:
                found[0].commit()
            except StagingBusy as error:
                refused.append(error)

    model.listen(commit)
    found.append(model.stage(weight_file(1), background=True))
    begun.set()
    found[0].wait(120).commit()
    assert len(refused) == 1
    assert serves(model, 1)


def test_a_fork_does_not_wait_for_calls_of_a_pin_that_threads_share(model: Model) -> None:
    held, forked = threading.Event(), threading.Event()

    def call(session: Pinned) -> None:
        with session._gate._lock:
            held.set()
            forked.wait(120)

    with model.pin() as session, ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, session)
        assert held.wait(120)
        assert in_a_child(lambda: session(X) is not None)
        forked.set()
        other.result()


def test_a_trial_of_a_delta_in_single_residency_keeps_the_rate(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    """The copy of the full set for the goldens obeys the rate limit, and can be cancelled, as any other copy."""
    model = load(tiny.path, weight_file(0), residency="single")
    staged = model.stage(delta(0, 1))
    weights = staged._work.weights
    assert weights is not None
    slow = Job(1e4)
    threading.Timer(0.05, slow.cancel).start()
    slow._free_at = time.monotonic() + 60
    with pytest.raises(StageCancelled):
        weights.trial_session(slow)
    assert torch.equal(staged(X), TinyArtifact.eager(1, X))


def committing(staged: Staged, timeout: float | None) -> threading.Thread:
    """A thread whose commit waits for a pin."""

    def commit() -> None:
        with suppress(WaitTimeout):
            staged.commit(timeout=timeout)

    thread = threading.Thread(target=commit)
    thread.start()
    while not staged._committing:
        time.sleep(0.001)
    return thread


@pytest.mark.parametrize("residency", ["single"])
def test_a_discard_during_a_commit_does_not_wait_for_pins(model: Model, weight_file: WriteWeights) -> None:
    events: list[Event] = []
    model.listen(events.append)
    staged = model.stage(weight_file(1))
    with model.pin():
        thread = committing(staged, None)
        discarding = threading.Thread(target=staged.discard, daemon=True)
        discarding.start()
        discarding.join(120)
        assert not discarding.is_alive()
        assert thread.is_alive()
    thread.join(120)
    assert serves(model, 1)  # the commit was first
    assert [event.kind for event in events] == ["staging", "staged", "committed"]


@pytest.mark.parametrize("residency", ["single"])
def test_a_discard_during_a_commit_that_fails_is_done(model: Model, weight_file: WriteWeights) -> None:
    events: list[Event] = []
    model.listen(events.append)
    staged = model.stage(weight_file(1))
    with model.pin():
        thread = committing(staged, 0.2)
        staged.discard()
        thread.join(120)
    assert [event.kind for event in events] == ["staging", "staged", "refused", "discarded"]
    model.swap(weight_file(2))
    assert serves(model, 2)
