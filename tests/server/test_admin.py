"""The admin plane: what operators do to a model, and what they are told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton

from tests.support.administered import BEARER, TOKEN, administered, call, change, status
from tests.support.served import as_json, ask
from tests.support.tiny import SLOW, TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import DesiredStore, WaitTimeout, load
from weightswap_runtime.live.staged import Staged
from weightswap_server import Server
from weightswap_server.admin.journal import JournalState

X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = "/v2/models/tiny/infer"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)


@pytest.fixture
def server(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> Iterator[Server]:
    """A server with the weights of seed 1, whose operators may name files in the tests' folder."""
    audit = str(tmp_path / "audit.jsonl")
    with administered({"tiny": load(tiny.path, weight_file(1))}, allow=(str(tmp_path),), audit_log=audit) as running:
        yield running


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def test_weights_from_memory_have_no_way_back_once_others_were_served(
    server: Server, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model = server.service.served[0].model
    given = model.swap(tiny.values(2), labels={"step": "7"}).weights_id
    assert change(server, "swap", source=str(weight_file(3))).status == 200
    assert change(server, "rollback").json["receipt"]["weights_id"] == given  # it is still there
    for seed in (3, 4):
        assert change(server, "swap", source=str(weight_file(seed))).status == 200
    refused = change(server, "rollback", to=given)
    assert refused.status == 409
    assert "came from a delta, a part or memory, and cannot be read again" in refused.json["error"]
    receipts = call(server, "/admin/models/tiny/history").json["receipts"]
    assert [each["reloadable"] for each in receipts] == [True, False, True, False, True, True]
    assert receipts[1]["labels"] == {"step": "7"}


def test_a_swap_and_its_way_back(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = server.service.served[0].model
    first = model.weights_id
    found = change(server, "swap", source=str(weight_file(2)), why="better")
    assert found.status == 200
    receipt = found.json["receipt"]
    assert (receipt["generation"], receipt["by"], receipt["previous_weights_id"]) == (1, "token", first)
    assert serves(model, 2)
    assert ask(server, INFER, as_json(x=X)).json["parameters"]["weights_id"] == receipt["weights_id"]
    now = found.json["status"]["served"]
    assert (now["weights_id"], now["generation"], now["by"]) == (receipt["weights_id"], 1, "token")

    assert change(server, "swap", source=str(weight_file(3))).status == 200
    back = change(server, "rollback", to=first[:8])  # from its file
    assert (back.status, back.json["receipt"]["weights_id"]) == (200, first)
    assert serves(model, 1)
    assert change(server, "rollback").json["receipt"]["kind"] == "rollback"
    assert serves(model, 3)

    ended = [line for line in audited(tmp_path) if line["outcome"] == "done"]
    assert [line["call"] for line in ended] == ["swap", "swap", "rollback", "rollback"]
    assert ended[0]["weights_before"] == first
    assert ended[0]["weights_after"] == receipt["weights_id"]
    assert ended[0]["arguments"]["why"] == "better"
    assert ended[0]["peer"].startswith("127.0.0.1:")
    history = call(server, "/admin/models/tiny/history").json
    assert [each["generation"] for each in history["receipts"]] == [0, 1, 2, 3, 4]


def test_what_is_staged_is_committed_or_discarded(server: Server, weight_file: WriteWeights) -> None:
    model = server.service.served[0].model
    staged = change(server, "stage", source=str(weight_file(2))).json["status"]["staged"]
    assert staged["ready"]
    assert staged["weights_id"] != model.weights_id
    assert serves(model, 1)
    assert change(server, "stage", source=str(weight_file(3))).status == 409
    assert change(server, "swap", source=str(weight_file(3))).status == 409
    assert change(server, "discard").json["status"]["staged"] is None
    assert change(server, "commit").status == 409
    change(server, "stage", source=str(weight_file(2)))
    assert change(server, "commit").json["receipt"]["weights_id"] == staged["weights_id"]
    assert serves(model, 2)
    assert status(server)["staged"] is None


def test_a_staging_can_be_looked_at_and_broken_off(server: Server, weight_file: WriteWeights) -> None:
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(change, server, "swap", source=str(weight_file(2)), rate_limit=SLOW)
        limit = time.monotonic() + 20
        while not ((now := status(server))["staging"] and now["staged"]):
            assert time.monotonic() < limit
        assert now["staged"]["ready"] is False
        assert change(server, "commit").status == 409  # it is a swap's
        assert change(server, "discard").status == 200
        assert staging.result(20).status == 409
    assert serves(server.service.served[0].model, 1)


def test_what_is_refused_changes_nothing_and_is_remembered(
    server: Server, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(weight_file(2).read_bytes()[:-3])
    nan = tiny.write(tmp_path / "nan.safetensors", tiny.values(2) | {"bias": torch.full((5,), torch.nan)})
    file_error = "WeightFileError"
    why = [(file_error, "truncated"), ("NonFiniteWeights", ""), (file_error, "unreadable")]
    for source, (kind, reason) in zip((bad, nan, tmp_path / "none"), why, strict=True):
        refused = change(server, "swap", source=str(source))
        assert (refused.status, refused.json["kind"], refused.json["reason"]) == (422, kind, reason)
        assert refused.json["error"]
    assert serves(server.service.served[0].model, 1)
    refusals = call(server, "/admin/models/tiny/history").json["refusals"]
    assert [(each["kind"], each["reason"]) for each in refusals] == why
    assert {each["by"] for each in refusals} == {"token"}
    assert [line["outcome"] for line in audited(tmp_path)] == ["begun", "refused"] * 3
    assert change(server, "swap", source=str(nan), allow_nonfinite=["bias"]).status == 200


@pytest.fixture
def desired_store(weight_file: WriteWeights, tmp_path: Path) -> DesiredStore:
    (tmp_path / "service").mkdir()
    found = DesiredStore(tmp_path / "service")
    found.set(weight_file(1), revision=0, by="ana")
    return found


def test_where_a_desired_store_is_followed_changes_are_written_there(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """Otherwise the next poll of this process, or another, would undo them."""
    model = server.service.served[0].model
    assert change(server, "hold").status == 409
    assert change(server, "follow", desired_store=desired_store.where, interval=0.02).status == 200
    assert change(server, "follow", desired_store=desired_store.where).status == 409
    swapped = change(server, "swap", source=str(weight_file(2)), why="faster")
    assert swapped.status == 200
    state = desired_store.read()
    assert (state.revision, state.weights.by, state.weights.why) == (2, "token", "faster")
    assert state.weights.weights_id == swapped.json["receipt"]["weights_id"] == model.weights_id
    time.sleep(0.1)  # some looks
    assert (model.generation, serves(model, 2)) == (1, True)

    assert change(server, "rollback", why="slower").json["status"]["following"]["on_hold"]
    assert serves(model, 1)
    state = desired_store.read()
    assert (state.revision, state.hold.by) == (3, "token")
    assert [each.weights_id for each in state.withdrawn] == [swapped.json["receipt"]["weights_id"]]
    time.sleep(0.1)
    assert serves(model, 1)
    assert change(server, "release").status == 200
    assert desired_store.read().hold is None
    assert change(server, "hold", why="a feast").json["status"]["following"]["held_why"] == "a feast"
    history = call(server, "/admin/models/tiny/history").json
    assert len(history["withdrawn"]) == 1

    stale = change(server, "swap", source=str(weight_file(3)), revision=2)
    assert (stale.status, stale.json["kind"]) == (409, "RevisionConflict")
    assert serves(model, 1)
    assert status(server)["staged"] is None
    assert change(server, "unfollow").status == 200
    assert status(server)["following"] is None
    assert change(server, "unfollow").status == 409


@pytest.mark.usefixtures("_places")
def test_a_delta_is_desired_with_what_leads_to_its_base(
    server: Server, desired_store: DesiredStore, tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    model = server.service.served[0].model
    change(server, "follow", desired_store=desired_store.where, interval=30)
    swapped = change(server, "swap", source=str(delta(1, 2)), why="little changed")
    assert (swapped.status, swapped.json["receipt"]["kind"], serves(model, 2)) == (200, "delta", True)
    weights = desired_store.read().weights
    assert weights is not None
    assert (weights.weights_id, [each.source for each in weights.bases]) == (model.weights_id, [str(weight_file(1))])
    other = load(tiny.path)
    with other.follow(desired_store.where, 0.02) as follower:
        assert follower.wait(60)
    assert serves(other, 2)

    assert change(server, "stage", source=str(delta(2, 3))).status == 200
    desired_store.set(weight_file(4), revision=2, by="bo")
    refused = change(server, "commit", revision=3)
    assert (refused.status, refused.json["kind"]) == (422, "BaseMismatch")
    assert (serves(model, 2), desired_store.read().revision) == (True, 3)


def test_each_commit_keeps_its_own_reason(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """Even if the desired store has another reason for the same weights by now, as after a rollback to them."""
    change(server, "follow", desired_store=desired_store.where, interval=0.02)
    desired_store.set(weight_file(2), revision=1, by="bo", why="better")
    limit = time.monotonic() + 20
    while not serves(server.service.served[0].model, 2):
        assert time.monotonic() < limit
        time.sleep(0.01)
    change(server, "swap", source=str(weight_file(3)), why="faster")
    change(server, "rollback", why="wrong")
    change(server, "rollback", to=desired_store.read().history[0].weights_id, why="worse")
    receipts = call(server, "/admin/models/tiny/history").json["receipts"]
    assert [each["why"] for each in receipts] == ["", "better", "faster", "wrong", "worse"]
    assert status(server)["served"]["why"] == "worse"


def test_a_reason_is_told_before_its_commit(
    server: Server, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that replaces one which dies after a commit knows it; weights never committed have none."""
    assert server.admin is not None
    operations, told, before = server.admin.models["tiny"], list[JournalState](), list[dict[int, str]]()
    operations.journal.on_change = told.append
    commit, fails = Staged.commit, False

    def die(staged: Staged, **options: Any) -> Any:
        before.append(dict(told[-1].whys))
        if fails:
            raise WaitTimeout("a worker holds it")
        return commit(staged, **options)

    monkeypatch.setattr(Staged, "commit", die)
    assert change(server, "swap", source=str(weight_file(2)), why="faster").status == 200
    fails = True
    assert change(server, "swap", source=str(weight_file(3)), why="better").status == 503
    assert [before, told[-1].whys] == [[{1: "faster"}, {1: "faster", 2: "better"}], {1: "faster"}]
    operations.journal.inherit(JournalState(before[-1]))
    assert told[-1].whys == {1: "faster"}


def test_two_operators_do_not_overwrite_each_other(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """Weights staged before another operator's write are not committed over it, but discarded."""
    model = server.service.served[0].model
    change(server, "follow", desired_store=desired_store.where, interval=0.02)
    assert change(server, "stage", source=str(weight_file(2))).json["status"]["staged"]["ready"]
    desired_store.set(weight_file(3), revision=1, by="bo")
    assert change(server, "commit").status == 409
    limit = time.monotonic() + 20
    while not serves(model, 3):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert status(server)["staged"] is None


def test_a_rollback_answers_with_its_own_receipt(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt is written after the weights are served."""
    model = server.service.served[0].model
    change(server, "follow", desired_store=desired_store.where, interval=0.02)
    change(server, "swap", source=str(weight_file(2)))
    exchange = model._store.gate.exchange

    def slow_exchange(*arguments: Any) -> float:
        seconds = exchange(*arguments)
        time.sleep(0.2)
        return seconds

    monkeypatch.setattr(model._store.gate, "exchange", slow_exchange)
    receipt = change(server, "rollback").json["receipt"]
    assert (receipt["kind"], receipt["generation"]) == ("rollback", 2)


def test_a_rollback_leads_to_what_was_served(
    server: Server, tiny: TinyArtifact, desired_store: DesiredStore, weight_file: WriteWeights, tmp_path: Path
) -> None:
    """It skips weights that were refused. If named, these are refused again, but withdrawn ones are not."""
    model = server.service.served[0].model
    bad = after_nan(server, desired_store, tiny, weight_file)
    assert change(server, "rollback", to=bad[:12]).status == 422
    assert change(server, "rollback").status == 200
    assert serves(model, 1)
    assert desired_store.read().withdrawn[0].weights_id == bad
    assert change(server, "rollback", to=desired_store.read().withdrawn[1].weights_id).status == 200
    assert serves(model, 4)
    back = change(server, "rollback")
    assert (back.status, serves(model, 1)) == (200, True)
    assert back.json["receipt"]["weights_id"] == desired_store.read().weights.weights_id


def after_nan(server: Server, desired_store: DesiredStore, tiny: TinyArtifact, weight_file: WriteWeights) -> str:
    """Follow a desired store that desired weights with a NaN, which were refused, and then those of seed 4. Return
    their id."""
    nan = tiny.write(weight_file(1).with_name("nan.safetensors"), nan_values(tiny))
    state = desired_store.set(nan, revision=1, why="never looked at")
    change(server, "follow", desired_store=desired_store.where, interval=0.02)
    follower = server.service.served[0].model.watching[0]
    limit = time.monotonic() + 20
    while follower.last_error is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    desired_store.set(weight_file(4), revision=2)
    assert follower.wait(20, revision=3)
    assert state.weights is not None
    return state.weights.weights_id


def nan_values(tiny: TinyArtifact) -> dict[str, torch.Tensor]:
    return tiny.values(2) | {"bias": torch.full((5,), torch.nan)}


def test_a_rollback_to_what_is_refused_writes_nothing(
    server: Server, desired_store: DesiredStore, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """Weights are verified before they are desired; what is refused, also in the history, is called that."""
    model = server.service.served[0].model
    bad = after_nan(server, desired_store, tiny, weight_file)
    before = desired_store.read()
    history = call(server, "/admin/models/tiny/history").json
    assert [bool(each["refused"]) for each in history["desired"]] == [False, True]
    for options in ({}, {"hold": False}, {"revision": 3}):
        refused = change(server, "rollback", to=bad, **options)
        assert (refused.status, refused.json["kind"]) == (422, "NonFiniteWeights")
        assert "bias: 5 NaN" in refused.json["error"]
        assert desired_store.read() == before
    assert serves(model, 4)
    found = status(server)
    assert (found["staged"], found["following"]["on_hold"], found["following"]["agrees"]) == (None, False, True)
    assert model.generation == 1

    assert change(server, "rollback").status == 200  # which withdraws it
    withdrawn = call(server, "/admin/models/tiny/history").json["withdrawn"]
    assert [(each["weights_id"] == bad, "5 NaN" in each["refused"]) for each in withdrawn] == [
        (True, True),
        (False, False),
    ]
    before = desired_store.read()
    refused = change(server, "rollback", to=bad)
    assert (refused.status, refused.json["kind"]) == (422, "NonFiniteWeights")
    assert desired_store.read() == before
    assert serves(model, 1)


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def damaged_goldens(file: Path) -> None:
    file.with_name(f"{file.stem}.goldens.safetensors").write_bytes(b"no goldens at all")


@pytest.mark.parametrize(("spoil", "kind"), [(damaged, "DigestMismatch"), (damaged_goldens, "WeightFileError")])
def test_a_rollback_verifies_what_is_no_longer_in_memory(
    spoil: Callable[[Path], None], kind: str, server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """Every byte and all goldens, as the follower does, though the process has served these weights before."""
    change(server, "follow", desired_store=desired_store.where, interval=30)
    for seed in (2, 3):
        assert change(server, "swap", source=str(weight_file(seed))).status == 200
    first = server.service.served[0].model.history[0].weights_id
    kept, before = weight_file(1).read_bytes(), desired_store.read()
    spoil(weight_file(1))
    refused = change(server, "rollback", to=first)
    assert (refused.status, refused.json["kind"]) == (422, kind)
    assert desired_store.read() == before
    assert serves(server.service.served[0].model, 3)
    history = call(server, "/admin/models/tiny/history").json["desired"]
    assert [bool(each["refused"]) for each in history] == [True, False]

    weight_file(1).with_name("v1.goldens.safetensors").unlink(missing_ok=True)
    weight_file(1).write_bytes(kept)
    receipt = change(server, "rollback", to=first, why="mended").json["receipt"]
    assert (receipt["kind"], receipt["by"], receipt["weights_id"]) == ("full", "token", first)
    assert serves(server.service.served[0].model, 1)
    state = desired_store.read()
    assert (state.revision, state.weights.why, state.hold.why) == (before.revision + 1, "mended", "mended")
    history = call(server, "/admin/models/tiny/history").json
    assert history["receipts"][-1]["why"] == "mended"
    assert not any(each["refused"] for each in history["desired"])


def test_a_rollback_has_the_options_of_the_follower(
    tiny: TinyArtifact, desired_store: DesiredStore, weight_file: WriteWeights, tmp_path: Path
) -> None:
    nan = tiny.write(tmp_path / "nan.safetensors", nan_values(tiny))
    for revision, file in enumerate((nan, weight_file(3)), start=1):
        desired_store.set(file, revision=revision)
    model = load(tiny.path)
    with model.follow(desired_store, 30, allow_nonfinite="bias") as follower, administered({"tiny": model}) as server:
        assert follower.wait(20)
        bad = desired_store.read().history[-1].weights_id
        back = change(server, "rollback", to=bad)
        assert (back.status, back.json["receipt"]["weights_id"], model.weights_id) == (200, bad, bad)
        assert change(server, "rollback", to=desired_store.read().history[0].weights_id).status == 200
        assert serves(model, 1)


@pytest.mark.usefixtures("_places")
def test_a_rollback_to_a_delta_reads_what_leads_to_its_base(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    change(server, "follow", desired_store=desired_store.where, interval=30)
    model = server.service.served[0].model
    for source in (delta(1, 2), weight_file(3), weight_file(4)):
        assert change(server, "swap", source=str(source)).status == 200
    changed = desired_store.read().history[1].weights_id
    damaged(weight_file(1))
    before = desired_store.read()
    assert change(server, "rollback", to=changed).json["kind"] == "DigestMismatch"
    assert (desired_store.read(), serves(model, 4)) == (before, True)
    weight_file(1)  # which writes it again
    assert change(server, "rollback", to=changed).status == 200
    assert serves(model, 2)


def test_a_rollback_does_not_wait_for_what_a_follower_stages(
    tiny: TinyArtifact, desired_store: DesiredStore, weight_file: WriteWeights, tmp_path: Path
) -> None:
    """It cancels that staging, which would take hours; if the rollback is refused, the follower begins it again."""
    model, begun = load(tiny.path, weight_file(1)), SimpleQueue[str]()
    model.listen(lambda event: begun.put(event.source) if event.kind == "staging" else None)
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(2), graph_id="0" * 64)
    desired_store.set(other, revision=1, allow_other_graph=True)
    desired_store.set(weight_file(3), revision=2, allow_other_graph=True)
    with administered({"tiny": model}) as server, model.follow(desired_store, 30, rate_limit=SLOW):
        assert begun.get(timeout=20) == str(weight_file(3))
        before = desired_store.read()
        refused = change(server, "rollback", to=before.history[1].weights_id)
        assert (refused.status, refused.json["kind"]) == (422, "GraphMismatch")
        assert desired_store.read() == before
        assert [begun.get(timeout=20) for _ in range(2)] == [str(other), str(weight_file(3))]
        assert change(server, "rollback", to=before.history[0].weights_id).status == 200  # it is still served
        assert (serves(model, 1), desired_store.read().hold is not None) == (True, True)


def test_a_rollback_does_not_wait_for_what_a_watcher_stages(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model, begun = load(tiny.path, weight_file(1)), SimpleQueue[str]()
    model.swap(weight_file(2))
    model.listen(lambda event: begun.put(event.source) if event.kind == "staging" else None)
    (tmp_path / "new").mkdir()
    new = tiny.write(tmp_path / "new" / "v3.safetensors", tiny.values(3))
    with administered({"tiny": model}) as server, model.watch(new.parent, 30, rate_limit=SLOW):
        assert begun.get(timeout=20) == str(new)
        assert change(server, "rollback", to=model.history[0].weights_id).status == 200
        assert serves(model, 1)


def test_a_rollback_gives_way_to_another_writer(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has written while the weights were verified: nothing is served that the desired store does not say."""
    model = server.service.served[0].model
    change(server, "follow", desired_store=desired_store.where, interval=30)
    for seed in (2, 3):
        assert change(server, "swap", source=str(weight_file(seed))).status == 200
    first = desired_store.read().history[0].weights_id
    stale = change(server, "rollback", to=first, revision=2)
    assert (stale.status, stale.json["kind"]) == (409, "RevisionConflict")
    wait = Staged.wait

    def overtaken(staged: Staged, timeout: float | None = None) -> Staged:
        found = wait(staged, timeout)
        if desired_store.read().revision == 3:
            desired_store.hold(revision=3, by="bo")
        return found

    monkeypatch.setattr(Staged, "wait", overtaken)
    refused = change(server, "rollback", to=first)
    assert (refused.status, refused.json["kind"]) == (409, "RevisionConflict")
    state = desired_store.read()
    assert (state.revision, state.hold.by, state.weights_id) == (4, "bo", model.weights_id)
    assert (serves(model, 3), status(server)["staged"]) == (True, None)


def test_a_rollback_that_is_broken_off_writes_nothing(
    tiny: TinyArtifact, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    desired_store.set(weight_file(2), revision=1)
    model, before = load(tiny.path, weight_file(2)), desired_store.read()
    with administered({"tiny": model}) as server, model.follow(desired_store, 30, rate_limit=SLOW):
        with ThreadPoolExecutor(1) as pool:
            back = pool.submit(change, server, "rollback")
            limit = time.monotonic() + 20
            while not ((now := status(server))["staging"] and now["staged"]):
                assert time.monotonic() < limit
            assert (now["staged"]["ready"], now["staged"]["source"]) == (False, str(weight_file(1)))
            assert change(server, "discard").status == 200
            refused = back.result(20)
        assert (refused.status, refused.json["kind"]) == (409, "StageCancelled")
        assert (desired_store.read(), serves(model, 2)) == (before, True)


@pytest.mark.parametrize("call_of", ["swap", "rollback"])
def test_what_was_written_is_committed_as_soon_as_it_can_be(
    call_of: str,
    server: Server,
    desired_store: DesiredStore,
    weight_file: WriteWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit for which memory is not free at first is the follower's: the desired store says so already."""
    model = server.service.served[0].model
    for revision, seed in enumerate((2, 3), start=1):
        desired_store.set(weight_file(seed), revision=revision)
    change(server, "follow", desired_store=desired_store.where, interval=30)
    assert model.watching[0].wait(20)  # type: ignore[attr-defined]
    commit, tries = Staged.commit, list[str]()

    def held(staged: Staged, **options: Any) -> Any:
        tries.append(staged.weights_id)
        if len(tries) == 1:
            raise WaitTimeout("a worker holds it")
        return commit(staged, **options)

    monkeypatch.setattr(Staged, "commit", held)
    options = (
        {"source": str(weight_file(4))} if call_of == "swap" else {"to": desired_store.read().history[1].weights_id}
    )
    done = change(server, call_of, **options)
    assert done.status == 200
    assert done.json["receipt"]["weights_id"] == desired_store.read().weights_id == model.weights_id
    assert tries == [model.weights_id] * 2
    assert status(server)["staged"] is None


def test_what_is_staged_is_not_desired_once_its_file_is_another(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """Every other process, and this one after a restart, reads the file."""
    change(server, "follow", desired_store=desired_store.where, interval=30)
    before = desired_store.read()
    assert change(server, "stage", source=str(weight_file(2))).status == 200
    other = weight_file(2).read_bytes()
    for spoil, kind in (
        (weight_file(2).unlink, "WeightFileError"),
        (lambda: weight_file(3).rename(weight_file(2)), "UnexpectedWeights"),
    ):
        spoil()
        refused = change(server, "commit")
        assert (refused.status, refused.json["kind"]) == (422, kind)
        assert (desired_store.read(), serves(server.service.served[0].model, 1)) == (before, True)
    weight_file(2).write_bytes(other)
    assert change(server, "commit").status == 200
    assert desired_store.read().weights_id == server.service.served[0].model.weights_id


def test_what_is_staged_before_the_process_has_read_what_is_desired_gives_way(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    """The operator had seen another's rollback; this process had not, and would keep the staged weights for an hour."""
    model = server.service.served[0].model
    desired_store.set(weight_file(2), revision=1, by="ana")
    change(server, "follow", desired_store=desired_store.where, interval=0.5)
    limit = time.monotonic() + 20
    while not serves(model, 2):
        assert time.monotonic() < limit
    desired_store.rollback(revision=2, by="bo")
    assert change(server, "stage", source=str(weight_file(3))).json["status"]["staged"]["ready"]
    while not serves(model, 1):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert status(server)["staged"] is None


def test_what_is_staged_stays_where_what_is_desired_cannot_be_served(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights
) -> None:
    bad = weight_file(4)
    desired_store.set(bad, revision=1, by="ana")
    bad.write_bytes(bad.read_bytes()[:-3])
    change(server, "follow", desired_store=desired_store.where, interval=0.02)
    limit = time.monotonic() + 20
    while not status(server)["following"]["error"]:
        assert time.monotonic() < limit
    assert change(server, "stage", source=str(weight_file(3))).json["status"]["staged"]["ready"]
    time.sleep(1.2)  # two polls after it
    assert change(server, "commit").status == 200
    assert serves(server.service.served[0].model, 3)


def test_of_two_that_end_what_is_staged_one_does(
    server: Server, desired_store: DesiredStore, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused commit writes nothing, and nothing is discarded between a write and its commit."""
    model = server.service.served[0].model
    change(server, "follow", desired_store=desired_store.where, interval=30)
    write = DesiredStore.set

    def slow_write(*args: Any, **options: Any) -> Any:
        state = write(*args, **options)
        time.sleep(0.1)
        return state

    monkeypatch.setattr(DesiredStore, "set", slow_write)
    with ThreadPoolExecutor(2) as pool:
        for number, other in enumerate(("commit", "discard")):
            change(server, "stage", source=str(weight_file(2 + number)))
            one = pool.submit(change, server, "commit")
            time.sleep(0.05)
            two = pool.submit(change, server, other)
            assert one.result(20).status == 200
            assert two.result(20).status == (409 if other == "commit" else 200)
            state = desired_store.read()
            assert (state.revision, state.weights.weights_id) == (2 + number, model.weights_id)
            assert serves(model, 2 + number)


def test_names_that_are_no_utf8_are_told(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    weight_file(2).rename(tmp_path / "watched" / os.fsdecode(b"\xff.safetensors"))
    change(server, "watch", directory=str(tmp_path / "watched"), interval=0.02)
    model, limit = server.service.served[0].model, time.monotonic() + 20
    while not serves(model, 2):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert status(server)["served"]["source"].endswith("/watched/\\udcff.safetensors")
    assert len(call(server, "/admin/models/tiny/history").json["receipts"]) == 2


def test_a_directory_is_watched(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    assert change(server, "watch", directory=str(tmp_path / "outbox"), interval=0.02).status == 200
    assert status(server)["watching"]["directory"] == str(tmp_path / "outbox")
    weight_file(2).rename(tmp_path / "outbox" / "v2.safetensors")
    limit = time.monotonic() + 20
    while not serves(server.service.served[0].model, 2):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert change(server, "unfollow").json["status"]["watching"] is None


def test_what_is_staged_for_too_long_is_given_up(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = load(tiny.path, weight_file(1))
    with administered({"tiny": model}, allow=(str(tmp_path),), staged_timeout=0.2) as server:
        assert change(server, "stage", source=str(weight_file(2))).status == 200
        limit = time.monotonic() + 20
        while status(server)["staged"]:
            assert time.monotonic() < limit
            time.sleep(0.02)
        model.swap(weight_file(3))  # nobody is kept waiting


def test_events_are_told_as_they_happen(server: Server, weight_file: WriteWeights) -> None:
    import http.client

    assert server.admin is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.admin.port, timeout=20)
    connection.request("GET", "/admin/events", headers=BEARER)
    stream = connection.getresponse()
    assert stream.getheader("content-type", "").startswith("text/event-stream")

    def until(kind: str) -> Any:
        while True:
            if stream.readline().decode().strip() == f"event: {kind}":
                return json.loads(stream.readline().decode().removeprefix("data: "))

    assert until("status")["models"][0]["served"]["generation"] == 0
    change(server, "swap", source=str(weight_file(2)))
    kinds = [until("event")["kind"] for _ in range(3)]
    assert kinds == ["staging", "staged", "committed"]
    assert until("status")["models"][0]["served"]["generation"] == 1
    connection.close()


def test_the_end_does_not_wait_for_who_listens(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    import http.client

    with administered({"tiny": load(tiny.path, weight_file(1))}) as server:
        assert server.admin is not None
        connection = http.client.HTTPConnection("127.0.0.1", server.admin.port, timeout=20)
        connection.request("GET", "/admin/events", headers=BEARER)
        connection.getresponse().readline()
        began = time.monotonic()
    assert time.monotonic() - began < 3
    connection.close()


def test_tritons_client_loads_and_unloads(server: Server, weight_file: WriteWeights) -> None:
    assert server.admin is not None
    model = server.service.served[0].model
    with triton.InferenceServerClient(f"127.0.0.1:{server.admin.port}") as client:
        assert client.get_model_repository_index(headers=BEARER)[0]["state"] == "READY"
        client.unload_model("tiny", headers=BEARER)
        assert client.get_model_repository_index(headers=BEARER)[0]["state"] == "UNAVAILABLE"
        refused = ask(server, INFER, as_json(x=X))
        assert (refused.status, "unloaded" in refused.error) == (503, True)
        client.load_model("tiny", headers=BEARER)
        assert ask(server, INFER, as_json(x=X)).status == 200
        client.load_model("tiny", headers=BEARER, config=json.dumps({"weights": str(weight_file(2))}))
        assert serves(model, 2)
        with pytest.raises(triton.InferenceServerException, match="no model is named"):
            client.load_model("other", headers=BEARER)
        with pytest.raises(triton.InferenceServerException, match="admin-allow"):
            client.load_model("tiny", headers=BEARER, config=json.dumps({"weights": "/etc/passwd"}))
        with pytest.raises(triton.InferenceServerException, match="token"):
            client.load_model("tiny")
