"""The verbs of other engines' trainers at the admin plane: what they load is served whole, or nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import weightswap_runtime
from tests.support.administered import BEARER, TOKEN, Operator, administered, call, operated
from tests.support.handmade import hand_made, written
from tests.support.served import INFER, Reply, X, as_json, ask, expected
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_runtime import DesiredStore, Model, Staged, WaitTimeout, load
from weightswap_runtime.following.controller import Lease
from weightswap_runtime.following.desired_store import stamp_of
from weightswap_server.admin.trainers import PAYLOADS, REFUSED

FROM_DISK, UPDATE, FINISH = "/update_weights_from_disk", "/update_weights", "/finish_weight_update"
INIT, START, INFO, CHECKER = "/init_weight_transfer_engine", "/start_weight_update", "/weight_info", "/weight_checker"
POSTED = (FROM_DISK, INIT, START, UPDATE, FINISH, CHECKER, *REFUSED)
GIVEN_UP_AFTER = 0.6  # seconds


class Rig(Operator):
    """An operator, and what trainers send to the server; it has the weights of seed 1 at first."""

    def post(self, path: str, body: Any = None) -> Reply:
        return call(self.server, path, b"" if body is None else body)

    def path(self, seed: int) -> str:
        return str(self.file(seed))

    def update(self, seed: int) -> Reply:
        return self.post(UPDATE, {"update_info": {"path": self.path(seed)}})

    def info(self) -> Any:
        return call(self.server, INFO).json

    def answers_of(self, seed: int) -> bool:
        """Return True if the server answers with the weights of a seed, over HTTP and in the process."""
        answer = ask(self.server, INFER, as_json(x=X)).json
        assert answer["parameters"]["weights_id"] == self.info()["weights_id"]
        values = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 5)
        return self.serves(seed) and np.allclose(values, expected(seed), rtol=1e-5, atol=1e-5)

    def is_unchanged(self) -> bool:
        """Return True if the first weights are served, nothing is staged, and an update can be started."""
        served = self.answers_of(1) and self.model.generation == 0
        return served and self.status["staged"] is None and self.post(START).status == 200

    def ended(self) -> list[tuple[str, str, str]]:
        """Return the call, the outcome and the user of each audited call that has ended."""
        return [(each["call"], each["outcome"], each["who"]) for each in self.audited() if each["outcome"] != "begun"]


@contextmanager
def trained(model: Model, tiny: TinyArtifact, folder: Path, **admin: Any) -> Iterator[Rig]:
    with operated(model, tiny, folder, **admin) as operator:
        yield Rig(operator.server, tiny, folder)


@pytest.fixture
def rig(model: Model, tiny: TinyArtifact, tmp_path: Path) -> Iterator[Rig]:
    with trained(model, tiny, tmp_path) as rig:
        yield rig


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A rig whose weights no test changes."""
    folder = tmp_path_factory.mktemp("untouched")
    tiny = TinyArtifact(folder / "tiny.artifact")
    with trained(load(tiny.path, tiny.write(folder / "v1", tiny.values(1))), tiny, folder) as rig:
        yield rig


def test_an_update_from_disk(rig: Rig) -> None:
    first = rig.model.weights_id
    assert rig.info() == {"weight_version": first, "weights_id": first, "generation": 0, "labels": {}}
    done = rig.post(FROM_DISK, {"model_path": rig.path(2), "weight_version": "step 7"})
    said = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    assert (done.status, done.json) == (200, said)
    assert rig.answers_of(2)
    named = {"weight_version": "step 7", "weights_id": rig.model.weights_id}
    assert rig.info() == named | {"generation": 1, "labels": {}}
    assert rig.model.history[-1].by == "token"
    assert rig.ended() == [("update_weights_from_disk", "done", "token")]
    without_a_meaning = dict.fromkeys(
        ("abort_all_requests", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph"), True
    )
    fields = {"load_format": "auto", "weight_version": None, "token_step": 12, "flush_cache": False, "manifest": None}
    fields |= {"rid": None, "http_worker_ipc": None}  # of every request of SGLang's, where one is sent whole
    assert rig.post(FROM_DISK, {"model_path": rig.path(3)} | fields | without_a_meaning).status == 200
    assert rig.answers_of(3)
    assert rig.info()["weight_version"] == rig.model.weights_id


def in_a_directory(path: str) -> str:
    """Return a directory with the weights of a file, as Hugging Face's libraries write it."""
    folder = Path(path).with_suffix("")
    folder.mkdir()
    Path(path).rename(folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("as_list", [False, True])
def test_the_lifecycle_of_an_update(rig: Rig, as_list: bool) -> None:
    assert rig.post(INIT, {"init_info": {"backend": "disk"}}).json == {"message": "Weight transfer initialized"}
    bodies = [None, {"is_checkpoint_format": True}, b"not even JSON"]
    for seed, body in zip((2, 3, 4), bodies, strict=True):
        assert rig.post(START, body).json == {"message": "Weight update started"}
        info = {"path": in_a_directory(rig.path(seed)) if as_list else rig.path(seed)}
        done = rig.post(UPDATE, {"update_info": [info] if as_list else info})
        assert (done.status, done.json) == (200, {"message": "Weights updated"})
        assert rig.answers_of(seed - 1)
        assert rig.status["staged"]["ready"]
        version = {"weight_version": f"v{seed}"} if seed < 4 else None
        assert rig.post(FINISH, version).json == {"message": "Weight update finished"}
        assert rig.answers_of(seed)
        assert rig.info()["weight_version"] == (f"v{seed}" if seed < 4 else rig.model.weights_id)
    calls = [name for name, outcome, _ in rig.ended() if outcome == "done"]
    assert calls == ["init_weight_transfer_engine"] + 3 * ["start_weight_update", "update_weights", FINISH[1:]]


def test_a_version_is_that_of_the_weights(rig: Rig, tiny: TinyArtifact) -> None:
    """Also after a rollback; weights that no trainer has named have their label, or else their id."""
    for seed in (2, 3):
        rig.post(FROM_DISK, {"model_path": rig.path(seed), "weight_version": f"v{seed}"})
    rig.change("rollback", why="slower")
    assert rig.info()["weight_version"] == "v2"
    labelled = tiny.write(rig.folder / "labelled.safetensors", tiny.values(4), labels={"weight_version": "v4"})
    rig.change("swap", labelled, why="faster")
    assert (rig.info()["weight_version"], rig.info()["labels"]) == ("v4", {"weight_version": "v4"})
    rig.change("swap", 5, why="weight_versions are long")
    assert rig.info()["weight_version"] == rig.model.weights_id


def test_digests_are_those_that_the_file_records(rig: Rig) -> None:
    stamp = stamp_of(rig.path(1))
    assert stamp is not None
    checksums = rig.post(CHECKER, {"action": "checksum"}).json
    assert checksums == {"checksums": dict(stamp.digests)}
    same = {"action": "compare", "baseline": checksums["checksums"]}
    assert rig.post(CHECKER, same).json == {"match": True, "mismatches": []}
    rig.post(FROM_DISK, {"model_path": rig.path(2)})
    missing = {name: digest for name, digest in checksums["checksums"].items() if name != "bias"} | {"more": "x"}
    found = rig.post(CHECKER, {"action": "compare", "baseline": missing}).json
    assert found == {"match": False, "mismatches": ["bias", "more", "steps", "tied", "weight"]}


def nan(rig: Rig, tiny: TinyArtifact) -> str:
    bias = {"bias": torch.full((5,), torch.nan)}
    return str(tiny.write(rig.folder / "nan.safetensors", tiny.values(2) | bias))


def truncated(rig: Rig, tiny: TinyArtifact) -> str:
    path = rig.folder / "short.safetensors"
    path.write_bytes(rig.file(2).read_bytes()[:-3])
    return str(path)


def of_other_outputs(rig: Rig, tiny: TinyArtifact) -> str:
    """Return weights whose goldens are those of others."""
    path = rig.file(2)
    stamp = stamp_of(path)
    assert stamp is not None
    tensors, document = hand_made(tiny, rig.folder)
    written(rig.folder / "v2.goldens.safetensors", tensors, document | {"weights_id": stamp.weights_id})
    return str(path)


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        (nan, 422, ["NonFiniteWeights", ""]),
        (truncated, 422, ["WeightFileError", "truncated"]),
        (of_other_outputs, 422, ["GoldenMismatch", ""]),
        (lambda rig, _: "/etc/passwd", 403, ["Forbidden", ""]),
        (lambda rig, _: str(rig.folder / ("x" * 300)), 403, ["Forbidden", ""]),
        (lambda rig, _: str(rig.folder / "none.safetensors"), 422, ["WeightFileError", "unreadable"]),
    ],
)
def test_weights_that_are_refused_change_nothing(
    rig: Rig, tiny: TinyArtifact, path: Callable[[Rig, TinyArtifact], str], status: int, why: list[str]
) -> None:
    bad = path(rig, tiny)
    refused = rig.post(FROM_DISK, {"model_path": bad, "weight_version": "v2"})
    assert (refused.status, [refused.json["kind"], refused.json["reason"]]) == (400, why)
    assert refused.json["success"] is False
    assert refused.json["message"] == refused.json["error"]
    assert rig.post(START).status == 200
    refused = rig.post(UPDATE, {"update_info": {"path": bad}})
    assert (refused.status, [refused.json["kind"], refused.json["reason"]]) == (status, why)
    assert rig.post(FINISH).status == 409
    assert rig.is_unchanged()
    assert rig.info()["weight_version"] == rig.model.weights_id
    assert [each[1] for each in rig.ended()] == ["refused", "done", "refused", "refused", "done"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (FROM_DISK, {}, "model_path"),
        (FROM_DISK, {"model_path": ""}, "model_path"),
        (FROM_DISK, {"model_path": 7}, "model_path"),
        (FROM_DISK, b"{", "JSON"),
        *((FROM_DISK, {"model_path": "{file}", "load_format": name}, "load_format") for name in ("dummy", "pt", "")),
        (FROM_DISK, {"model_path": "{file}", "manifest": {}}, "manifest"),
        (FROM_DISK, {"model_path": "{file}", "target_modules": ["a"]}, "target_modules"),
        (FROM_DISK, {"model_path": "{file}", "base_model": "b"}, "base_model"),
        (FROM_DISK, {"model_path": "{file}", "weight_version": 7}, "weight_version"),
        *((INIT, {"init_info": {"backend": name}}, name) for name in ("nccl", "ipc", "gloo", "mooncake")),
        (INIT, {"init_info": {"backend": ["disk"]}}, "backend"),
        (INIT, {"init_info": {"timeout": 3}}, "timeout"),
        (INIT, {"init_info": []}, "init_info"),
        (INIT, {}, "init_info"),
        *((INIT, {"init_info": {name: "x"}}, "Sender") for name in PAYLOADS),
        *((UPDATE, {"update_info": {"path": "{file}", name: []}}, "Sender") for name in PAYLOADS),
        (UPDATE, {"update_info": [{"path": "{file}"}, {"names": ["a"]}]}, "names"),
        (UPDATE, {"update_info": [{"path": "{file}"}, {"path": "{file}"}]}, "got 2"),
        (UPDATE, {"update_info": []}, "got 0"),
        (UPDATE, {"update_info": {}}, "path"),
        (UPDATE, {"update_info": {"path": 7}}, "path"),
        (UPDATE, {"update_info": {"path": ""}}, "path"),
        (UPDATE, {"update_info": {"path": "x" * 4097}}, "path"),
        (UPDATE, {"update_info": {"path": "{file}", "only": "a"}}, "only"),
        (UPDATE, {"update_info": "{file}"}, "update_info"),
        (UPDATE, {}, "update_info"),
        (FINISH, {"weight_version": 7}, "weight_version"),
        (CHECKER, {"action": "reset"}, "reset"),
        (CHECKER, {"action": "compare"}, "baseline"),
        (CHECKER, {"action": "checksum", "checksums": []}, "checksums"),
        *((verb, {"names": ["w"], "serialized_named_tensors": ["x"]}, "Sender") for verb in REFUSED),
    ],
)
def test_what_cannot_be_meant_or_taken_changes_nothing(untouched: Rig, path: str, body: Any, said: str) -> None:
    """A refused step ends the update, whose weights a finish would otherwise commit without what was refused."""
    untouched.post(INIT, {"init_info": {}})
    staged = path == FINISH
    if path in (UPDATE, FINISH):
        assert untouched.post(START).status == 200
    if staged:
        assert untouched.update(2).status == 200
    raw = body if isinstance(body, bytes) else json.dumps(body).replace("{file}", untouched.path(2)).encode()
    refused = untouched.post(path, raw)
    assert (refused.status, refused.json["kind"]) == (400, "BadRequest")
    assert said in refused.json["error"]
    if path in (FROM_DISK, *REFUSED):
        assert (refused.json["success"], refused.json["message"]) == (False, refused.json["error"])
    assert untouched.post(FINISH).status == 409
    assert untouched.is_unchanged()


@pytest.mark.parametrize("path", REFUSED)
def test_tensors_are_refused_however_large(untouched: Rig, path: str) -> None:
    refused = untouched.post(path, bytes(5 << 20))
    assert (refused.status, "Sender" in refused.json["message"]) == (400, True)


def test_steps_out_of_order_change_nothing(rig: Rig) -> None:
    assert (rig.update(2).status, rig.post(FINISH).status) == (409, 409)
    assert rig.post(START).status == 200
    assert rig.post(START).json["kind"] == "Conflict"
    assert rig.post(FINISH).status == 409  # without an update
    assert rig.update(2).status == 409  # it has ended
    assert rig.post(START).status == 200
    assert (rig.update(2).status, rig.update(3).json["kind"]) == (200, "Conflict")  # a finish would serve one alone
    assert rig.post(FINISH).status == 409
    assert rig.is_unchanged()


def test_of_two_trainers_one_is_told_so(rig: Rig) -> None:
    assert rig.post(START).status == 200
    assert rig.update(2).status == 200
    refused = rig.post(START)
    assert (refused.status, "already" in refused.json["error"]) == (409, True)
    beside = rig.post(FROM_DISK, {"model_path": rig.path(3)})
    assert (beside.status, beside.json["kind"]) == (400, "Conflict")
    assert "an update has been started by token already; finish it" in beside.json["message"]
    assert rig.answers_of(1)
    assert rig.post(FINISH).status == 200
    assert rig.answers_of(2)
    assert rig.post(START).status == 200


def as_user(rig: Rig, name: str, path: str, body: Any = b"") -> Reply:
    return call(rig.server, path, body, {"Authorization": f"Bearer {name * 8}"})


@pytest.fixture
def shared(model: Model, tiny: TinyArtifact, tmp_path: Path) -> Iterator[Rig]:
    """A server with tokens for `anna` and `bert`."""
    (tmp_path / "tokens").write_text("".join(f"{name} {name * 8}\n" for name in ("anna", "bert")))
    with trained(model, tiny, tmp_path, token_file=str(tmp_path / "tokens")) as rig:
        yield rig


def test_an_update_is_of_the_token_that_started_it(shared: Rig) -> None:
    def update(name: str, seed: int) -> int:
        return as_user(shared, name, UPDATE, {"update_info": {"path": shared.path(seed)}}).status

    assert (as_user(shared, "anna", START).status, update("anna", 2)) == (200, 200)
    assert as_user(shared, "bert", INIT, {"init_info": {}}).status == 200
    assert (as_user(shared, "bert", START).status, update("bert", 3)) == (200, 200)
    for refused in (as_user(shared, "anna", FINISH), as_user(shared, "anna", FINISH, b"{")):
        assert refused.status in (400, 409)
    assert update("anna", 2) == 409
    assert shared.serves(1)
    assert as_user(shared, "bert", FINISH, {"weight_version": "b"}).status == 200  # what others tried changed nothing
    assert shared.serves(3)
    assert shared.model.history[-1].by == "bert"


def test_the_reason_is_kept_whoever_commits(shared: Rig) -> None:
    source = {"source": shared.path(2), "why": "to try"}
    assert as_user(shared, "anna", "/admin/models/tiny/stage", source).status == 200
    assert as_user(shared, "bert", "/admin/models/tiny/commit", {"why": "it is better"}).status == 200
    receipts = as_user(shared, "bert", "/admin/models/tiny/history", None).json["receipts"]
    assert (receipts[-1]["why"], receipts[-1]["by"]) == ("it is better", "anna")


@contextmanager
def staging_held(rig: Rig, pool: ThreadPoolExecutor) -> Iterator[Future[Reply]]:
    """Yield an update to the weights of seed 2, whose staging waits for the end of the block."""
    begun, go_on = Event(), Event()

    def wait(event: weightswap_runtime.Event) -> None:
        if event.kind == "staging" and not go_on.is_set():
            begun.set()
            go_on.wait(120)

    rig.model.listen(wait)
    assert rig.post(START).status == 200
    update = pool.submit(rig.update, 2)
    assert begun.wait(120)
    try:
        yield update
    finally:
        go_on.set()


def test_a_finish_that_comes_too_early_can_be_repeated(rig: Rig) -> None:
    with ThreadPoolExecutor(1) as pool:
        with staging_held(rig, pool) as update:
            early = rig.post(FINISH)
            assert (early.status, early.json["kind"]) == (409, "StagingBusy")
        assert update.result(120).status == 200
    assert rig.post(FINISH).status == 200
    assert rig.answers_of(2)


def test_trainers_heed_a_hold_and_what_was_withdrawn(rig: Rig, desired_store: DesiredStore) -> None:
    desired_store.set(rig.file(2), revision=1, by="ci")
    rig.model.follow(desired_store, 0.05)
    assert eventually(lambda: rig.serves(2))
    desired_store.rollback(revision=2, by="ann", why="slow", hold=True)
    assert eventually(lambda: rig.serves(1))
    for seed, reason in ((3, "held"), (2, "superseded")):
        refused = rig.post(FROM_DISK, {"model_path": rig.path(seed)})
        assert (refused.status, refused.json["kind"], refused.json["reason"]) == (400, "NotPromoted", reason)
        assert (rig.post(START).status, rig.update(seed).status, rig.post(FINISH).status) == (200, 200, 409)
        assert rig.serves(1)
    desired_store.release(revision=3)
    assert rig.post(FROM_DISK, {"model_path": rig.path(3)}).status == 200
    assert rig.serves(3)


def test_a_version_is_that_of_the_last_time_that_weights_came(rig: Rig) -> None:
    for version, known in (("six", "six"), (None, None), ("", None), ("a=b", "a=b")):
        body = {"model_path": rig.path(2)} | ({} if version is None else {"weight_version": version})
        assert rig.post(FROM_DISK, body).status == 200
        assert rig.info()["weight_version"] == (known or rig.model.weights_id)
        assert rig.post(FROM_DISK, {"model_path": rig.path(3)}).status == 200


def test_a_trainer_that_begins_anew_discards_what_its_predecessor_left(rig: Rig) -> None:
    for steps in (0, 1):
        assert rig.post(START).status == 200
        assert not steps or rig.update(2).status == 200
        assert rig.post(INIT, {"init_info": {}}).status == 200
        assert rig.status["staged"] is None
        assert rig.post(FINISH).status == 409
    assert rig.is_unchanged()
    assert (rig.update(3).status, rig.post(FINISH).status, rig.answers_of(3)) == (200, 200, True)


def test_a_trainer_that_begins_anew_breaks_off_a_staging(rig: Rig) -> None:
    with ThreadPoolExecutor(2) as pool:
        with staging_held(rig, pool) as update:
            assert rig.server.admin is not None
            staging = rig.server.admin.models["tiny"]._changes.open[0]
            anew = pool.submit(rig.post, INIT, {"init_info": {}})
            assert eventually(lambda: staging.is_discarded)
        assert (update.result(120).json["kind"], anew.result(120).status) == ("StageCancelled", 200)
    assert rig.post(FINISH).status == 409
    assert rig.is_unchanged()


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_a_dead_trainer_leaves_ends_with_the_timeout(
    model: Model, tiny: TinyArtifact, tmp_path: Path, is_staged: bool
) -> None:
    with trained(model, tiny, tmp_path, staged_timeout=GIVEN_UP_AFTER) as rig:
        assert rig.post(START).status == 200
        assert not is_staged or rig.update(2).status == 200
        assert eventually(lambda: rig.post(START).status == 200)
        assert rig.answers_of(1)
        assert rig.status["staged"] is None


@pytest.mark.parametrize("path", [UPDATE, FINISH])
def test_a_step_that_comes_too_late_is_refused(rig: Rig, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr("weightswap_server.admin.trainers.Lease", lambda timeout: Lease(timeout, lambda: seconds[0]))
    assert rig.post(START).status == 200
    assert path == UPDATE or rig.update(2).status == 200
    seconds[0] = 3600.0
    refused = rig.update(2) if path == UPDATE else rig.post(FINISH)
    assert (refused.status, "--staged-timeout" in refused.json["error"]) == (409, True)
    assert rig.is_unchanged()


def test_operators_and_trainers_do_not_commit_each_others_weights(rig: Rig) -> None:
    rig.post(START)
    assert rig.update(2).status == 200
    assert rig.change("discard").status == 200
    assert rig.change("stage", 2).status == 200  # the same weights, by an operator
    refused = rig.post(FINISH)
    assert (refused.status, refused.json["kind"]) == (409, "StageClosed")
    assert rig.answers_of(1)
    assert rig.status["staged"]["ready"]  # still the operator's
    rig.post(START)
    refused = rig.update(3)
    assert (refused.status, refused.json["kind"]) == (409, "StagingBusy")
    assert rig.post(INIT, {"init_info": {}}).status == 200
    assert rig.status["staged"]["ready"]
    assert rig.change("commit").status == 200
    assert rig.answers_of(2)


def fail(staged: Staged, **options: Any) -> Any:
    raise WaitTimeout("calls hold the memory")


def test_a_commit_that_fails_leaves_nothing_staged(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.post(START)
    assert rig.update(2).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(Staged, "commit", fail)
        assert rig.post(FINISH).status == 503
    assert rig.is_unchanged()


def test_nobody_without_a_token(untouched: Rig) -> None:
    untouched.post(INIT, {"init_info": {}})
    for path in (*POSTED, INFO):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN[::-1]}"}):
            assert call(untouched.server, path, None if path == INFO else b"{}", headers).status == 401
    for path in POSTED:
        assert ask(untouched.server, path, {}, BEARER).status == 404  # at the public port
    assert untouched.is_unchanged()


def test_of_several_models_the_query_names_one(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    models = {name: load(tiny.path, weight_file(1)) for name in ("one", "two")}
    with administered(models, allow=(str(tmp_path),)) as server:
        bodies = {FROM_DISK: {"model_path": str(weight_file(2))}, INIT: {"init_info": {}}, START: {}, FINISH: {}}
        bodies |= {UPDATE: {"update_info": {"path": str(weight_file(2))}}, CHECKER: {"action": "checksum"}, INFO: None}
        for path, body in bodies.items():
            refused = call(server, path, body)
            assert (refused.status, "there are: one, two" in refused.json["error"]) == (400, True)
            unknown = call(server, f"{path}?model=three", body)
            assert (unknown.status, unknown.json["kind"]) == (400 if path == FROM_DISK else 404, "UnknownModel")
        assert call(server, f"{FROM_DISK}?model=two", bodies[FROM_DISK]).status == 200
        assert (serves(models["one"], 1), serves(models["two"], 2)) == (True, True)
        for name, seed in (("one", 3), ("two", 4)):
            assert call(server, f"{START}?model={name}", {}).status == 200
            body = {"update_info": {"path": str(weight_file(seed))}}
            assert call(server, f"{UPDATE}?model={name}", body).status == 200
        assert call(server, f"{FINISH}?model=one", {"weight_version": "v3"}).status == 200
        assert (serves(models["one"], 3), serves(models["two"], 2)) == (True, True)
        assert call(server, f"{INFO}?model=one").json["weight_version"] == "v3"
        assert call(server, f"{FINISH}?model=two", {}).status == 200
        assert serves(models["two"], 4)


def test_nothing_is_told_of_weights_that_are_not_there(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with administered({"tiny": load(tiny.path)}, warm=False, allow=(str(weight_file(2).parent),)) as server:
        for found in (call(server, INFO), call(server, CHECKER, {"action": "checksum"})):
            assert (found.status, found.json["kind"]) == (503, "NoWeights")
        assert call(server, FROM_DISK, {"model_path": str(weight_file(2))}).status == 200
        assert call(server, INFO).json["generation"] == 0


@pytest.fixture
def followed(rig: Rig, desired_store: DesiredStore) -> DesiredStore:
    return rig.follow(desired_store)


def test_where_a_desired_store_is_followed_the_weights_become_desired(
    rig: Rig, followed: DesiredStore, tiny: TinyArtifact
) -> None:
    done = rig.post(FROM_DISK, {"model_path": rig.path(2), "weight_version": "v2"})
    assert (done.status, rig.answers_of(2)) == (200, True)
    state = followed.read()
    assert state.weights is not None
    assert (state.revision, state.weights.weights_id, state.weights.by) == (2, rig.model.weights_id, "token")
    rig.post(START)
    assert rig.update(3).status == 200
    assert followed.read().revision == 2
    assert rig.post(FINISH, {"weight_version": "v3"}).status == 200
    assert (followed.read().revision, followed.read().weights_id, rig.answers_of(3)) == (3, rig.model.weights_id, True)
    assert rig.info()["weight_version"] == "v3"
    with load(tiny.path) as other, other.follow(followed.where, 0.02) as follower:
        assert follower.wait(120)
        with administered({"tiny": other}) as server:
            assert call(server, INFO).json["weight_version"] == "v3"  # every follower knows it

    rig.post(START)
    assert rig.post(UPDATE, {"update_info": {"path": nan(rig, tiny)}}).status == 422
    rig.post(START)
    assert rig.update(4).status == 200
    followed.set(rig.path(5), revision=3, by="bo")
    overtaken = rig.post(FINISH)
    assert (overtaken.status, overtaken.json["kind"]) == (409, "RevisionConflict")
    assert (followed.read().revision, rig.status["staged"]) == (4, None)
    assert rig.post(START).status == 200


def test_weights_that_are_desired_but_not_served_yet_are_no_success(
    rig: Rig, followed: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightswap_server.admin.journal._TIMEOUT", 0.2)
    monkeypatch.setattr(Staged, "commit", fail)
    refused = rig.post(FROM_DISK, {"model_path": rig.path(2)})
    assert (refused.status, refused.json["kind"]) == (400, "NotServed")
    assert (followed.read().revision, rig.answers_of(1)) == (2, True)
