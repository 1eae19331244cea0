"""Rollbacks during a watch: weights that were rolled back are not taken again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import safetensors.torch

from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, Directory, eventually, mark
from weightswap_runtime import Event, Model, Watcher, load
from weightswap_runtime.errors import reason_of
from weightswap_runtime.sources.byte_source import CLOCK_TICK_NS


def test_a_part_of_weights_that_were_rolled_back_gives_others(
    tiny: TinyArtifact, directory: Directory, weight_file: Any, residency: Any
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    with model.watch(directory.path, SOON, start="all", only="bias") as watcher:
        model.swap(weight_file(1))
        model.rollback()
        path = directory.write(1)
        assert eventually(lambda: mark(watcher) == path.name)
    assert [receipt.kind for receipt in model.history] == ["full", "full", "rollback", "partial"]


def test_weights_swapped_in_by_another_during_the_wait_are_not_swapped_again(
    model: Model, directory: Directory, tmp_path: Path
) -> None:
    events: list[Event] = []
    with model._store.turns._swap_lock:
        watcher = model.watch(directory.path, SOON, callback=events.append)
        path = directory.write(1)
        assert eventually(lambda: looked_at(watcher, path.name))
        model.stage(path).commit()
    assert eventually(lambda: mark(watcher) == path.name)
    assert watcher.stop(30)
    assert (model.generation, events) == (0, [])


def looked_at(watcher: Watcher, name: str) -> bool:
    file = watcher._queue._files.get(name)
    return file is not None and file.header is not None


def test_weights_that_were_rolled_back_stay_away_until_others_come(
    tiny: TinyArtifact, directory: Directory, residency: Any
) -> None:
    model = load(tiny.path, residency=residency, keep_previous="host")
    events: list[Event] = []
    with model.watch(directory.path, SOON, start="all", callback=events.append) as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        second = directory.write(2)
        assert eventually(lambda: mark(watcher) == second.name)
        model.rollback(by="operator", busy="wait")
        for time_ns in (1, 2):
            os.utime(second, ns=(time_ns, time_ns))
            assert eventually(lambda: [event.kind for event in events].count("skipped") == time_ns)  # noqa: B023
        assert "rolled back by operator (generation 2)" in str(watcher.skipped["v2.safetensors"])
        assert reason_of(events[-1].error) == "superseded"
        assert (model.generation, serves(model, 1)) == (2, True)
        directory.write(3)
        assert eventually(lambda: model.generation == 3)
        assert serves(model, 3)


def test_weights_that_came_back_after_a_rollback_are_wanted(model: Model, directory: Directory, tmp_path: Path) -> None:
    by_hand = [directory.tiny.write(tmp_path / f"{seed}", directory.tiny.values(seed)) for seed in range(4)]
    model.swap(by_hand[1])
    model.swap(by_hand[2])
    with model.watch(directory.path, SOON, start="all"):
        model.swap(by_hand[0], busy="wait")
        if model.residency == "double":
            model.rollback(busy="wait")
        model.swap(by_hand[0], busy="wait")
        model.swap(by_hand[3], busy="wait")
        directory.write(0)
        assert eventually(lambda: serves(model, 0))


def test_a_rollback_before_the_watching_began_says_nothing(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path, directory.write(1))
    model.swap(directory.write(2))
    model.rollback()
    with model.watch(directory.path, SOON):
        assert eventually(lambda: serves(model, 2))


def test_a_file_without_digests_is_not_put_in_again_for_another_mode(
    tiny: TinyArtifact, directory: Directory, tmp_path: Path
) -> None:
    model = load(tiny.path, tiny.write(tmp_path / "v0.safetensors", tiny.values(0)))
    path = directory.path / "v1.safetensors"
    with model.watch(directory.path, SOON, start="all", only="b*") as watcher:
        safetensors.torch.save_file(tiny.values(1), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        assert eventually(lambda: model.generation == 1)
        model.swap(tiny.write(tmp_path / "v2.safetensors", tiny.values(2)))
        polls = watcher._queue._files[path.name].polls
        time.sleep(2 * CLOCK_TICK_NS / 1e9)
        path.chmod(0o640)
        assert eventually(lambda: watcher._queue._files[path.name].polls < polls)
        assert eventually(lambda: not watcher._queue._pending() and not watcher._queue._due())
        assert (model.generation, serves(model, 2), watcher.skipped) == (2, True, {})


def test_a_file_without_digests_is_not_put_back_after_a_rollback(tiny: TinyArtifact, directory: Directory) -> None:
    model = load(tiny.path, directory.write(1), keep_previous="host")
    path = directory.path / "v2.safetensors"
    values = {key: value.clone() for key, value in tiny.values(2).items()}
    with model.watch(directory.path, SOON) as watcher:
        safetensors.torch.save_file(values, path)
        assert eventually(lambda: mark(watcher) == path.name)
        model.rollback(busy="wait")
        os.utime(path, ns=(1, 1))
        assert eventually(lambda: path.name in watcher.skipped)
        assert serves(model, 1)
