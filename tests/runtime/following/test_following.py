"""Followers: a model serves the desired weights of a desired store, and goes on if the desired store fails."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

from tests.support.damage import damaged
from tests.support.descriptors import descriptors
from tests.support.forks import in_a_child
from tests.support.services import Service, weights_id_of
from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, eventually
from weightswap_runtime import (
    DesiredError,
    DesiredStore,
    DigestMismatch,
    Event,
    GraphMismatch,
    Model,
    ModelClosed,
    NonFiniteWeights,
    Staged,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.following import reconciler as reconciling
from weightswap_runtime.following.desired_store import Known
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.context import Contexts

NO_GOLDENS = b"\2" + bytes(7) + b"{}"  # a whole file, which holds none


def test_what_is_desired_is_served_from_the_start_and_from_then_on(model: Model, service: Service) -> None:
    service.set(1, by="ana")
    events: list[Event] = []
    with model.follow(service.folder, SOON, callback=events.append) as follower:
        assert follower.wait(120)
        assert serves(model, 1)
        for seed in (2, 3):
            service.set(seed)
            assert eventually(lambda: serves(model, seed))  # noqa: B023
        service.desired_store.rollback(revision=3, by="bo")
        assert follower.wait(60, revision=4)
        assert serves(model, 2)
        status = follower.status
    assert not follower.alive
    assert (status.desired_store, status.revision, status.on_hold) == (str(service.folder), 4, True)
    assert (status.desired, status.served, status.reachable, status.error) == (
        service.desired,
        model.weights_id,
        True,
        "",
    )
    taken = ["staging", "staged", "committed"]
    back = ["rolled back"] if model.residency == "double" else taken  # what is still there is not read
    assert [event.kind for event in events] == taken * 3 + back
    assert [receipt.by for receipt in model.history] == ["ana", "follow", "follow", "bo"]


@pytest.mark.usefixtures("_places")
def test_a_delta_is_tried_again_when_the_base_that_it_lacked_is_there(
    model: Model, service: Service, delta: Any, tmp_path: Path
) -> None:
    """It is also tried again if the file of the base held other weights meanwhile."""
    service.set(0)
    base = service.folder / "v0.safetensors"
    content = base.read_bytes()
    base.write_bytes(service.tiny.write(tmp_path / "other.safetensors", service.tiny.values(3)).read_bytes())
    service.desired_store.set(delta(0, 1), revision=1)
    with model.follow(service.folder, SOON) as follower:
        assert eventually(lambda: isinstance(follower.last_error, UnexpectedWeights))
        assert model.weights_id is None
        base.write_bytes(content)
        assert follower.wait(120)
    assert serves(model, 1)


def test_what_is_swapped_by_hand_gives_way(service: Service, weight_file: Any) -> None:
    model = load(service.tiny.path)
    service.set(1)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        model.swap(weight_file(2), busy="wait")
        assert eventually(lambda: serves(model, 1))
        model.rollback(busy="wait")
        assert eventually(lambda: serves(model, 1))


def test_nothing_is_served_before_something_is_desired(model: Model, service: Service) -> None:
    with model.follow(service.folder, SOON) as follower:
        assert eventually(lambda: follower.desired is not None)
        assert (follower.status.revision, follower.agrees, follower.last_error) == (0, False, None)
        assert not follower.wait(0.05)
        service.set(1)
        assert follower.wait(120)


def test_a_desired_store_may_come_later(model: Model, tiny: TinyArtifact, tmp_path: Path) -> None:
    events: list[Event] = []
    with model.follow(tmp_path / "service", SOON, callback=events.append) as follower:
        assert eventually(lambda: not follower.status.reachable)
        assert isinstance(follower.last_error, DesiredError)
        Service(tiny, tmp_path / "service").set(1)
        assert follower.wait(120)
        assert follower.status.reachable
    kinds = [event.kind for event in events if event.kind != "waiting"]  # for the first weights, if it sees none
    assert kinds == ["unreachable", "staging", "staged", "committed"]
    assert events[0].source == str(tmp_path / "service")


def test_a_wait_ends_when_the_receipt_is_there(model: Model, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    outdated_by = Contexts.outdated_by

    def slow(contexts: Contexts, weights_id: str) -> dict[str, int]:  # between the commit and its receipt
        time.sleep(0.2)
        return outdated_by(contexts, weights_id)

    monkeypatch.setattr(Contexts, "outdated_by", slow)
    service.set(1)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        assert model.history[-1].weights_id == model.weights_id


def test_a_callback_may_wait_for_what_it_is_told_of(model: Model, service: Service) -> None:
    waited: list[bool] = []

    def wait(event: Event) -> None:
        if event.kind == "committed":
            waited.append(follower.wait(120))

    with model.follow(service.folder, SOON, callback=wait) as follower:
        service.set(1)
        assert eventually(lambda: waited == [True])


def test_a_model_without_weights_says_that_it_waits_for_the_first(tiny: TinyArtifact, service: Service) -> None:
    events: list[Event] = []
    service.desired_store.hold(revision=0)
    with load(tiny.path) as model, model.follow(service.folder, SOON, callback=events.append) as follower:
        assert eventually(lambda: bool(events))
        service.desired_store.release(revision=1)
        assert eventually(lambda: follower.status.revision == 2)
        service.set(1)
        assert follower.wait(120)
    assert [event.kind for event in events] == ["waiting", "staging", "staged", "committed"]
    assert f"weightswap desired {service.folder} --set FILE --revision 1" in str(events[0].error)


def test_a_process_that_cannot_reach_the_desired_store_serves_on_and_says_so(
    model: Model, service: Service, tmp_path: Path
) -> None:
    service.set(1)
    events: list[Event] = []
    with model.follow(service.folder, SOON, callback=events.append) as follower:
        assert follower.wait(120)
        away = service.folder.rename(tmp_path / "away")
        assert eventually(lambda: not follower.status.reachable)
        assert serves(model, 1)
        assert "no such directory" in follower.status.error
        DesiredStore(away).set(service.tiny.write(away / "v2.safetensors", service.tiny.values(2)), revision=1)
        away.rename(service.folder)
        assert eventually(lambda: serves(model, 2))
        assert eventually(lambda: (follower.last_error, follower.status.reachable) == (None, True))
    assert [event.kind for event in events].count("unreachable") == 1


def test_an_invalid_document_changes_nothing(model: Model, service: Service) -> None:
    service.set(1)
    document = service.folder / "desired.json"
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        good = document.read_bytes()
        document.write_bytes(b'{"desired_version": 1, "revision": 9, "wei')
        assert eventually(lambda: isinstance(follower.last_error, DesiredError))
        assert serves(model, 1)
        document.write_bytes(good)
        assert eventually(lambda: follower.last_error is None)
        service.set(2)
        assert eventually(lambda: serves(model, 2))


@pytest.mark.parametrize("how", ["removed", "an older copy"])
def test_a_desired_store_does_not_go_back(how: str, model: Model, service: Service) -> None:
    service.set(1)
    document = service.folder / "desired.json"
    old = document.read_bytes()
    service.set(2)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        document.unlink() if how == "removed" else document.write_bytes(old)
        assert eventually(lambda: "was at 2" in follower.status.error)
        assert (serves(model, 2), follower.status.reachable) == (True, False)
        service.set(2) if how == "an older copy" else [service.set(seed) for seed in (1, 2)]
        service.set(3)
        assert eventually(lambda: serves(model, 3))


@pytest.mark.parametrize("how", ["relinked", "begun anew"])
def test_what_another_store_at_the_same_revision_desires_is_not_held_to_the_refusal_before(
    how: str, model: Model, service: Service, weight_file: Any, tmp_path: Path
) -> None:
    model.swap(weight_file(2))
    (tmp_path / "link").symlink_to(service.folder)
    bad = service.write(1)
    not_finite(service, bad)
    service.desired_store.set(bad, revision=0)
    with model.follow(tmp_path / "link", SOON) as follower:
        assert eventually(lambda: follower.last_error is not None)
        if how == "relinked":
            (tmp_path / "other").mkdir()
            DesiredStore(tmp_path / "other").set(weight_file(3), revision=0)
            (tmp_path / "next").symlink_to(tmp_path / "other")
            (tmp_path / "next").replace(tmp_path / "link")
        else:
            (service.folder / "desired.json").unlink()
            service.desired_store.set(weight_file(3), revision=0)
        assert eventually(lambda: serves(model, 3))
        assert eventually(lambda: follower.last_error is None)


def of_another_graph(service: Service, path: Path) -> None:
    service.tiny.write(path, service.tiny.values(5), graph_id="0" * 64)


def other_tensors(service: Service, path: Path) -> None:
    odd = {**service.tiny.values(5), "bias": torch.zeros(6)}
    safetensors.torch.save_file(odd, path.with_name("hidden"))
    path.with_name("hidden").replace(path)


def not_finite(service: Service, path: Path) -> None:
    values = service.tiny.values(5)
    values["bias"][2] = torch.nan
    service.tiny.write(path, values)


def other_weights(service: Service, path: Path) -> None:
    service.tiny.write(path, service.tiny.values(6))


def gone(service: Service, path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "skipped"),
    [
        (lambda _, path: damaged(path), DigestMismatch, True),
        (of_another_graph, GraphMismatch, True),
        (other_tensors, WeightsMismatch, True),
        (not_finite, NonFiniteWeights, True),
        (other_weights, UnexpectedWeights, True),
        (gone, WeightFileError, False),
    ],
)
def test_weights_that_are_refused_change_nothing_until_they_are_mended(
    spoil: Any, error: type[Exception], skipped: bool, model: Model, service: Service
) -> None:
    service.set(1)
    events: list[Event] = []
    with model.follow(service.folder, SOON, callback=events.append) as follower:
        assert follower.wait(120)
        path = service.write(5)
        wanted = weights_id_of(path)
        spoil(service, path)
        if spoil is not_finite:
            wanted = weights_id_of(path)
        service.desired_store.promote(path, known=Known(wanted))
        assert eventually(lambda: isinstance(follower.last_error, error))
        assert (serves(model, 1), follower.agrees, bool(follower.status.error)) == (True, False, True)
        time.sleep(5 * SOON)
        service.write(5)
        if spoil is not_finite:
            service.set(5)
        assert eventually(lambda: serves(model, 5))
        assert eventually(lambda: follower.status.error == "")
    told = [event.kind for event in events].count("skipped")
    assert told in ((1, 2) if skipped else (0,))  # what was in the file's place for a moment may be refused, too


def test_a_file_that_stays_wrong_is_not_read_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(service.tiny.path)
    damaged(service.write(1))
    events: list[Event] = []
    service.set(1)
    with model.follow(service.folder, SOON, callback=events.append) as follower:
        assert eventually(lambda: isinstance(follower.last_error, DigestMismatch))
        time.sleep(20 * SOON)
    assert [event.kind for event in events] == ["staging", "refused", "skipped"]


def test_a_model_that_serves_nothing_takes_the_last_good_weights(tiny: TinyArtifact, service: Service) -> None:
    service.set(1)
    service.set(2)
    damaged(service.folder / "v2.safetensors")
    service.set(3)
    damaged(service.folder / "v3.safetensors")
    model = load(tiny.path)
    with model.follow(service.folder, SOON) as follower:
        assert eventually(lambda: model.generation is not None)
        assert serves(model, 1)
        assert not follower.agrees
        service.tiny.write(service.folder / "v3.safetensors", tiny.values(3))
        assert eventually(lambda: serves(model, 3))


@pytest.mark.parametrize("meanwhile", ["rolled back", "unreadable"])
def test_weights_of_the_history_that_are_withdrawn_during_their_staging_are_not_served(
    meanwhile: str, service: Service
) -> None:
    service.set(1)
    second = service.set(2)
    service.set(3)
    damaged(service.folder / "v3.safetensors")
    model = load(service.tiny.path)

    def write(event: Event) -> None:
        if event.kind == "staged" and event.weights_id == second:
            if meanwhile == "unreadable":
                (service.folder / "desired.json").write_bytes(b"torn")
            elif service.revision == 3:
                service.desired_store.rollback(revision=3, to=weights_id_of(service.folder / "v1.safetensors"))

    with model.follow(service.folder, SOON, callback=write):
        assert eventually(lambda: model.generation is not None)
    assert serves(model, 1 if meanwhile == "rolled back" else 2)
    assert model.generation == 0


def test_what_is_withdrawn_gives_way_to_the_last_good_weights(model: Model, service: Service) -> None:
    """The target of the rollback is refused, so the history decides, as in a process that starts then."""
    service.set(1)
    second = service.folder / "v2.safetensors"
    values = service.tiny.values(2)
    service.tiny.write(second, values | {"bias": torch.full_like(values["bias"], torch.nan)})
    service.set(2)
    service.set(3)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        state = service.desired_store.rollback(revision=3)
        assert eventually(lambda: serves(model, 1))
        assert eventually(lambda: isinstance(follower.last_error, NonFiniteWeights))
        assert (follower.status.revision, follower.agrees) == (state.revision, False)


def test_weights_that_are_no_longer_desired_after_staging_are_not_served(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(service.tiny.path)
    service.set(1)
    bad = service.set(2)

    def withdraw(event: Event) -> None:
        if event.kind == "staged" and event.weights_id == bad:
            service.desired_store.rollback(revision=2)

    served: list[str] = []
    model.listen(lambda event: served.append(event.weights_id or "") if event.kind == "committed" else None)
    with model.follow(service.folder, SOON, callback=withdraw):
        assert eventually(lambda: model.generation is not None)
    assert serves(model, 1)
    assert bad not in served


def test_refusals_keep_no_descriptors_and_no_stagings(service: Service) -> None:
    model = load(service.tiny.path)
    service.set(1)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        gc.collect()
        before = descriptors()
        for seed in range(2, 22):
            path = service.write(seed)
            wanted = weights_id_of(path)
            damaged(path)
            state = service.desired_store.promote(path, known=Known(wanted))
            assert eventually(lambda: follower.status.revision == state.revision and follower.status.error != "")  # noqa: B023
            assert eventually(lambda: path.name in follower.status.error)  # noqa: B023
        assert eventually(lambda: descriptors() <= before)  # the follower may hold its document open at this moment
        assert serves(model, 1)
    gc.collect()
    assert [thing for thing in gc.get_objects() if isinstance(thing, Staged | Job)] == []


def test_an_index_and_its_shards_are_tried_again_when_one_of_their_files_changes(service: Service) -> None:
    folder = service.folder / "sharded"
    folder.mkdir()
    values = service.tiny.values(1)
    shards = {name: f"m-{number}.safetensors" for number, name in enumerate(sorted(values))}
    for name, shard in shards.items():
        safetensors.torch.save_file({name: values[name] + (name == "bias")}, folder / shard)
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    weights_id = weights_id_of(service.write(1))
    service.desired_store.set(index, revision=0, known=Known(weights_id))
    model = load(service.tiny.path)
    goldens = folder / "m.goldens.safetensors"
    goldens.write_bytes(NO_GOLDENS)
    with model.follow(service.folder, SOON) as follower:
        assert eventually(lambda: isinstance(follower.last_error, WeightFileError))
        goldens.unlink()
        assert eventually(lambda: isinstance(follower.last_error, UnexpectedWeights))
        safetensors.torch.save_file({"bias": values["bias"]}, folder / shards["bias"])
        assert follower.wait(120)
        assert serves(model, 1)


def test_a_url_is_followed(model: Model, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")

    def upload() -> None:
        for path in service.folder.iterdir():
            memory.pipe(f"/followed/{path.name}", path.read_bytes())

    service.set(1)
    upload()
    memory.pipe("/followed/v1.goldens.safetensors", NO_GOLDENS)
    events: list[Event] = []
    try:
        with model.follow("memory://followed", SOON, callback=events.append) as follower:
            assert eventually(lambda: "v1.goldens" in follower.status.error)
            memory.rm("/followed/v1.goldens.safetensors")
            assert follower.wait(120)
            with monkeypatch.context() as patch:

                def fail(*_: object, **__: object) -> None:
                    raise PermissionError("away")

                patch.setattr(type(memory), "info", fail)
                assert eventually(lambda: not follower.status.reachable)
                service.set(2)
                upload()
                assert serves(model, 1)
            assert eventually(lambda: serves(model, 2))
            assert eventually(lambda: follower.status.reachable)
            with pytest.raises(Unsupported, match="memory:// is not written to"):
                DesiredStore("memory://followed").hold(revision=2)
    finally:
        memory.rm("/followed", recursive=True)
    assert [event.kind for event in events if event.kind == "unreachable"] == ["unreachable"]


def test_stopping_and_closing_end_the_follower(service: Service) -> None:
    model = load(service.tiny.path)
    service.set(1)
    follower = model.follow(service.folder, SOON)
    assert repr(follower) == f"Follower({str(service.folder)!r}, alive)"
    assert follower.wait(120)
    assert follower.stop(60)
    service.set(2)
    time.sleep(5 * SOON)
    assert serves(model, 1)
    assert follower.status.served is None
    other = model.follow(service.folder, SOON)
    model.close()
    assert not other.alive
    with pytest.raises(ModelClosed):
        model.follow(service.folder)


def test_a_forked_child_does_not_follow(service: Service) -> None:
    model = load(service.tiny.path)
    service.set(1)
    with model.follow(service.folder, SOON) as follower:
        assert follower.wait(120)
        assert in_a_child(lambda: not follower.alive and serves(model, 1))
        assert in_a_child(lambda: model.follow(service.folder, SOON).wait(120))


@pytest.mark.parametrize(
    ("option", "value"), [("interval", 0), ("desired_store", 7), ("rate_limit", 0), ("verify", "no"), ("keys", "names")]
)
def test_invalid_arguments_are_refused(option: str, value: Any, tiny: TinyArtifact, service: Service) -> None:
    threads = threading.active_count()
    with pytest.raises(Unsupported, match="got a int" if option == "desired_store" else f"{option}={value!r}"):
        load(tiny.path).follow(**{"desired_store": service.folder, option: value})
    assert threading.active_count() <= threads  # those of earlier tests may end


def test_a_relative_desired_store_stays_what_it_was(
    model: Model, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(service.folder.parent)
    follower = model.follow(Path(service.folder.name), SOON)
    monkeypatch.chdir("/")
    service.set(1)
    assert follower.wait(120)
    follower.stop()


class Refusing:
    """What a reconciler looks after, without a model: it serves other weights."""

    serves_nothing = False

    def check(self) -> None: ...

    def serves(self, weights_id: str) -> bool:
        return False

    def notify(self, kind: str, source: str, error: BaseException) -> None: ...


def test_retries_wait_longer_and_longer(service: Service) -> None:
    desired_store = DesiredStore(service.folder)
    service.set(1)
    (service.folder / "v1.safetensors").unlink()
    tries: list[float] = []

    class Target(Refusing):
        def apply(self, path: object, weights: object, is_wanted: object) -> None:
            tries.append(now[0])
            raise WeightFileError("not there")

        def notify(self, kind: str, source: str, error: BaseException) -> None:
            raise AssertionError(kind)

    now = [0.0]
    reconciler = reconciling.Reconciler(desired_store, 5.0, lambda: now[0])
    for _ in range(200):
        assert reconciler.poll(Target()) == 5.0
        now[0] += 5.0
    assert tries[:6] == [0.0, 5.0, 15.0, 35.0, 75.0, 155.0]
    assert max(after - before for before, after in pairwise(tries)) == 300.0
    service.desired_store.hold(revision=1)
    reconciler.poll(Target())
    assert tries[-1] == now[0]  # the desired store says something new


def test_a_file_that_is_mended_during_its_refusal_is_retried(service: Service) -> None:
    service.set(0)
    path, tries = service.folder / "v0.safetensors", []

    class Target(Refusing):
        def serves(self, weights_id: str) -> bool:
            return len(tries) > 1

        def apply(self, where: object, weights: object, is_wanted: object) -> None:
            tries.append(where)
            path.write_bytes(path.read_bytes() + b"mended")
            raise UnexpectedWeights("other weights")

    reconciler = reconciling.Reconciler(service.desired_store, 5.0, lambda: 0.0)
    for _ in range(3):
        reconciler.poll(Target())
    assert len(tries) == 2
    assert reconciler.last_error is None
