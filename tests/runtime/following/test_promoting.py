"""Watchers that promote: they undo no change of an operator, also after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.services import Service, wanted, weights_id_of
from tests.support.tiny import TinyArtifact, plain, serves
from tests.support.watched import SOON, Directory, eventually
from weightswap_runtime import Event, Model, Unsupported, load
from weightswap_runtime.errors import reason_of


def test_what_is_watched_is_promoted_and_served(model: Model, directory: Directory, service: Service) -> None:
    with model.watch(directory.path, SOON, promote=service.folder, by="trainer") as watcher:
        for seed in (1, 2):
            path = directory.write(seed)
            assert eventually(lambda: model.weights_id == weights_id_of(path))  # noqa: B023
        directory.damaged(3)
        assert eventually(lambda: list(watcher.skipped) == ["v3.safetensors"])
    state = service.desired_store.read()
    assert (wanted(state).weights_id, wanted(state).by, wanted(state).why) == (model.weights_id, "trainer", "newest")
    assert (wanted(state).graph_id, wanted(state).source) == (model.graph_id, str(directory.path / "v2.safetensors"))
    assert (state.revision, len(state.history)) == (2, 1)


def test_a_file_of_another_tool_is_promoted_with_the_id_it_has(
    tiny: TinyArtifact, directory: Directory, service: Service
) -> None:
    model = load(tiny.path)
    plain(tiny, directory.path / ".new")
    (directory.path / ".new").rename(directory.path / "v1.safetensors")
    with model.watch(directory.path, SOON, promote=service.folder):
        assert eventually(lambda: model.weights_id is not None and service.desired == model.weights_id)
    other = load(tiny.path)
    with other.follow(service.folder, SOON) as follower:
        assert follower.wait(120)


def test_an_operators_rollback_is_served_and_binds(model: Model, directory: Directory, service: Service) -> None:
    events: list[Event] = []
    with model.watch(directory.path, SOON, promote=service.folder, callback=events.append) as watcher:
        for seed in (1, 2):
            directory.write(seed)
            assert eventually(lambda: model.generation is not None and serves(model, seed))  # noqa: B023
        service.desired_store.rollback(revision=2, by="ana", why="slow")
        assert eventually(lambda: serves(model, 1))
        directory.write(3)
        assert eventually(lambda: reason_of(watcher.last_error) == "held")
        time.sleep(10 * SOON)
        assert serves(model, 1)
        service.desired_store.release(revision=3)
        assert eventually(lambda: serves(model, 3))
    assert [event.kind for event in events].count("waiting") == 1
    assert "on hold by ana: slow" in str(next(event for event in events if event.kind == "waiting"))


@pytest.mark.parametrize("start", ["newest", "all"])
def test_a_watching_that_begins_again_undoes_no_rollback(
    start: Any, tiny: TinyArtifact, directory: Directory, service: Service
) -> None:
    for seed in (1, 2, 3, 5):
        service.desired_store.promote(directory.write(seed))
    directory.write(4)  # was passed over
    service.desired_store.rollback(revision=4)
    service.desired_store.release(revision=5)
    model = load(tiny.path)
    with model.watch(directory.path, SOON, start=start, promote=service.folder) as watcher:
        assert eventually(lambda: model.generation is not None)
        time.sleep(10 * SOON)
        assert (serves(model, 3), watcher.skipped) == (True, {})
        directory.write(6)
        assert eventually(lambda: serves(model, 6))
    assert [receipt.generation for receipt in model.history] == [0, 1]


def test_weights_that_were_withdrawn_stay_away_under_another_name(
    tiny: TinyArtifact, directory: Directory, service: Service
) -> None:
    model = load(tiny.path)
    with model.watch(directory.path, SOON, start="all", promote=service.folder) as watcher:
        for seed in (1, 2):
            directory.write(seed)
            assert eventually(lambda: model.generation is not None and serves(model, seed))  # noqa: B023
        service.desired_store.rollback(revision=2, hold=False, by="ana")
        assert eventually(lambda: serves(model, 1))
        tiny.write(directory.path / "v3.safetensors", tiny.values(2))
        assert eventually(lambda: reason_of(watcher.skipped.get("v3.safetensors")) == "superseded")
        assert serves(model, 1)
        assert "withdrawn" in str(watcher.skipped["v3.safetensors"])


def test_a_file_that_is_found_brings_back_nothing_that_was_replaced(
    tiny: TinyArtifact, directory: Directory, service: Service
) -> None:
    """Unlike a trainer that publishes, nobody has asked for it."""
    for seed in (1, 2):
        service.promote(seed)
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder) as watcher:
        directory.write(1)
        assert eventually(lambda: reason_of(watcher.skipped.get("v1.safetensors")) == "superseded")
        assert "desired before, and later replaced" in str(watcher.skipped["v1.safetensors"])
        assert eventually(lambda: model.generation is not None and serves(model, 2))
    assert service.revision == 2


def test_two_watchers_of_one_desired_store_agree(tiny: TinyArtifact, directory: Directory, service: Service) -> None:
    models = [load(tiny.path) for _ in range(2)]
    watchers = [model.watch(directory.path, SOON, start="all", promote=service.folder) for model in models]
    for seed in range(1, 8):
        directory.write(seed)
    last = weights_id_of(directory.path / "v7.safetensors")
    assert eventually(lambda: {model.weights_id for model in models} == {last})
    assert [watcher.stop(60) for watcher in watchers] == [True, True]
    assert service.desired == last
    assert service.revision == 7


def test_a_watcher_that_was_slower_does_not_go_back(tiny: TinyArtifact, directory: Directory, service: Service) -> None:
    """Another watcher has promoted a later file while this one staged an earlier one."""
    model = load(tiny.path)

    def hurry(event: Event) -> None:
        if event.kind == "staged" and event.source.endswith("v1.safetensors"):
            service.desired_store.promote(directory.write(2))

    directory.write(1)
    with model.watch(directory.path, SOON, promote=service.folder, callback=hurry) as watcher:
        assert eventually(lambda: model.generation is not None and serves(model, 2))
        assert reason_of(watcher.skipped["v1.safetensors"]) == "superseded"
    assert (model.generation, service.revision) == (0, 1)


def test_another_directory_with_the_same_names_is_another_one(
    tiny: TinyArtifact, directory: Directory, service: Service, tmp_path: Path
) -> None:
    service.promote(7)
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder):
        directory.write(1)
        assert eventually(lambda: model.generation is not None and serves(model, 1))


def test_what_nothing_has_proven_is_not_promoted(tiny: TinyArtifact, directory: Directory, service: Service) -> None:
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder, policy="proven") as watcher:
        directory.write(1)
        assert eventually(lambda: reason_of(watcher.skipped.get("v1.safetensors")) == "unproven")
    assert (model.generation, service.revision) == (None, 0)


def test_while_the_desired_store_is_away_nothing_is_promoted(
    tiny: TinyArtifact, directory: Directory, service: Service, tmp_path: Path
) -> None:
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder) as watcher:
        directory.write(1)
        assert eventually(lambda: model.generation == 0)
        service.folder.rename(tmp_path / "away")
        directory.write(2)
        assert eventually(lambda: watcher.last_error is not None)
        time.sleep(5 * SOON)
        assert serves(model, 1)
        (tmp_path / "away").rename(service.folder)
        assert eventually(lambda: serves(model, 2))
        assert eventually(lambda: watcher.last_error is None)


@pytest.mark.usefixtures("_places")
def test_a_delta_is_promoted_with_what_leads_to_its_base(
    tiny: TinyArtifact, directory: Directory, service: Service, delta: Any
) -> None:
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder) as watcher:
        full = directory.write(1)
        assert eventually(lambda: model.generation == 0)
        for seed in (2, 3):
            path = delta(seed - 1, seed).rename(directory.path / f"v{seed}.safetensors")
            assert eventually(lambda: serves(model, seed))  # noqa: B023
        service.desired_store.rollback(revision=3)
        assert eventually(lambda: serves(model, 2))
        delta(2, 4).rename(directory.path / "v4.safetensors")
        assert eventually(lambda: reason_of(watcher.last_error) == "held")
        assert serves(model, 2)
        service.desired_store.release(revision=4)
        assert eventually(lambda: serves(model, 4))
    weights = service.desired_store.read().withdrawn[0]
    assert weights.source == str(path)
    assert [each.source for each in weights.bases or ()] == [str(full), str(directory.path / "v2.safetensors")]
    other = load(tiny.path)
    with other.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
    assert serves(other, 4)


@pytest.mark.usefixtures("_places")
def test_deltas_that_waited_are_promoted_together(
    tiny: TinyArtifact, directory: Directory, service: Service, delta: Any
) -> None:
    """In one revision, with all files that lead to the last; a rollback goes back to what was served before."""
    full = directory.write(1)
    deltas = [delta(seed, seed + 1).rename(directory.path / f"v{seed + 1}.safetensors") for seed in (1, 2, 3)]
    model = load(tiny.path, full)
    service.desired_store.promote(full)
    with model.watch(directory.path, SOON, promote=service.folder):
        assert eventually(lambda: serves(model, 4))
    state = service.desired_store.read()
    assert [receipt.generation for receipt in model.history] == [0, 1]
    assert (state.revision, len(state.history), wanted(state).source) == (2, 1, str(deltas[-1]))
    assert [each.source for each in wanted(state).bases or ()] == [str(full), *map(str, deltas[:2])]
    other = load(tiny.path)
    with other.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        assert serves(other, 4)
        service.desired_store.rollback(revision=2)
        assert follower.wait(60, revision=3)
        assert serves(other, 1)


def test_deltas_with_weights_that_were_withdrawn_are_not_promoted_together(
    tiny: TinyArtifact, directory: Directory, service: Service, delta: Any
) -> None:
    service.desired_store.promote(directory.write(1))
    service.desired_store.promote(delta(1, 2))
    service.desired_store.rollback(revision=2, hold=False)
    for seed in (1, 2):
        delta(seed, seed + 1).rename(directory.path / f"v{seed + 1}.safetensors")
    model = load(tiny.path)
    with model.watch(directory.path, SOON, promote=service.folder) as watcher:
        assert eventually(lambda: reason_of(watcher.skipped.get("v2.safetensors")) == "superseded")
        assert eventually(lambda: "v3.safetensors" in watcher.waiting)
    assert (serves(model, 1), service.revision) == (True, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"policy": "best"}, "policy='best'"), ({"only": "bias"}, "only, promote"), ({"promote": 7}, "got a int")],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], says: str, tiny: TinyArtifact, directory: Directory, service: Service
) -> None:
    model = load(tiny.path)
    with pytest.raises(Unsupported, match=says):
        model.watch(directory.path, **{"promote": service.folder, **options})
