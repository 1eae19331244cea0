"""Events and observers: every staging ends with exactly one event, and errors of listeners do not affect the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.damage import damaged
from tests.support.forks import in_a_child
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import (
    DigestMismatch,
    Event,
    InputMismatch,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    StageCancelled,
    Staged,
    StagingBusy,
    WaitTimeout,
    WeightFileError,
    load,
)
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.memory.arena import HostArena


class Told:
    """A list of received events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_a_swap_is_told_from_begin_to_end(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    told = Told()
    model = load(tiny.path, residency=residency, on_event=told)  # type: ignore[arg-type]
    receipt = model.swap(weight_file(1), by="trainer")
    assert told.kinds == ["staging", "staged", "committed"]
    begun, staged, committed = told.events
    assert {event.source for event in told.events} == {receipt.source}
    assert {(event.by, event.graph_id) for event in told.events} == {("trainer", model.graph_id)}
    assert (begun.weights_id, begun.operation) == (None, None)
    assert (staged.weights_id, staged.operation, staged.nbytes) == (receipt.weights_id, "full", receipt.bytes_read)
    assert (staged.seconds_staged, staged.seconds_verified) == (receipt.seconds_staged, receipt.seconds_verified)
    assert staged.seconds >= staged.seconds_staged
    assert (committed.receipt, committed.operation) == (receipt, "full")


def test_labels_are_told(tiny: TinyArtifact, tmp_path: Path) -> None:
    told = Told()
    load(tiny.path, tiny.write(tmp_path / "v", tiny.values(3), labels={"step": "3"}), on_event=told)
    assert [dict(event.labels) for event in told.events] == [{}, {"step": "3"}, {"step": "3"}]


def test_events_and_receipts_become_plain_values(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    told = Told()
    model = load(tiny.path, weight_file(1), on_event=told)
    with pytest.raises(WeightFileError):
        model.swap(weight_file(1).with_name("nowhere"))
    receipt = model.history[0].as_dict()
    assert json.loads(json.dumps(receipt))["staged_in"] == list(receipt["staged_in"])
    assert (receipt["generation"], receipt["weights_id"], receipt["staged_in"][0]) == (0, model.weights_id, "in place")
    committed, refused = told.events[2].as_dict(), told.events[-1].as_dict()
    assert committed["receipt"] == receipt
    assert (committed["kind"], committed["error"]) == ("committed", None)
    said = json.loads(json.dumps(refused))["error"]
    assert (said["error"], said["reason"], said["problems"]) == ("WeightFileError", "unreadable", [])
    assert said["message"] == str(told.events[-1].error)


def test_a_refused_file_is_told_with_its_reason_and_its_phase(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    told = Told()
    model = load(tiny.path, weight_file(1))
    model.listen(told)
    path = damaged(weight_file(2))
    with pytest.raises(DigestMismatch) as caught:
        model.swap(path)
    with pytest.raises(WeightFileError):
        model.swap(path.with_name("nowhere"), only="bias")
    assert told.kinds == ["staging", "refused"] * 2
    bad, missing = told.events[1], told.events[3]
    assert (bad.error, bad.phase, bad.nbytes) == (caught.value, "verifying", 92)
    assert (missing.phase, missing.nbytes, missing.operation) == ("opening", 0, "partial")


@pytest.mark.parametrize("background", [False, True])
def test_a_busy_model_refuses_and_says_so(tiny: TinyArtifact, weight_file: WriteWeights, background: bool) -> None:
    told = Told()
    model = load(tiny.path, weight_file(1))
    with model.stage(weight_file(2)):
        model.listen(told)
        with pytest.raises(StagingBusy):
            model.stage(weight_file(3), background=background)
        with pytest.raises(StagingBusy):
            model.rollback()
    assert told.kinds == ["refused", "refused", "discarded"]
    assert [(event.phase, event.operation) for event in told.events[:2]] == [
        ("waiting", None),
        ("committing", "rollback"),
    ]


def test_a_commit_that_is_refused_leaves_the_staging_open(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    told = Told()
    model = load(tiny.path, weight_file(1), residency="single", on_event=told)
    staged = model.stage(weight_file(2))
    with model.pin(), pytest.raises(WaitTimeout):
        staged.commit(timeout=0)
    staged.commit()
    with pytest.raises(NothingToRollBack):
        model.rollback()
    assert told.kinds[3:] == ["staging", "staged", "refused", "committed", "refused"]
    assert [(event.phase, event.operation) for event in told.events if event.kind == "refused"] == [
        ("committing", "full"),
        ("committing", "rollback"),
    ]


def test_a_broken_commit_is_told(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(1), residency="single")
    staged = model.stage(weight_file(2))
    told = Told()
    model.listen(told)

    def broken(*_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(HostArena, "write_to", broken)
    with pytest.raises(ModelFailed):
        staged.commit()
    monkeypatch.undo()
    staged.discard()
    assert told.kinds == ["failed", "discarded"]
    assert (told.events[0].operation, told.events[0].source) == ("full", str(weight_file(2)))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, StageCancelled])
def test_a_staging_that_is_given_up_is_told(
    raised: type[BaseException], tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    model = load(tiny.path, weight_file(1))
    model.listen(told)

    def interrupted(*_: object) -> None:
        raise raised

    monkeypatch.setattr(WeightStore, "stage", interrupted)
    with pytest.raises(raised):
        model.swap(weight_file(2), by="me")
    assert told.kinds == ["staging", "cancelled"]
    assert (type(told.events[1].error), told.events[1].by) == (raised, "me")


def test_a_listener_that_fails_harms_nobody(
    tiny: TinyArtifact, weight_file: WriteWeights, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: Event) -> None:
        raise ValueError("a listener's own")

    told = Told()
    model = load(tiny.path, on_event=fails)
    model.listen(told)
    model.swap(weight_file(1))
    assert told.kinds == ["staging", "staged", "committed"]
    assert serves(model, 1)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError] * 3


def test_history_is_bounded(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1), by="first")
    for _ in range(120):
        model.rollback()
    assert len(model.history) == 100
    assert [receipt.generation for receipt in model.history] == list(range(22, 122))
    assert {receipt.kind for receipt in model.history} == {"rollback"}
    times = [receipt.committed_at for receipt in model.history]
    assert times == sorted(times)


def test_listeners_may_cancel_or_discard_a_staging(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    box: list[Staged] = []
    kinds: list[str] = []

    def listener(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind in {"staged", "refused", "committed"} and box:
            (box[-1].cancel if event.kind == "staged" else box[-1].discard)()

    model.listen(listener)
    box.append(model.stage(weight_file(1), background=True, rate_limit=400))
    with pytest.raises(StageCancelled):
        box[0].wait(120)
    assert kinds == ["staging", "staged", "discarded"]
    box.clear()
    staged = model.stage(weight_file(1))
    box.append(staged)
    with model.pin(), pytest.raises(WaitTimeout):
        staged.commit()
    assert kinds[3:] == ["staging", "staged", "refused", "discarded"]
    box.clear()
    staged = model.stage(weight_file(2))
    box.append(staged)
    staged.commit()
    assert kinds[7:] == ["staging", "staged", "committed"]
    assert serves(model, 2)


def test_a_listener_that_swaps_is_refused_at_once(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    refused: list[BaseException] = []

    def listener(event: Event) -> None:
        if event.kind == "committed":
            for step in (lambda: model.swap(weight_file(2)), model.rollback):
                with pytest.raises(StagingBusy) as caught:
                    step()
                refused.append(caught.value)

    stop = model.listen(listener)
    model.swap(weight_file(1))
    stop()
    assert len(refused) == 2
    assert serves(model, 1)
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_listening_ends(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model, once, twice = load(tiny.path), Told(), Told()
    stop = model.listen(once)
    also = model.listen(twice)
    again = model.listen(twice)
    stop()
    stop()
    also()
    model.swap(weight_file(1))
    assert (once.kinds, twice.kinds) == ([], ["staging", "staged", "committed"])
    again()
    model.swap(weight_file(2))
    assert len(twice.events) == 3


def test_listeners_come_and_go_from_many_threads(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path)
    kept = [Told() for _ in range(4)]

    def churn(told: Told) -> None:
        for _ in range(500):
            model.listen(Told())()
        model.listen(told)

    with ThreadPoolExecutor(len(kept)) as pool:
        list(pool.map(churn, kept))
    model.swap(weight_file(1))
    assert [told.kinds for told in kept] == [["staging", "staged", "committed"]] * 4


def test_calls_can_be_observed(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    seen: list[tuple[str, type | None]] = []
    model = load(tiny.path)
    stop = model.observe(lambda method, seconds, error: seen.append((method, type(error) if error else None)))
    with pytest.raises(NoWeights):
        model(X)
    model.swap(weight_file(1))
    with pytest.raises(InputMismatch):
        model("x")
    assert serves(model, 1)
    with model.pin() as pinned:
        pinned.forward(X)
    with model.stage(weight_file(2)) as staged:
        staged(X)
    stop()
    model(X)
    assert seen == [("forward", NoWeights), ("forward", InputMismatch), ("forward", None), ("forward", None)]


def test_an_observer_that_fails_harms_no_call(
    tiny: TinyArtifact, weight_file: WriteWeights, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("an observer's own")

    model = load(tiny.path, weight_file(1))
    model.observe(fails)
    assert serves(model, 1)
    with pytest.raises(InputMismatch):
        model()
    assert len(caplog.records) == 2


SWAPS = """
import logging, sys
from weightswap_runtime import WeightFileError, load
if sys.argv[3] == "configured":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
model = load(sys.argv[1], sys.argv[2])
try:
    model.swap("nowhere.safetensors", by="me")
except WeightFileError:
    print("refused")
"""


def swap_in_a_process(tiny: TinyArtifact, path: Path, logs: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [warm.python(), "-c", SWAPS, str(tiny.path), str(path), logs]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def test_the_log_is_quiet_unless_it_is_configured(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    path = weight_file(1)
    quiet = swap_in_a_process(tiny, path, "default")
    assert (quiet.stdout, quiet.stderr) == ("refused\n", "")
    lines = swap_in_a_process(tiny, path, "configured").stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "INFO weightswap.events staged",
        "INFO weightswap.events committed",
        "WARNING weightswap.events refused for me while opening",
    ]
    assert f"{path}, weights " in lines[0]
    assert lines[1].endswith(", generation 0")
    assert "WeightFileError: nowhere.safetensors: cannot be opened" in lines[2]


def test_a_child_that_is_forked_during_a_swap_can_swap(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(1))
    path = weight_file(2)
    begun, go_on = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        if event.kind == "staging" and event.by == "parent":
            begun.set()
            go_on.wait(120)

    model.listen(wait)
    thread = threading.Thread(target=model.swap, args=(path,), kwargs={"by": "parent"})
    thread.start()
    assert begun.wait(120)

    def work() -> bool:
        model.swap(path, by="child")
        return serves(model, 2) and model.progress is None

    assert in_a_child(work)
    go_on.set()
    thread.join(120)
    assert serves(model, 2)


@pytest.mark.parametrize("kind", ["staging", "committed"])
def test_where_a_listener_forks_other_threads_of_the_child_do_not_wait_for_it(
    tiny: TinyArtifact, weight_file: WriteWeights, kind: str
) -> None:
    model = load(tiny.path, weight_file(1))
    outcomes: list[bool] = []

    def work() -> bool:
        with ThreadPoolExecutor(1) as pool:  # the listener's own thread never returns
            with pytest.raises(StagingBusy):
                pool.submit(model.swap, weight_file(2)).result(120)
            pool.submit(model.close).result(120)
        return True

    def fork(event: Event) -> None:
        if event.kind == kind:
            outcomes.append(in_a_child(work))

    stop = model.listen(fork)
    model.swap(weight_file(2))
    stop()
    assert outcomes == [True]
    assert serves(model, 2)
