"""Models of an owner and its workers: what is served, what a replaced owner inherits, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, X, plain, serves
from tests.support.watched import eventually
from weightswap_runtime import Event, Model
from weightswap_runtime.errors import (
    ArtifactError,
    NothingToRollBack,
    OutOfMemory,
    StageClosed,
    Unsupported,
    WaitTimeout,
    WeightsMismatch,
)
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.memory import device_arena as memory
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import Segment, begin_trial, own
from weightswap_runtime.shared.worker import WorkerModel, join


class Shared(NamedTuple):
    owner: Model
    workers: list[WorkerModel]
    segment: Segment


@pytest.fixture
def shared(tiny: TinyArtifact) -> Iterator[Shared]:
    """An owner and two workers, in one process."""
    segment = Segment.create(tiny.manifest.weights, 2)
    mapped = segment.read_only()
    found = Shared(own(tiny.path, segment), [join(tiny.path, mapped, slot) for slot in range(2)], segment)
    try:
        yield found
    finally:
        for model in (found.owner, *found.workers):
            model.close()
        segment.close()
        mapped.close()


def test_a_commit_is_served_by_all(shared: Shared, weight_file: WriteWeights) -> None:
    owner, workers, _ = shared
    assert [worker.generation for worker in workers] == [None, None]
    for seed in (1, 2, 3):
        receipt = owner.swap(weight_file(seed))
        for worker in workers:
            assert (worker.generation, worker.weights_id) == (receipt.generation, receipt.weights_id)
            assert serves(worker, seed)
    owner.rollback()
    assert all(serves(worker, 2) for worker in workers)


def test_workers_call_what_is_on_trial(shared: Shared, weight_file: WriteWeights) -> None:
    owner, workers, segment = shared
    owner.swap(weight_file(1))
    control = Control(segment.control)
    for ends in (Staged.discard, Staged.commit):
        staged = owner.stage(weight_file(2))
        word = begin_trial(control, staged, b"terms")
        trials = [trial for worker in workers if (trial := worker.find_trial(word)) is not None]
        assert [(trial.weights_id, trial.terms) for trial in trials] == 2 * [(staged.weights_id, b"terms")]
        for trial, worker in zip(trials, workers, strict=True):
            assert torch.equal(trial(X), TinyArtifact.eager(2, X))
            assert serves(worker, 1)
        again = begin_trial(control, staged)
        assert [worker.find_trial(word) for worker in workers] == [None, None]
        assert workers[0].find_trial(again) is not None
        ends(staged)
        if ends is Staged.discard:
            control.end_trial()  # else its next staging does
        assert control.trial == 0
        with pytest.raises(StageClosed):
            trials[0](X)
        with pytest.raises(StageClosed):
            begin_trial(control, staged)
        assert control.trial == 0
    assert serves(workers[0], 2)


def test_a_refused_swap_changes_nobody(
    shared: Shared, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    owner, workers, _ = shared
    owner.swap(weight_file(1))
    with pytest.raises(WeightsMismatch):
        owner.swap(plain(tiny, tmp_path / "broken.safetensors", bias=None))
    assert all(serves(worker, 1) for worker in workers)


def test_pinned_weights_stay(shared: Shared, weight_file: WriteWeights) -> None:
    owner, (worker, other), _ = shared
    owner.swap(weight_file(1))
    with worker.pin() as session:
        owner.swap(weight_file(2))
        with pytest.raises(WaitTimeout, match=f"held by 1 worker .process {os.getpid()}"):
            owner.swap(weight_file(3), timeout=0.05)
        assert torch.equal(session(X), TinyArtifact.eager(1, X))
        assert serves(worker, 2)
        assert serves(other, 2)
    owner.swap(weight_file(3))
    assert serves(worker, 3)


def test_workers_tell_of_commits(shared: Shared, weight_file: WriteWeights) -> None:
    owner, (worker, _), _ = shared
    events: list[Event] = []
    worker.listen(events.append)
    receipt = owner.swap(weight_file(1), by="ana")
    assert eventually(lambda: bool(events))
    assert (events[0].kind, events[0].receipt, events[0].by) == ("committed", receipt, "ana")
    assert worker.history == (receipt,)
    owner.swap(weight_file(2))
    assert eventually(lambda: len(events) == 2)
    owner.rollback(by="bo")
    assert eventually(lambda: len(events) == 3)
    assert (events[2].kind, events[2].by) == ("rolled back", "bo")


CHANGES: dict[str, Callable[[Any, Path], object]] = {
    "swap": lambda model, path: model.swap(path),
    "stage": lambda model, path: model.stage(path),
    "rollback": lambda model, path: model.rollback(),
    "watch": lambda model, path: model.watch(path.parent),
    "follow": lambda model, path: model.follow(path.parent),
    "add_variant": lambda model, path: model.add_variant("group", "name", path),
}


@pytest.mark.parametrize("what", CHANGES)
def test_workers_change_nothing(what: str, shared: Shared, weight_file: WriteWeights) -> None:
    shared.owner.swap(weight_file(1))
    with pytest.raises(Unsupported, match=f"{what}: .* their owner changes"):
        CHANGES[what](shared.workers[0], weight_file(2))
    assert serves(shared.workers[0], 1)


@pytest.mark.usefixtures("_places")
def test_a_replaced_owner_goes_on(
    shared: Shared, tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    first, (worker, _), segment = shared
    for seed in (1, 2):
        first.swap(weight_file(seed), by=f"hand {seed}")
    with own(tiny.path, segment) as second:
        assert (second.generation, second.weights_id, second.history) == (1, first.weights_id, first.history)
        assert serves(second, 2)
        assert second.swap(delta(2, 3)).generation == 2  # the digests are known, too
        assert serves(worker, 3)
        second.rollback()
        assert serves(worker, 2)
        assert [receipt.generation for receipt in second.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("role", ["owner", "worker"])
def test_who_begins_again_serves_no_other_artifact_that_has_come_to_the_path(
    role: str, shared: Shared, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """Calls would be answered by one graph or the other, whichever worker takes them."""
    shared.owner.swap(weight_file(1))
    tiny.become_another()
    with pytest.raises(ArtifactError, match=r"has the graph \w{12} now, .* serve \w{12}"):
        own(tiny.path, shared.segment) if role == "owner" else join(tiny.path, shared.segment, 1)
    assert all(serves(worker, 1) for worker in shared.workers)


def test_an_owner_that_died_while_it_staged_leaves_nothing_to_roll_back_to(
    shared: Shared, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    first, (worker, _), segment = shared
    for seed in (1, 2):
        first.swap(weight_file(seed))
    staged = first.stage(weight_file(3))
    with own(tiny.path, segment) as second:
        with pytest.raises(NothingToRollBack):
            second.rollback()
        assert serves(worker, 2)
    staged.discard()


def test_a_replaced_owner_does_not_bring_back_what_was_rolled_back(
    shared: Shared, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    first, (worker, _), segment = shared
    first.swap(weight_file(1))
    outbox = tmp_path / "outbox"
    outbox.mkdir()
    bad = weight_file(2).rename(outbox / "2.safetensors")
    first.swap(bad)
    first.rollback(by="ana")
    with own(tiny.path, segment) as second:
        told: list[Event] = []
        with second.watch(outbox, 0.01, callback=told.append):
            assert eventually(lambda: any(event.kind == "skipped" for event in told))
        assert serves(worker, 1)


def test_weights_are_never_written_by_workers(shared: Shared, weight_file: WriteWeights) -> None:
    shared.owner.swap(weight_file(1))
    mapped = shared.segment.read_only()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(mapped.arenas[0], b"x", 0)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.segment.arenas[0], size)
    mapped.close()


def test_memory_that_is_not_there_is_refused(
    shared: Shared, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, (worker, _), _ = shared
    owner.swap(weight_file(1))
    monkeypatch.setattr("weightswap_runtime.shared.owner.available", lambda: 100)
    with pytest.raises(OutOfMemory):
        owner.swap(weight_file(2))
    assert serves(worker, 1)
    monkeypatch.undo()
    owner.swap(weight_file(2))
    assert serves(worker, 2)


def test_limits_of_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pods/one\n")
    inner = groups / "pods" / "one"
    inner.mkdir(parents=True)
    assert memory.available(proc, groups) == 800 << 10
    (inner / "memory.max").write_text("max\n")
    for folder, limit in ((inner, "max"), (inner.parent, "500000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("450000")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 30000\n")
    assert memory.available(proc, groups) == 80_000
    assert memory.available(tmp_path / "nowhere", groups) is None
