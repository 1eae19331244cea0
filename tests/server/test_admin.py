"""The admin plane: what operators do to a model, and what they are told."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import tritonclient.http as triton

from tests.support.administered import BEARER, Operator, operated
from tests.support.damage import damaged
from tests.support.served import INFER, X, as_json, ask
from tests.support.tiny import SLOW, TinyArtifact, WriteDelta, WriteWeights, serves
from tests.support.watched import eventually, somebody_swaps
from weightswap_runtime import DesiredStore, Model, Staged, WaitTimeout, load
from weightswap_server.admin.journal import JournalState


def refuses(operator: Operator, what: str, source: int | Path | None = None, **fields: Any) -> tuple[int, str]:
    """Ask for a change that is refused, and return the status and the error's class."""
    refused = operator.change(what, source, **fields)
    return refused.status, refused.json["kind"]


def test_weights_from_memory_have_no_way_back_once_others_were_served(operator: Operator, tiny: TinyArtifact) -> None:
    given = operator.model.swap(tiny.values(2), labels={"step": "7"}).weights_id
    assert operator.change("swap", 3).status == 200
    assert operator.change("rollback").json["receipt"]["weights_id"] == given  # it is still there
    for seed in (3, 4):
        assert operator.change("swap", seed).status == 200
    refused = operator.change("rollback", to=given)
    assert refused.status == 409
    assert "came from a delta, a part or memory, and cannot be read again" in refused.json["error"]
    receipts = operator.history["receipts"]
    assert [each["reloadable"] for each in receipts] == [True, False, True, False, True, True]
    assert receipts[1]["labels"] == {"step": "7"}


def test_a_swap_and_its_way_back(operator: Operator) -> None:
    first = operator.model.weights_id
    found = operator.change("swap", 2, why="better")
    assert found.status == 200
    receipt = found.json["receipt"]
    assert (receipt["generation"], receipt["by"], receipt["previous_weights_id"]) == (1, "token", first)
    assert operator.serves(2)
    assert ask(operator.server, INFER, as_json(x=X)).json["parameters"]["weights_id"] == receipt["weights_id"]
    now = found.json["status"]["served"]
    assert (now["weights_id"], now["generation"], now["by"]) == (receipt["weights_id"], 1, "token")

    assert operator.change("swap", 3).status == 200
    back = operator.change("rollback", to=first[:8])  # from its file
    assert (back.status, back.json["receipt"]["weights_id"]) == (200, first)
    assert operator.serves(1)
    assert operator.change("rollback").json["receipt"]["kind"] == "rollback"
    assert operator.serves(3)

    ended = [line for line in operator.audited() if line["outcome"] == "done"]
    assert [line["call"] for line in ended] == ["swap", "swap", "rollback", "rollback"]
    assert (ended[0]["weights_before"], ended[0]["weights_after"]) == (first, receipt["weights_id"])
    assert ended[0]["arguments"]["why"] == "better"
    assert ended[0]["peer"].startswith("127.0.0.1:")
    assert [each["generation"] for each in operator.history["receipts"]] == [0, 1, 2, 3, 4]


def test_what_is_staged_is_committed_or_discarded(operator: Operator) -> None:
    staged = operator.change("stage", 2).json["status"]["staged"]
    assert staged["ready"]
    assert staged["weights_id"] != operator.model.weights_id
    assert operator.serves(1)
    assert operator.change("stage", 3).status == 409
    assert operator.change("swap", 3).status == 409
    assert operator.change("discard").json["status"]["staged"] is None
    assert operator.change("commit").status == 409
    operator.change("stage", 2)
    assert operator.change("commit").json["receipt"]["weights_id"] == staged["weights_id"]
    assert operator.serves(2)
    assert operator.status["staged"] is None


@contextmanager
def broken_off(operator: Operator, what: str, source: int | None = None, **fields: Any) -> Iterator[Any]:
    """Yield the status during a change that stages slowly, and break it off after the block."""
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(refuses, operator, what, source, **fields)
        assert eventually(lambda: bool((now := operator.status)["staging"] and now["staged"]))
        now = operator.status
        assert now["staged"]["ready"] is False
        yield now
        assert operator.change("discard").status == 200
        assert changing.result(120) == (409, "StageCancelled")


def test_a_staging_can_be_looked_at_and_broken_off(operator: Operator) -> None:
    with broken_off(operator, "swap", 2, rate_limit=SLOW):
        assert operator.change("commit").status == 409  # it is a swap's
    assert operator.serves(1)


def test_what_is_refused_changes_nothing_and_is_remembered(operator: Operator) -> None:
    bad = operator.folder / "bad.safetensors"
    bad.write_bytes(operator.file(2).read_bytes()[:-3])
    nan, file_error = nan_file(operator), "WeightFileError"
    why = [(file_error, "truncated"), ("NonFiniteWeights", ""), (file_error, "unreadable")]
    for source, (kind, reason) in zip((bad, nan, operator.folder / "none"), why, strict=True):
        refused = operator.change("swap", source)
        assert (refused.status, refused.json["kind"], refused.json["reason"]) == (422, kind, reason)
    assert operator.serves(1)
    refusals = operator.history["refusals"]
    assert [(each["kind"], each["reason"]) for each in refusals] == why
    assert all(each["error"] for each in refusals)
    assert {each["by"] for each in refusals} == {"token"}
    assert [line["outcome"] for line in operator.audited()] == ["begun", "refused"] * 3
    assert operator.change("swap", nan, allow_nonfinite=["bias"]).status == 200


def nan_file(operator: Operator) -> Path:
    values = operator.tiny.values(2) | {"bias": torch.full((5,), torch.nan)}
    return operator.tiny.write(operator.folder / "nan.safetensors", values)


def test_where_a_desired_store_is_followed_changes_are_written_there(
    operator: Operator, desired_store: DesiredStore
) -> None:
    """Otherwise the next poll of this process, or another, would undo them."""
    model = operator.model
    assert operator.change("hold").status == 409
    operator.follow(desired_store, 0.02)
    assert operator.change("follow", desired_store=desired_store.where).status == 409
    swapped = operator.change("swap", 2, why="faster")
    assert swapped.status == 200
    state = desired_store.read()
    assert (state.revision, state.weights.by, state.weights.why) == (2, "token", "faster")
    assert state.weights.weights_id == swapped.json["receipt"]["weights_id"] == model.weights_id
    time.sleep(0.1)  # some looks
    assert (model.generation, operator.serves(2)) == (1, True)

    assert operator.change("rollback", why="slower").json["status"]["following"]["on_hold"]
    assert operator.serves(1)
    state = desired_store.read()
    assert (state.revision, state.hold.by) == (3, "token")
    assert [each.weights_id for each in state.withdrawn] == [swapped.json["receipt"]["weights_id"]]
    time.sleep(0.1)
    assert operator.serves(1)
    assert operator.change("release").status == 200
    assert desired_store.read().hold is None
    assert operator.change("hold", why="a feast").json["status"]["following"]["held_why"] == "a feast"
    assert len(operator.history["withdrawn"]) == 1

    assert refuses(operator, "swap", 3, revision=2) == (409, "RevisionConflict")
    assert operator.serves(1)
    assert operator.status["staged"] is None
    assert operator.change("unfollow").status == 200
    assert operator.status["following"] is None
    assert operator.change("unfollow").status == 409


@pytest.mark.usefixtures("_places")
def test_a_delta_is_desired_with_what_leads_to_its_base(
    operator: Operator, desired_store: DesiredStore, delta: WriteDelta
) -> None:
    operator.follow(desired_store)
    swapped = operator.change("swap", delta(1, 2), why="little changed")
    assert (swapped.status, swapped.json["receipt"]["kind"], operator.serves(2)) == (200, "delta", True)
    weights = desired_store.read().weights
    assert weights is not None
    assert weights.weights_id == operator.model.weights_id
    assert [each.source for each in weights.bases] == [str(operator.file(1))]
    other = load(operator.tiny.path)
    with other.follow(desired_store.where, 0.02) as follower:
        assert follower.wait(120)
    assert serves(other, 2)

    assert operator.change("stage", delta(2, 3)).status == 200
    desired_store.set(operator.file(4), revision=2, by="bo")
    assert refuses(operator, "commit", revision=3) == (422, "BaseMismatch")
    assert (operator.serves(2), desired_store.read().revision) == (True, 3)


def test_each_commit_keeps_its_own_reason(operator: Operator, desired_store: DesiredStore) -> None:
    """Even if the desired store has another reason for the same weights by now, as after a rollback to them."""
    operator.follow(desired_store, 0.02)
    desired_store.set(operator.file(2), revision=1, by="bo", why="better")
    assert eventually(lambda: operator.serves(2))
    operator.change("swap", 3, why="faster")
    operator.change("rollback", why="wrong")
    operator.change("rollback", to=desired_store.read().history[0].weights_id, why="worse")
    assert [each["why"] for each in operator.history["receipts"]] == ["", "better", "faster", "wrong", "worse"]
    assert operator.status["served"]["why"] == "worse"


def on_commit(monkeypatch: pytest.MonkeyPatch, before: Callable[[Staged], object]) -> None:
    """Call a function before each commit, which may raise instead."""
    commit = Staged.commit

    def committed(staged: Staged, **options: Any) -> Any:
        before(staged)
        return commit(staged, **options)

    monkeypatch.setattr(Staged, "commit", committed)


def test_a_reason_is_told_before_its_commit(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that replaces one which dies after a commit knows it; weights never committed have none."""
    assert operator.server.admin is not None
    journal, told, before = operator.server.admin.models["tiny"].journal, list[JournalState](), list[dict[int, str]]()
    journal.on_change = told.append

    def die(staged: Staged) -> None:
        before.append(dict(told[-1].whys))
        if len(before) == 2:
            raise WaitTimeout("a worker holds it")

    on_commit(monkeypatch, die)
    assert operator.change("swap", 2, why="faster").status == 200
    assert operator.change("swap", 3, why="better").status == 503
    assert [before, told[-1].whys] == [[{1: "faster"}, {1: "faster", 2: "better"}], {1: "faster"}]
    journal.inherit(JournalState(before[-1]))
    assert told[-1].whys == {1: "faster"}


def test_two_operators_do_not_overwrite_each_other(operator: Operator, desired_store: DesiredStore) -> None:
    """Weights staged before another operator's write are not committed over it, but discarded."""
    operator.follow(desired_store, 0.02)
    assert operator.change("stage", 2).json["status"]["staged"]["ready"]
    desired_store.set(operator.file(3), revision=1, by="bo")
    assert operator.change("commit").status == 409
    assert eventually(lambda: operator.serves(3) and operator.status["staged"] is None)


def test_a_rollback_answers_with_its_own_receipt(
    operator: Operator, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt is written after the weights are served."""
    operator.follow(desired_store, 0.02)
    operator.change("swap", 2)
    gate = operator.model._store.gate
    exchange = gate.exchange

    def slow_exchange(*arguments: Any) -> float:
        seconds = exchange(*arguments)
        time.sleep(0.2)
        return seconds

    monkeypatch.setattr(gate, "exchange", slow_exchange)
    receipt = operator.change("rollback").json["receipt"]
    assert (receipt["kind"], receipt["generation"]) == ("rollback", 2)


@pytest.fixture
def bad(operator: Operator, desired_store: DesiredStore) -> str:
    """Follow a desired store that desired weights with a NaN, which were refused, and then those of seed 4. Return
    their id."""
    state = desired_store.set(nan_file(operator), revision=1, why="never looked at")
    operator.follow(desired_store, 0.02)
    follower: Any = operator.model.watching[0]
    assert eventually(lambda: follower.last_error is not None)
    desired_store.set(operator.file(4), revision=2)
    assert follower.wait(20, revision=3)
    assert state.weights is not None
    return state.weights.weights_id


def test_a_rollback_leads_to_what_was_served(operator: Operator, desired_store: DesiredStore, bad: str) -> None:
    """It skips weights that were refused. If named, these are refused again, but withdrawn ones are not."""
    assert operator.change("rollback", to=bad[:12]).status == 422
    assert operator.change("rollback").status == 200
    assert operator.serves(1)
    assert desired_store.read().withdrawn[0].weights_id == bad
    assert operator.change("rollback", to=desired_store.read().withdrawn[1].weights_id).status == 200
    assert operator.serves(4)
    back = operator.change("rollback")
    assert (back.status, operator.serves(1)) == (200, True)
    assert back.json["receipt"]["weights_id"] == desired_store.read().weights.weights_id


@pytest.mark.usefixtures("bad")
def test_what_was_served_after_its_refusal_is_not_called_refused(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a clock was set back in between."""
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() - 3600)
    assert operator.change("swap", nan_file(operator), allow_nonfinite=True).status == 200
    assert operator.change("swap", 2).status == 200
    assert [bool(each["refused"]) for each in operator.history["desired"]] == [False] * 3


def test_a_rollback_to_what_is_refused_writes_nothing(
    operator: Operator, desired_store: DesiredStore, bad: str
) -> None:
    """Weights are verified before they are desired; what is refused, also in the history, is called that."""
    before = desired_store.read()
    assert [bool(each["refused"]) for each in operator.history["desired"]] == [False, True]
    for options in ({}, {"hold": False}, {"revision": 3}):
        refused = operator.change("rollback", to=bad, **options)
        assert (refused.status, refused.json["kind"]) == (422, "NonFiniteWeights")
        assert "bias: 5 NaN" in refused.json["error"]
        assert desired_store.read() == before
    assert operator.serves(4)
    found = operator.status
    assert (found["staged"], found["following"]["on_hold"], found["following"]["agrees"]) == (None, False, True)
    assert operator.model.generation == 1

    assert operator.change("rollback").status == 200  # which withdraws it
    withdrawn = [(each["weights_id"] == bad, "5 NaN" in each["refused"]) for each in operator.history["withdrawn"]]
    assert withdrawn == [(True, True), (False, False)]
    before = desired_store.read()
    assert refuses(operator, "rollback", to=bad) == (422, "NonFiniteWeights")
    assert desired_store.read() == before
    assert operator.serves(1)


def damaged_goldens(file: Path) -> None:
    file.with_name(f"{file.stem}.goldens.safetensors").write_bytes(b"no goldens at all")


@pytest.mark.parametrize(("spoil", "kind"), [(damaged, "DigestMismatch"), (damaged_goldens, "WeightFileError")])
def test_a_rollback_verifies_what_is_no_longer_in_memory(
    spoil: Callable[[Path], None], kind: str, operator: Operator, desired_store: DesiredStore
) -> None:
    """Every byte and all goldens, as the follower does, though the process has served these weights before."""
    operator.follow(desired_store)
    for seed in (2, 3):
        assert operator.change("swap", seed).status == 200
    first, before, file = operator.model.history[0].weights_id, desired_store.read(), operator.file(1)
    kept = file.read_bytes()
    spoil(file)
    assert refuses(operator, "rollback", to=first) == (422, kind)
    assert desired_store.read() == before
    assert operator.serves(3)
    assert [bool(each["refused"]) for each in operator.history["desired"]] == [True, False]

    file.with_name("v1.goldens.safetensors").unlink(missing_ok=True)
    file.write_bytes(kept)
    receipt = operator.change("rollback", to=first, why="mended").json["receipt"]
    assert (receipt["kind"], receipt["by"], receipt["weights_id"]) == ("full", "token", first)
    assert operator.serves(1)
    state = desired_store.read()
    assert (state.revision, state.weights.why, state.hold.why) == (before.revision + 1, "mended", "mended")
    assert operator.history["receipts"][-1]["why"] == "mended"
    assert not any(each["refused"] for each in operator.history["desired"])


def test_a_rollback_has_the_options_of_the_follower(operator: Operator, desired_store: DesiredStore) -> None:
    for revision, file in enumerate((nan_file(operator), operator.file(3)), start=1):
        desired_store.set(file, revision=revision)
    with operator.model.follow(desired_store, 30, allow_nonfinite="bias") as follower:
        assert follower.wait(120)
        bad = desired_store.read().history[-1].weights_id
        back = operator.change("rollback", to=bad)
        assert (back.status, back.json["receipt"]["weights_id"], operator.model.weights_id) == (200, bad, bad)
        assert operator.change("rollback", to=desired_store.read().history[0].weights_id).status == 200
        assert operator.serves(1)


@pytest.mark.usefixtures("_places")
def test_a_rollback_to_a_delta_reads_what_leads_to_its_base(
    operator: Operator, desired_store: DesiredStore, delta: WriteDelta
) -> None:
    operator.follow(desired_store)
    for source in (delta(1, 2), 3, 4):
        assert operator.change("swap", source).status == 200
    changed = desired_store.read().history[1].weights_id
    damaged(operator.file(1))
    before = desired_store.read()
    assert refuses(operator, "rollback", to=changed) == (422, "DigestMismatch")
    assert (desired_store.read(), operator.serves(4)) == (before, True)
    operator.file(1)  # which writes it again
    assert operator.change("rollback", to=changed).status == 200
    assert operator.serves(2)


def stagings(model: Model) -> SimpleQueue[str]:
    """Return a queue of the sources of all later stagings."""
    begun = SimpleQueue[str]()
    model.listen(lambda event: begun.put(event.source) if event.kind == "staging" else None)
    return begun


def test_a_rollback_does_not_wait_for_what_a_follower_stages(operator: Operator, desired_store: DesiredStore) -> None:
    """It cancels that staging, which would take hours; if the rollback is refused, the follower begins it again."""
    begun, third = stagings(operator.model), str(operator.file(3))
    other = operator.tiny.write(operator.folder / "other.safetensors", operator.tiny.values(2), graph_id="0" * 64)
    desired_store.set(other, revision=1, allow_other_graph=True)
    desired_store.set(third, revision=2, allow_other_graph=True)
    with operator.model.follow(desired_store, 30, rate_limit=SLOW):
        assert begun.get(timeout=120) == third
        before = desired_store.read()
        assert refuses(operator, "rollback", to=before.history[1].weights_id) == (422, "GraphMismatch")
        assert desired_store.read() == before
        assert [begun.get(timeout=120) for _ in range(2)] == [str(other), third]
        assert operator.change("rollback", to=before.history[0].weights_id).status == 200  # it is still served
        assert (operator.serves(1), desired_store.read().hold is not None) == (True, True)


def test_a_rollback_does_not_wait_for_what_a_watcher_stages(operator: Operator) -> None:
    operator.model.swap(operator.file(2))
    begun, new = stagings(operator.model), operator.folder / "new" / "v3.safetensors"
    new.parent.mkdir()
    operator.file(3).rename(new)
    with operator.model.watch(new.parent, 30, rate_limit=SLOW):
        assert begun.get(timeout=120) == str(new)
        assert operator.change("rollback", to=operator.model.history[0].weights_id).status == 200
        assert operator.serves(1)


@pytest.mark.parametrize("how", ["commit", "canary"])
def test_what_is_staged_goes_before_weights_that_came_later(operator: Operator, how: str) -> None:
    """Who brings these has the turn, and waits until nothing is staged any more."""
    outbox = operator.folder / "outbox"
    outbox.mkdir()
    with operator.model.watch(outbox, 0.02):
        assert operator.change("stage", 2).status == 200
        operator.file(3).rename(outbox / "v3.safetensors")
        assert eventually(lambda: somebody_swaps(operator.model))
        if how == "commit":
            assert operator.change("commit").status == 200
        else:
            assert operator.change("canary", share=0.5, promote_if="requests >= 0").status == 200
        assert eventually(lambda: operator.serves(3))
    assert [receipt.by for receipt in operator.model.history] == ["", "token", "watch"]


def test_a_rollback_gives_way_to_another_writer(
    operator: Operator, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has written while the weights were verified: nothing is served that the desired store does not say."""
    operator.follow(desired_store)
    for seed in (2, 3):
        assert operator.change("swap", seed).status == 200
    first, wait = desired_store.read().history[0].weights_id, Staged.wait
    assert refuses(operator, "rollback", to=first, revision=2) == (409, "RevisionConflict")

    def overtaken(staged: Staged, timeout: float | None = None) -> Staged:
        found = wait(staged, timeout)
        if desired_store.read().revision == 3:
            desired_store.hold(revision=3, by="bo")
        return found

    monkeypatch.setattr(Staged, "wait", overtaken)
    assert refuses(operator, "rollback", to=first) == (409, "RevisionConflict")
    state = desired_store.read()
    assert (state.revision, state.hold.by, state.weights_id) == (4, "bo", operator.model.weights_id)
    assert (operator.serves(3), operator.status["staged"]) == (True, None)


def test_a_rollback_that_is_broken_off_writes_nothing(
    tiny: TinyArtifact, desired_store: DesiredStore, weight_file: WriteWeights, tmp_path: Path
) -> None:
    before, model = desired_store.set(weight_file(2), revision=1), load(tiny.path, weight_file(2))
    with operated(model, tiny, tmp_path) as operator, model.follow(desired_store, 30, rate_limit=SLOW):
        with broken_off(operator, "rollback") as now:
            assert now["staged"]["source"] == str(weight_file(1))
        assert (desired_store.read(), operator.serves(2)) == (before, True)


@pytest.mark.parametrize("call_of", ["swap", "rollback"])
def test_what_was_written_is_committed_as_soon_as_it_can_be(
    call_of: str, operator: Operator, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit for which memory is not free at first is the follower's: the desired store says so already."""
    model, tries = operator.model, list[str]()
    for revision, seed in enumerate((2, 3), start=1):
        desired_store.set(operator.file(seed), revision=revision)
    operator.follow(desired_store)
    assert model.watching[0].wait(120)  # type: ignore[attr-defined]

    def held(staged: Staged) -> None:
        tries.append(staged.weights_id)
        if len(tries) == 1:
            raise WaitTimeout("a worker holds it")

    on_commit(monkeypatch, held)
    back = {"to": desired_store.read().history[1].weights_id}
    done = operator.change("swap", 4) if call_of == "swap" else operator.change("rollback", **back)
    assert done.status == 200
    assert done.json["receipt"]["weights_id"] == desired_store.read().weights_id == model.weights_id
    assert tries == [model.weights_id] * 2
    assert operator.status["staged"] is None


def test_what_is_staged_is_not_desired_once_its_file_is_another(
    operator: Operator, desired_store: DesiredStore
) -> None:
    """Every other process, and this one after a restart, reads the file."""
    operator.follow(desired_store)
    before, file = desired_store.read(), operator.file(2)
    assert operator.change("stage", file).status == 200
    kept = file.read_bytes()
    for spoil, kind in ((file.unlink, "WeightFileError"), (lambda: operator.file(3).rename(file), "UnexpectedWeights")):
        spoil()
        assert refuses(operator, "commit") == (422, kind)
        assert (desired_store.read(), operator.serves(1)) == (before, True)
    file.write_bytes(kept)
    assert operator.change("commit").status == 200
    assert desired_store.read().weights_id == operator.model.weights_id


def test_what_is_staged_before_the_process_has_read_what_is_desired_gives_way(
    operator: Operator, desired_store: DesiredStore
) -> None:
    """The operator had seen another's rollback; this process had not, and would keep the staged weights for an hour."""
    desired_store.set(operator.file(2), revision=1, by="ana")
    operator.follow(desired_store, 0.5)
    assert eventually(lambda: operator.serves(2))
    desired_store.rollback(revision=2, by="bo")
    assert operator.change("stage", 3).json["status"]["staged"]["ready"]
    assert eventually(lambda: operator.serves(1) and operator.status["staged"] is None)


def test_what_is_staged_stays_where_what_is_desired_cannot_be_served(
    operator: Operator, desired_store: DesiredStore
) -> None:
    bad = operator.file(4)
    desired_store.set(bad, revision=1, by="ana")
    bad.write_bytes(bad.read_bytes()[:-3])
    operator.follow(desired_store, 0.02)
    assert eventually(lambda: bool(operator.status["following"]["error"]))
    assert operator.change("stage", 3).json["status"]["staged"]["ready"]
    time.sleep(0.3)  # some polls after it
    assert operator.change("commit").status == 200
    assert operator.serves(3)


def test_of_two_that_end_what_is_staged_one_does(
    operator: Operator, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused commit writes nothing, and nothing is discarded between a write and its commit."""
    operator.follow(desired_store)
    write = DesiredStore.set

    def slow_write(*args: Any, **options: Any) -> Any:
        state = write(*args, **options)
        time.sleep(0.1)
        return state

    monkeypatch.setattr(DesiredStore, "set", slow_write)
    with ThreadPoolExecutor(2) as pool:
        for number, (other, code) in enumerate({"commit": 409, "discard": 200}.items()):
            operator.change("stage", 2 + number)
            one = pool.submit(operator.change, "commit")
            time.sleep(0.05)
            two = pool.submit(operator.change, other)
            assert (one.result(120).status, two.result(120).status) == (200, code)
            state = desired_store.read()
            assert (state.revision, state.weights.weights_id) == (2 + number, operator.model.weights_id)
            assert operator.serves(2 + number)


@pytest.mark.parametrize("name", [b"v2.safetensors", b"\xff.safetensors"])
def test_a_directory_is_watched(operator: Operator, name: bytes) -> None:
    """Also for names that are no UTF-8, which JSON cannot say."""
    outbox = operator.folder / "outbox"
    outbox.mkdir()
    assert operator.change("watch", directory=str(outbox), interval=0.02).status == 200
    assert operator.status["watching"]["directory"] == str(outbox)
    operator.file(2).rename(outbox / os.fsdecode(name))
    assert eventually(lambda: len(operator.history["receipts"]) == 2)
    assert operator.serves(2)
    told = os.fsdecode(name).encode("ascii", "backslashreplace").decode()
    assert operator.status["served"]["source"].endswith(f"/outbox/{told}")
    assert operator.change("unfollow").json["status"]["watching"] is None


def test_what_is_staged_for_too_long_is_given_up(model: Model, tiny: TinyArtifact, tmp_path: Path) -> None:
    with operated(model, tiny, tmp_path, staged_timeout=0.2) as operator:
        assert operator.change("stage", 2).status == 200
        assert eventually(lambda: not operator.status["staged"])
        model.swap(operator.file(3))  # nobody is kept waiting


@contextmanager
def events(operator: Operator) -> Iterator[http.client.HTTPResponse]:
    assert operator.server.admin is not None
    connection = http.client.HTTPConnection("127.0.0.1", operator.server.admin.port, timeout=120)
    connection.request("GET", "/admin/events", headers=BEARER)
    yield connection.getresponse()
    connection.close()


def test_events_are_told_as_they_happen(operator: Operator) -> None:
    with events(operator) as stream:
        assert stream.getheader("content-type", "").startswith("text/event-stream")

        def until(kind: str) -> Any:
            while stream.readline().decode().strip() != f"event: {kind}":
                pass
            return json.loads(stream.readline().decode().removeprefix("data: "))

        assert until("status")["models"][0]["served"]["generation"] == 0
        operator.change("swap", 2)
        assert [until("event")["kind"] for _ in range(3)] == ["staging", "staged", "committed"]
        assert until("status")["models"][0]["served"]["generation"] == 1


def test_the_end_does_not_wait_for_who_listens(model: Model, tiny: TinyArtifact, tmp_path: Path) -> None:
    with operated(model, tiny, tmp_path) as operator:
        listening = events(operator)
        listening.__enter__().readline()
        began = time.monotonic()
    assert time.monotonic() - began < 3
    listening.__exit__(None, None, None)


def test_tritons_client_loads_and_unloads(operator: Operator) -> None:
    with triton.InferenceServerClient(operator.where.removeprefix("http://")) as client:

        def load_weights(source: object, name: str = "tiny") -> None:
            client.load_model(name, headers=BEARER, config=json.dumps({"weights": str(source)}))

        assert client.get_model_repository_index(headers=BEARER)[0]["state"] == "READY"
        client.unload_model("tiny", headers=BEARER)
        assert client.get_model_repository_index(headers=BEARER)[0]["state"] == "UNAVAILABLE"
        refused = ask(operator.server, INFER, as_json(x=X))
        assert (refused.status, "unloaded" in refused.error) == (503, True)
        client.load_model("tiny", headers=BEARER)
        assert ask(operator.server, INFER, as_json(x=X)).status == 200
        load_weights(operator.file(2))
        assert operator.serves(2)
        for name, source, code in (("other", operator.file(3), "404"), ("tiny", "/etc/passwd", "403")):
            with pytest.raises(triton.InferenceServerException) as caught:
                load_weights(source, name)
            assert caught.value.status() == code
        with pytest.raises(triton.InferenceServerException) as caught:
            client.load_model("tiny")
        assert caught.value.status() == "401"
