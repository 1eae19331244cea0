"""`--upload-keep`: uploads that no history needs any more go, and none that anybody takes."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.administered import BEARER, Reply, administered, call, change, status
from tests.support.handmade import goldens_beside
from tests.support.servers import WebServer
from tests.support.services import weights_id_of
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_runtime import DesiredStore, Model, load, write_delta
from weightswap_runtime.following.desired_store import unchanging
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_server import Server
from weightswap_server.admin import operations, uploads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "uploads").mkdir()
    return tmp_path / "uploads"


@pytest.fixture
def keeping(tiny: TinyArtifact, weight_file: WriteWeights, folder: Path) -> Iterator[Server]:
    """Two models with the weights of seed 1, and uploads v2 to v5, of which one earlier one is kept."""
    models = {name: load(tiny.path, weight_file(1)) for name in ("tiny", "other")}
    with administered(models, upload_dir=str(folder), upload_keep=1, allow=(str(folder.parent),)) as server:
        for seed in (2, 3, 4, 5):
            upload(server, f"v{seed}", weight_file(seed))
        yield server


def put(server: Server, name: str, content: bytes) -> int:
    return call(server, f"/admin/uploads/{name}.safetensors", content, BEARER, "PUT").status


def upload(server: Server, name: str, path: Path) -> None:
    assert put(server, name, path.read_bytes()) == 201


def ask(server: Server, what: str, name: str, model: str = "tiny", /, **fields: Any) -> Reply:
    return change(server, what, model, source=f"upload:{name}.safetensors", **fields)


def swap(server: Server, name: str, model: str = "tiny") -> None:
    found = ask(server, "swap", name, model)
    assert found.status == 200, found.json


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors") for path in folder.iterdir())


@pytest.mark.parametrize("follows", [False, True])
def test_uploads_that_no_history_needs_go(
    follows: bool, tiny: TinyArtifact, weight_file: WriteWeights, folder: Path, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(1))
    if follows:
        DesiredStore(tmp_path).set(weight_file(1), revision=0)
        model.follow(tmp_path, 30.0)
        assert eventually(lambda: model.watching[0].status.agrees)  # type: ignore[attr-defined]
    with administered({"tiny": model}, upload_dir=str(folder), upload_keep=1) as server:
        upload(server, "v2.goldens", goldens_beside(tiny, weight_file(2), 2))
        for seed in (2, 3, 4, 5, 6):
            upload(server, f"v{seed}", weight_file(seed))
        os.utime(folder / "v6.safetensors", (0, 0))
        (folder / "v2.safetensors.sig").write_bytes(b"signature")
        for name in ("v2", "v3", "v3"):
            swap(server, name)
        assert names(folder) == ["v2", "v2.goldens", "v2.safetensors.sig", "v3", "v4", "v5", "v6"]
        swap(server, "v4")
        assert names(folder) == ["v3", "v4", "v5", "v6"]  # the last two were never served
        assert change(server, "rollback", hold=False).status == 200
        assert serves(model, 3)
        assert ask(server, "stage", "v5").status == 200
        assert change(server, "commit").status == 200
        assert names(folder) == (["v3", "v4", "v5", "v6"] if follows else ["v3", "v5", "v6"])  # v4 is withdrawn


def test_without_the_option_none_goes(tiny: TinyArtifact, weight_file: WriteWeights, folder: Path) -> None:
    with administered({"tiny": load(tiny.path, weight_file(1))}, upload_dir=str(folder)) as server:
        for seed in (2, 3, 4):
            upload(server, f"v{seed}", weight_file(seed))
            swap(server, f"v{seed}")
        assert names(folder) == ["v2", "v3", "v4"]


def test_what_another_model_or_a_delta_needs_stays(
    keeping: Server, weight_file: WriteWeights, folder: Path, tmp_path: Path
) -> None:
    write_delta(weight_file(3), weight_file(4), tmp_path / "patch.safetensors")
    upload(keeping, "patch", tmp_path / "patch.safetensors")
    swap(keeping, "v2", "other")
    for seed in (2, 3, 4, 5):
        swap(keeping, f"v{seed}")
    assert names(folder) == ["patch", "v2", "v3", "v4", "v5"]
    call(keeping, "/admin/uploads/patch.safetensors", method="DELETE")
    swap(keeping, "v4")
    assert names(folder) == ["v2", "v4", "v5"]


def test_what_is_staged_stays_until_it_is_discarded(keeping: Server, folder: Path) -> None:
    swap(keeping, "v2")
    assert ask(keeping, "stage", "v2", "other").status == 200
    for seed in (3, 4, 5):
        swap(keeping, f"v{seed}")
    assert names(folder) == ["v2", "v4", "v5"]
    assert change(keeping, "discard", "other").status == 200
    swap(keeping, "v4")
    assert names(folder) == ["v4", "v5"]


def test_what_is_being_staged_stays(keeping: Server, folder: Path) -> None:
    swap(keeping, "v2")
    with ThreadPoolExecutor() as pool:
        staging = pool.submit(ask, keeping, "stage", "v2", "other", rate_limit=SLOW)
        assert eventually(lambda: status(keeping, "other")["staging"] is not None)
        for seed in (3, 4):
            swap(keeping, f"v{seed}")
        assert "v2" in names(folder)
        assert change(keeping, "discard", "other").status == 200
        assert staging.result(120).status == 409


def test_what_was_uploaded_again_stays_until_it_is_served(
    keeping: Server, weight_file: WriteWeights, folder: Path
) -> None:
    for seed in (2, 3, 4):
        swap(keeping, f"v{seed}")
    assert names(folder) == ["v3", "v4", "v5"]
    upload(keeping, "v2", weight_file(2))
    for other in ("v5", "v4"):
        swap(keeping, other)
    assert names(folder) == ["v2", "v4", "v5"]
    swap(keeping, "v2")
    assert names(folder) == ["v2", "v4"]
    upload(keeping, "v6", weight_file(6))
    for other in ("v4", "v6"):
        swap(keeping, other)
    assert names(folder) == ["v4", "v6"]


@pytest.mark.parametrize("again", ["the weights", "their goldens"])
def test_what_was_sent_again_while_it_was_there_stays_until_it_is_served(
    again: str, keeping: Server, tiny: TinyArtifact, weight_file: WriteWeights, folder: Path
) -> None:
    """A push sends goldens first; then the weights, if they are not there any more."""
    swap(keeping, "v2")
    goldens = []
    if again == "the weights":
        assert put(keeping, "v2", weight_file(2).read_bytes()) == 409
    else:
        goldens = ["v2.goldens"]
        upload(keeping, "v2.goldens", goldens_beside(tiny, weight_file(2), 2))
    for seed in (3, 4):
        swap(keeping, f"v{seed}")
    assert names(folder) == ["v2", *goldens, "v3", "v4", "v5"]
    for seed in (2, 4, 5):
        swap(keeping, f"v{seed}")
    assert names(folder) == ["v4", "v5"]


def test_while_a_follower_does_not_agree_all_that_its_store_names_stays(
    keeping: Server, folder: Path, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """It may be reading any of it: what is desired, or, if that is refused, what was before."""
    desired_store.set(folder / "v2.safetensors", revision=1)
    desired_store.set(folder / "v3.safetensors", revision=2)
    desired_store.set(folder / "v4.safetensors", revision=3)
    refused = desired_store.set(weight_file(9), revision=4)
    weight_file(9).unlink()
    follower = other_of(keeping).follow(desired_store.where, 30.0)
    assert eventually(lambda: follower.last_error is not None)
    swap(keeping, "v2")
    swap(keeping, "v3")
    swap(keeping, "v4")
    assert names(folder) == ["v2", "v3", "v4", "v5"]
    desired_store.set(folder / "v5.safetensors", revision=refused.revision)
    follower.poll_now()
    assert follower.wait(120)
    swap(keeping, "v5")
    assert names(folder) == ["v4", "v5"]


def other_of(server: Server) -> Model:
    model = server.service.served[1].model
    assert isinstance(model, Model)
    return model


@contextmanager
def torn(server: Server, tmp_path: Path) -> Iterator[str]:
    assert put(server, "torn", b"torn") == 201
    yield "torn.safetensors"


@contextmanager
def held(server: Server, tmp_path: Path) -> Iterator[str]:
    with other_of(server).follow(tmp_path, 30.0), unchanging(DesiredStore(tmp_path)):
        yield "has held"


@contextmanager
def unreadable(server: Server, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "desired.json").write_bytes(b"{")
    with other_of(server).follow(tmp_path, 30.0):
        yield "not a desired state"


@contextmanager
def watched(server: Server, tmp_path: Path) -> Iterator[str]:
    with other_of(server).watch(tmp_path / "uploads", 30.0, start="new"):
        yield "other watches"


@contextmanager
def remote(server: Server, tmp_path: Path) -> Iterator[str]:
    with WebServer() as web, other_of(server).follow(web.url, 30.0):
        yield "has no lock"


@pytest.mark.parametrize("how", [torn, held, unreadable, watched, remote])
def test_nothing_goes_where_it_cannot_be_decided(
    how: Callable[[Server, Path], AbstractContextManager[str]],
    keeping: Server,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    swap(keeping, "v2")
    swap(keeping, "v3")
    with how(keeping, tmp_path) as why, caplog.at_level(logging.WARNING):
        began = time.monotonic()
        swap(keeping, "v4")
        assert time.monotonic() - began < 10  # others wait meanwhile
    assert {"v2", "v3", "v4"} <= set(names(folder))
    assert "older uploads were not removed" in caplog.text
    assert why in caplog.text
    call(keeping, "/admin/uploads/torn.safetensors", method="DELETE")
    swap(keeping, "v5")
    assert names(folder) == ["v4", "v5"]


@contextmanager
def pausing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that runs its argument in a thread, until that calls what is named, and returns its future.

    The call waits until the end of the block.
    """
    paused, released, real = Event(), Event(), getattr(where, name)

    def pause(*arguments: Any, **options: Any) -> Any:
        paused.set()
        assert released.wait(120)
        return real(*arguments, **options)

    with ThreadPoolExecutor() as pool:

        def run(work: Callable[[], Any]) -> Future[Any]:
            monkeypatch.setattr(where, name, pause)
            future = pool.submit(work)
            assert paused.wait(120)
            monkeypatch.setattr(where, name, real)
            return future

        try:
            yield run
        finally:
            released.set()


TAKES: dict[str, Callable[[Server, Path], Reply]] = {
    "swap": lambda server, folder: ask(server, "swap", "v2", "other"),
    "stage": lambda server, folder: ask(server, "stage", "v2", "other"),
    "canary": lambda server, folder: ask(server, "canary", "v2", "other", share=0.5),
    "path": lambda server, folder: change(server, "stage", "other", source=str(folder / "v2.safetensors")),
    "trainer": lambda server, folder: call(
        server, "/update_weights_from_disk?model=other", {"model_path": "upload:v2.safetensors"}
    ),
}


@pytest.mark.parametrize("how", TAKES)
def test_an_upload_stays_from_the_check_of_its_path_on(
    how: str, keeping: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(keeping, "v2")
    with pausing(monkeypatch, operations, "fixed_text") as paused:  # once the path is checked, before it is staged
        taking = paused(lambda: TAKES[how](keeping, folder))
        for seed in (3, 4):
            swap(keeping, f"v{seed}")
        assert names(folder) == ["v2", "v3", "v4", "v5"]
    assert taking.result(120).status == 200
    swap(keeping, "v5")
    assert names(folder) == ["v2", "v4", "v5"]
    assert change(keeping, "discard", "other").status == 200
    swap(keeping, "v4")
    assert ("v2" in names(folder)) == (how in ("swap", "trainer"))


def test_the_file_of_a_variant_stays_while_it_is_added(
    keeping: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(keeping, "v2")
    variant = {"group": "style", "name": "terse"}
    with pausing(monkeypatch, other_of(keeping), "add_variant") as paused:
        adding = paused(lambda: ask(keeping, "add_variant", "v2", "other", **variant))
        for seed in (3, 4):
            swap(keeping, f"v{seed}")
        assert "v2" in names(folder)
    assert "declares no variants" in adding.result(120).json["error"]  # it has read the file by then
    swap(keeping, "v5")
    assert names(folder) == ["v4", "v5"]


@pytest.mark.parametrize("follows", [False, True])
def test_the_file_that_a_rollback_goes_back_to_stays(
    follows: bool, keeping: Server, folder: Path, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if follows:
        assert other_of(keeping).follow(desired_store.where, 30.0).wait(120)
    assert ask(keeping, "stage", "v2").status == 200  # so that it is still there
    for seed in (2, 3, 4):
        swap(keeping, f"v{seed}", "other")
    assert change(keeping, "discard").status == 200
    earliest = other_of(keeping).history[1].weights_id
    with pausing(monkeypatch, operations, "StageRequest") as paused:  # once it is found, before it is staged
        back = paused(lambda: change(keeping, "rollback", "other", to=earliest))
        swap(keeping, "v5")
        assert "v2" in names(folder)
    assert back.result(120).status == 200
    assert serves(other_of(keeping), 2)


def test_a_request_waits_for_a_removal_and_then_finds_nothing(
    keeping: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (2, 3):
        swap(keeping, f"v{seed}")
    with ThreadPoolExecutor() as pool:
        with pausing(monkeypatch, uploads, "remove") as paused:
            removing = paused(lambda: swap(keeping, "v4"))
            taking = pool.submit(ask, keeping, "swap", "v2", "other")
            following = pool.submit(change, keeping, "follow", "other", desired_store=str(folder.parent))
            for waiting in (taking, following):
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
        removing.result(120)
        refused = taking.result(120)
    assert (refused.status, refused.json["error"]) == (404, "no upload is named v2.safetensors")
    assert (following.result(120).status, serves(other_of(keeping), 1)) == (200, True)


class Pusher:
    """An operator of one model, who sends the weights of seeds with their goldens, as `weightswap push` does."""

    def __init__(self, server: Server, model: str, files: dict[int, Path], seed: int) -> None:
        self.server, self.model, self.files, self.random = server, model, files, random.Random(seed)
        self.outcomes: list[tuple[int, bool]] = []

    def push(self, seed: int) -> None:
        path, name = self.files[seed], f"v{seed}"
        beside = goldens_path(path).read_bytes()
        put(self.server, f"{name}.goldens", beside)
        uploaded = put(self.server, name, path.read_bytes())
        found = ask(self.server, "swap", name, self.model)
        self.outcomes.append((found.status, uploaded == 201))
        if found.status == 200:
            receipt = found.json["receipt"]
            assert (receipt["weights_id"], receipt["verified"]) == (weights_id_of(path), "goldens")
        else:
            assert (found.status, found.json["error"]) == (404, f"no upload is named {name}.safetensors")

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.push(self.random.choice(list(self.files)))


def test_models_that_swap_the_same_uploads_while_others_commit(
    tiny: TinyArtifact, weight_file: WriteWeights, folder: Path, desired_store: DesiredStore
) -> None:
    files = {seed: weight_file(seed) for seed in (2, 3, 4, 5, 6)}
    for seed, path in files.items():
        goldens_beside(tiny, path, seed)
    models = {name: load(tiny.path, weight_file(1)) for name in ("one", "two", "three")}
    models["three"].follow(desired_store.where, 30.0).wait(120)
    with administered(models, upload_dir=str(folder), upload_keep=1) as server, ThreadPoolExecutor() as pool:
        pushers = [Pusher(server, name, files, seed) for seed, name in enumerate(models)]
        for running in [pool.submit(pusher.run, 25) for pusher in pushers]:
            running.result(120)
        outcomes = [outcome for pusher in pushers for outcome in pusher.outcomes]
        assert sum(uploaded for _, uploaded in outcomes) > len(files)  # some had gone
        assert sum(found == 200 for found, _ in outcomes) > len(outcomes) / 2
        assert len(list(folder.glob("v?.safetensors"))) == len(list(folder.glob("v?.goldens.safetensors")))
