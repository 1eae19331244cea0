"""A canary answers its share and nobody else's; what is measured of it is right; rules promote and abort it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tritonclient.grpc
from hypothesis import given
from hypothesis import strategies as st

from tests.support.administered import Operator, operated
from tests.support.commands import run
from tests.support.served import INFER, X, as_json, ask, await_queued, before_calls, expected, occupied
from tests.support.storm import storm
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights
from tests.support.watched import eventually
from weightswap_runtime import (
    DesiredStore,
    InputMismatch,
    Model,
    StageClosed,
    Staged,
    StagingBusy,
    UnknownName,
    Unsupported,
    load,
)
from weightswap_runtime.tensors import array_content
from weightswap_server import ServedMethod
from weightswap_server.admin.app import CHANGES
from weightswap_server.admin.documents import CanaryRequest, CommitRequest, StageRequest
from weightswap_server.admin.operations import ModelOperations
from weightswap_server.canary import (
    CanaryAnalysis,
    CanaryPlan,
    Measured,
    Rule,
    Side,
    check_plan,
    compare,
    failures,
)


@pytest.fixture
def operator(model: Model, tiny: TinyArtifact, tmp_path: Path) -> Iterator[Operator]:
    """An operator of a server that batches requests."""
    batched = {"max_batch": 8, "max_delay": 0.002, "grpc_port": 0}
    with operated(model, tiny, tmp_path, serving=batched) as found:
        yield found


def begin(operator: Operator, source: int | Path, **fields: Any) -> str:
    begun = operator.change("canary", source, **fields)
    assert begun.status == 200, begun.body
    return str(begun.json["canary"])


def values(operator: Operator) -> dict[str, Any]:
    return dict(operator.status["canary"]["values"])


def answer(operator: Operator, x: np.ndarray[Any, Any] = X, routing: str | None = None) -> str:
    """Return the id of the weights that have answered."""
    found = ask(operator.server, INFER, as_json(x=x), {} if routing is None else {"X-Weightswap-Canary": routing})
    assert found.status == 200, found.body
    return str(found.json["parameters"]["weights_id"])


def metrics(operator: Operator) -> str:
    return ask(operator.server, "/metrics").body.decode()


def test_each_answer_is_from_the_weights_that_it_names(operator: Operator, delta: WriteDelta) -> None:
    """Under load, batched, while a canary starts, grows, and is promoted: never a mixture."""
    seeds, asked = {str(operator.model.weights_id): 1}, count()

    def client(number: int) -> str:
        x = np.full((1 + number % 3, 3), next(asked) % 50, np.float32)
        said = ask(operator.server, INFER, as_json(x=x)).json
        data = np.asarray(said["outputs"][0]["data"], np.float32).reshape(x.shape[0], 5)
        weights_id = str(said["parameters"]["weights_id"])
        np.testing.assert_allclose(data, expected(seeds[weights_id], x), rtol=1e-5, atol=1e-4)
        return weights_id

    with storm(client, 4) as seen:
        for source, seed, end in ((delta(1, 2), 2, "commit"), (operator.file(3), 3, "discard")):
            staged = operator.change("stage", source).json["status"]["staged"]
            seeds[staged["weights_id"]] = seed
            for plan in ({"share": 0.25, "shadow": True}, {"share": 0.75}):
                assert operator.change("canary", **plan).status == 200
                assert eventually(lambda: values(operator)["requests"] >= 25)
            assert operator.change(end).status == 200
    assert {*chain(*seen)} == set(seeds)
    assert operator.serves(2)


def test_the_share_is_kept_and_wishes_are_met(operator: Operator) -> None:
    served = operator.model.weights_id
    canary = begin(operator, 2, share=0.2)
    assert Counter(answer(operator) for _ in range(40)) == {served: 32, canary: 8}
    wished = ask(operator.server, INFER, as_json(x=X), {"X-Weightswap-Canary": "1"}).json
    assert (wished["model_version"], wished["parameters"]) == ("canary", {"generation": None, "weights_id": canary})
    assert {answer(operator, routing="0") for _ in range(9)} == {served}
    asked = ask(operator.server, "/v2/models/tiny/versions/0/infer", as_json(x=X), {"X-Weightswap-Canary": "1"})
    assert asked.json["parameters"]["weights_id"] == served

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{operator.server.grpc_port}") as client:
        tensor = tritonclient.grpc.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)
        found = client.infer("tiny", [tensor], headers={"x-weightswap-canary": "1"})
        assert found.get_response().parameters["weights_id"].string_param == canary
        np.testing.assert_array_equal(found.as_numpy("output"), expected(2))
    counted = metrics(operator)
    assert f'weightswap_server_requests_total{{model="tiny",status="200",weights_id="{canary}"}} 10.0' in counted

    assert operator.change("discard").json["status"]["canary"] is None
    assert answer(operator, routing="1") == served


def test_a_batch_is_never_of_both(operator: Operator) -> None:
    canary = begin(operator, 2)
    with ThreadPoolExecutor(8) as pool:
        with occupied(operator.server):
            asked = [pool.submit(answer, operator, X[:1], str(number % 2)) for number in range(8)]
            await_queued(operator.server, 8)
        found = Counter(each.result(120) for each in asked)
    assert found[canary] == 4
    counted = metrics(operator)
    assert f'weightswap_server_batch_calls_bucket{{le="4.0",model="tiny",weights_id="{canary}"}} 4.0' in counted
    assert f'weightswap_server_batch_calls_bucket{{le="2.0",model="tiny",weights_id="{canary}"}} 0.0' in counted


def test_a_shadow_is_compared_and_answers_nobody(
    operator: Operator, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    served = operator.model.weights_id
    begin(operator, 2, shadow=True)
    assert {answer(operator) for _ in range(5)} == {served}
    assert eventually(lambda: values(operator)["compared"] + operator.status["canary"]["skipped"] >= 5)
    found = values(operator)
    one, other = (expected(seed).astype(np.float64) for seed in (1, 2))
    assert found["max_abs"] == pytest.approx(np.abs(one - other).max())
    assert found["max_rel"] == pytest.approx(np.abs(one - other).max() / np.abs(one).max())
    assert (found["differing"], found["errors"]) == (1.0, 0.0)
    operator.change("discard")
    alike = tiny.values(1) | {"steps": torch.tensor(9)}  # which no answer depends on
    begin(operator, tiny.write(tmp_path / "alike.safetensors", alike), shadow=True)
    answer(operator)
    assert eventually(lambda: values(operator)["compared"] == 1)
    found = values(operator)
    assert (found["differing"], found["max_abs"]) == (0.0, 0.0)


def before_calls_of_canaries(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    before_calls(monkeypatch, lambda _, session, __: do() if isinstance(session, Staged) else None)


def test_a_shadow_that_is_slow_keeps_nobody_waiting(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    before_calls_of_canaries(monkeypatch, lambda: (called.append(1), time.sleep(0.3)))
    begin(operator, 2, shadow=True)
    began = time.monotonic()
    for _ in range(20):
        answer(operator)
    assert time.monotonic() - began < 2
    assert operator.status["canary"]["skipped"] >= 10  # not kept for later without an end
    assert len(called) < 10
    operator.change("discard")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("broken weights"), InputMismatch("tiny", ["x: an id that these weights compute is in no table"])],
    ids=["any", "of values"],
)
def test_a_canary_that_fails_is_nobodys_error_and_is_aborted(
    error: Exception, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_calls_of_canaries(monkeypatch, Mock(side_effect=error))
    served = operator.model.weights_id
    canary = begin(operator, 2, share=0.5)
    assert {answer(operator) for _ in range(6)} == {served}
    assert eventually(lambda: operator.status["canary"] is None)
    assert operator.status["staged"] is None
    refusal = operator.history["refusals"][0]
    assert (refusal["event"], "errors 100 %" in refusal["error"]) == ("canary aborted", True)
    assert f'weightswap_server_canary_errors_total{{model="tiny",weights_id="{canary}"}}' in metrics(operator)
    ended = [(each["call"], each["outcome"]) for each in operator.audited()]
    assert ended[-2:] == [("abort by rule", "begun"), ("abort by rule", "done")]


def test_a_canary_with_nan_is_aborted(operator: Operator, tiny: TinyArtifact, tmp_path: Path) -> None:
    bias = torch.tensor([torch.nan, 1.0, 2.0, 3.0, 4.0])
    nan = tiny.write(tmp_path / "nan.safetensors", tiny.values(2) | {"bias": bias})
    assert operator.change("canary", nan, shadow=True).status == 422
    begin(operator, nan, shadow=True, allow_nonfinite=True)
    answer(operator)
    assert eventually(lambda: operator.status["canary"] is None)
    assert operator.serves(1)


def test_nan_of_a_canary_in_json_is_nobodys_error(operator: Operator, tiny: TinyArtifact, tmp_path: Path) -> None:
    nan = tiny.write(tmp_path / "nan.safetensors", tiny.values(2) | {"bias": torch.full((5,), torch.nan)})
    begin(operator, nan, share=1.0, allow_nonfinite=True, abort_if="")
    assert answer(operator) == operator.model.weights_id
    found = values(operator)
    assert (found["errors"], found["nonfinite"], found["served_errors"]) == (1.0, 1.0, 0.0)
    as_bytes = {**as_json(x=X), "parameters": {"binary_data_output": True}}
    assert ask(operator.server, INFER, as_bytes).status == 200
    assert eventually(lambda: values(operator)["requests"] == 2)
    assert values(operator)["errors"] == 0.5


def test_of_a_batch_only_the_answer_that_json_cannot_represent_is_an_error(
    operator: Operator, tiny: TinyArtifact, tmp_path: Path
) -> None:
    large = tiny.write(tmp_path / "large.safetensors", tiny.values(2) | {"weight": torch.full((3, 5), 1e20)})
    begin(operator, large, share=1.0, abort_if="")
    with ThreadPoolExecutor(2) as clients:
        with occupied(operator.server):
            asked = [clients.submit(ask, operator.server, INFER, as_json(x=x)) for x in (X, np.full_like(X, 1e20))]
            await_queued(operator.server, 2)
        assert [each.result().status for each in asked] == [200, 200]
    assert eventually(lambda: (found := values(operator))["requests"] == 2 and found["nonfinite"] == 0.5)
    assert values(operator)["errors"] == 0.5


def test_nan_of_both_in_json_is_the_requests_fault(operator: Operator, tiny: TinyArtifact) -> None:
    begin(operator, 2, share=1.0, abort_if="")
    assert ask(operator.server, INFER, as_json(x=np.full_like(X, 3e38))).status == 400
    assert values(operator)["requests"] == 0


def test_requests_that_no_weights_answer_are_not_the_canarys_fault(operator: Operator) -> None:
    begin(operator, 2, share=1.0)
    for _ in range(5):
        found = ask(operator.server, INFER, {**as_json(x=X), "parameters": {"variant": "lora=none"}})
        assert found.status in (400, 404), found.body
    assert values(operator)["requests"] == 0
    answer(operator)
    assert eventually(lambda: values(operator)["requests"] == 1)
    assert values(operator)["errors"] == 0


def test_a_variant_that_is_removed_before_the_comparison_is_not_compared(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_calls_of_canaries(monkeypatch, Mock(side_effect=UnknownName("removed")))
    begin(operator, 2, shadow=True)
    answer(operator)
    assert eventually(lambda: operator.status["canary"]["skipped"] == 1)
    assert values(operator)["errors"] is None


def test_what_the_requests_break_is_not_the_canarys_fault(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedMethod, "call", lambda *_: 1 / 0)
    begin(operator, 2, share=0.5)
    assert [ask(operator.server, INFER, as_json(x=X)).status for _ in range(10)] == [500] * 10
    found = values(operator)
    assert (found["errors"], found["served_errors"]) == (1.0, 1.0)
    time.sleep(0.2)  # some looks
    assert operator.status["canary"] is not None


def test_a_rule_promotes_and_has_it_desired(operator: Operator, desired_store: DesiredStore) -> None:
    operator.follow(desired_store, 0.05)
    rule = "requests >= 5 and errors < 0.001 and p99_ratio < 1e6 for 0.6 s"
    canary = begin(operator, 2, share=0.5, promote_if=rule, why="better tags")
    for _ in range(20):
        answer(operator)
    assert eventually(lambda: operator.status["canary"] is None)
    assert (operator.model.weights_id, operator.serves(2)) == (canary, True)
    state = desired_store.read()
    assert state.weights is not None
    assert (state.weights.weights_id, state.weights.by) == (canary, "token")
    assert state.weights.why.startswith("better tags (canary: requests >= 5")
    assert operator.status["served"]["why"] == state.weights.why


def test_what_was_staged_for_one_desired_store_is_not_written_to_another(
    operator: Operator, desired_store: DesiredStore, weight_file: WriteWeights, tmp_path: Path
) -> None:
    """Both are at one revision, but whoever has staged it has seen only the first."""
    (tmp_path / "other").mkdir()
    other = DesiredStore(tmp_path / "other")
    other.set(weight_file(1), revision=0, by="bo")
    operator.follow(desired_store, 0.05)
    begin(operator, 2, share=0.5)
    assert operator.change("unfollow").status == 200
    operator.follow(other, 0.05)
    refused = operator.change("commit")
    assert (refused.status, other.read().revision) == (409, 1)
    assert f"staged while {desired_store.where} was followed" in refused.json["error"]


@pytest.mark.parametrize("before", [True, False])
def test_a_rule_promotes_only_where_its_canary_began(
    operator: Operator, desired_store: DesiredStore, before: bool
) -> None:
    """Others may follow a desired store that this server follows only now; and one that it left is not written."""
    if before:
        operator.follow(desired_store, 0.05)
    begin(operator, 2, share=0.5, promote_if="served_requests >= 1")
    if before:
        assert operator.change("unfollow").status == 200
    else:
        operator.follow(desired_store, 0.05)
    for _ in range(4):
        answer(operator)
    assert eventually(lambda: operator.status["canary"] is None)
    assert operator.serves(1)
    assert desired_store.read().revision == 1


def test_the_reason_of_a_canary_of_what_is_staged_is_kept(operator: Operator) -> None:
    operator.change("stage", 2, why="staged")
    operator.change("canary", share=0.5)
    assert operator.status["staged"]["why"] == "staged"
    operator.change("canary", share=0.5, promote_if="requests >= 0", why="let it decide")
    assert eventually(lambda: operator.status["canary"] is None)
    assert operator.status["served"]["why"] == "let it decide (canary: requests >= 0)"


@pytest.mark.parametrize("rule", ["promote_if", "abort_if"])
def test_a_rule_decides_nothing_while_an_operator_commits(
    operator: Operator, desired_store: DesiredStore, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.follow(desired_store)
    begin(operator, 2, **{rule: "served_requests >= 1"})
    assert operator.server.admin is not None
    operations, write = operator.server.admin.models["tiny"], DesiredStore.set

    def late(self: DesiredStore, *arguments: Any, **options: Any) -> Any:
        answer(operator)
        assert operations.served.canary is not None
        assert operations.served.canary.verdict() == (rule.removesuffix("_if"), "served_requests >= 1")
        assert operations.verdict() is None
        with pytest.raises((StageClosed, StagingBusy)):
            operations.act_on(rule.removesuffix("_if"), "served_requests >= 1")
        return write(self, *arguments, **options)

    monkeypatch.setattr(DesiredStore, "set", late)
    assert operator.change("commit", why="it is better").status == 200
    assert (operator.serves(2), operator.status["served"]["why"]) == (True, "it is better")
    assert operator.history["refusals"] == []


def test_a_verdict_is_about_the_canary_that_it_was_told_of(operator: Operator) -> None:
    """If an operator replaces the canary before a verdict is obeyed, the new one is promoted by its own rule alone."""
    assert operator.server.admin is not None
    operations, rule = operator.server.admin.models["tiny"], "requests >= 5"
    begin(operator, 2, share=1, promote_if="requests >= 1000")
    with pytest.raises(StageClosed):
        operations.act_on("promote", rule)
    assert operator.status["canary"]["promote_if"] == "requests >= 1000"
    assert operator.serves(1)


def test_a_canary_gives_way_to_what_others_desire(operator: Operator, desired_store: DesiredStore) -> None:
    operator.follow(desired_store, 0.05)
    begin(operator, 2, share=0.5, promote_if="requests >= 1000")
    desired_store.set(operator.file(3), revision=1, by="bo")
    assert eventually(lambda: operator.serves(3) and operator.status["canary"] is None)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, 409),
        ({"share": 1.5}, 400),
        ({"promote_if": "errors <"}, 400),
        ({"promote_if": "__import__('os')"}, 400),
        ({"promote_if": "errors.real < 1"}, 400),
        ({"promote_if": "speed > 1"}, 400),
        ({"abort_if": "errors > 1e999"}, 400),
        ({"abort_if": "(" * 900}, 400),
    ],
)
@pytest.mark.sampled(3)
def test_canaries_that_cannot_be_meant(operator: Operator, fields: Any, code: int) -> None:
    refused = operator.change("canary", **fields)
    assert (refused.status, bool(refused.json["error"])) == (code, True)


def test_what_is_served_is_no_canary_of_itself(operator: Operator) -> None:
    refused = operator.change("canary", 1, share=0.1, shadow=True)
    assert (refused.status, "a canary needs others" in refused.json["error"]) == (400, True)
    assert operator.status["staged"] is None
    assert operator.change("stage", 1).status == 200
    assert operator.change("canary", share=0.1).status == 400
    assert (operator.status["canary"], operator.change("discard").status) == (None, 200)


@pytest.mark.parametrize(
    ("weights", "says", "options"), [(1, "double", {"residency": "single"}), (None, "serves nothing", {})]
)
def test_where_what_is_staged_cannot_be_called(
    weights: int | None, says: str, options: Any, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(weights) if weights else None, **options)
    with operated(model, tiny, tmp_path, warm=False) as operator:
        refused = operator.change("canary", 2, share=0.1)
        assert (refused.status, says in refused.json["error"]) == (400, True)
        assert operator.status["staged"] is None


def test_a_share_in_per_cent_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    assert "--share" in run("canary", "http://127.0.0.1:9", "--share", 20, tmp_path / "missing", status=2).stderr


def test_the_command(operator: Operator) -> None:
    def canary(*arguments: object, status: int = 0) -> Any:
        return run("canary", operator.where, *arguments, status=status)

    shown = canary(operator.file(2), "--point", "--share", "0.5", "--shadow")
    assert ", 50 % and shadow\n" in shown.stdout
    answer(operator)
    answer(operator)  # by the canary
    table = re.sub(" +", " ", canary().stdout)
    assert re.search(r"errors │? ?0 %", table), table
    assert re.search(r"p50 │? ?[\d.]+ (ms|µs)", table), table
    canary("--promote-if", "requests >= 0", status=2)  # of no canary
    assert "not promoted: it was discarded" in canary("--wait", "--abort", status=1).stderr
    for end in ("--abort", "--promote"):
        assert f"no canary to {end[2:]}" in canary(end, status=2).stderr
    ends = ("--share", "0.5", "--abort-if", "requests >= 0", "--wait")
    assert "not promoted: requests >= 0: requests 0" in canary(operator.file(2), "--point", *ends, status=1).stderr
    done = canary(operator.file(2), "--point", "--promote-if", "requests >= 0", "--wait", "--json")
    assert json.loads(done.stdout)["served"]["generation"] == 1
    canary(operator.file(3), "--point")
    assert "why         it is better\n" in canary("--promote", "--wait", "--why", "it is better").stdout
    assert operator.serves(3)


def test_the_command_promotes_nothing_but_a_canary(operator: Operator) -> None:
    operator.change("stage", 2)
    for end in ("--promote", "--abort"):
        run("canary", operator.where, end, status=2)
    assert operator.status["staged"]["ready"]
    assert operator.serves(1)


def test_the_command_promotes_what_the_desired_store_then_desires(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(operator, 2)
    monkeypatch.setitem(CHANGES, "commit", (CommitRequest, lambda *_: None))  # it is not served yet
    assert "not served yet" in run("canary", operator.where, "--promote", status=1).stderr


def test_the_command_waits_for_its_own_canary(operator: Operator) -> None:
    """What became of an earlier one, or is served after it, is no answer."""
    aborted = ("--share", "0.5", "--abort-if", "requests >= 0", "--wait")
    run("canary", operator.where, operator.file(2), "--point", *aborted, status=1)
    waiting = ("canary", operator.where, operator.file(3), "--point", "--abort-if", "", "--wait")
    with ThreadPoolExecutor(1) as pool:
        for ends, status in ((["discard"], 1), (["commit", "swap"], 0)):
            done = pool.submit(run, *waiting, status=status)
            assert eventually(lambda: operator.status["canary"] is not None)
            for end in ends:
                assert operator.change(end, 4 if end == "swap" else None).status == 200
            assert ("not promoted: it was discarded" in done.result(60).stderr) == (status == 1)


@pytest.mark.parametrize(("rule", "status"), [("--promote-if", 0), ("--abort-if", 1)])
def test_the_command_waits_for_a_canary_that_ended_before_its_answer(
    operator: Operator, rule: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ModelOperations.canary

    def start_and_end(self: ModelOperations, *arguments: Any) -> str:
        weights_id = start(self, *arguments)
        assert eventually(lambda: self.served.canary is None)
        return weights_id

    monkeypatch.setitem(CHANGES, "canary", (CanaryRequest, start_and_end))
    run("canary", operator.where, operator.file(2), "--point", rule, "requests >= 0", "--wait", status=status)
    assert operator.serves(2 if status == 0 else 1)


def test_the_reason_of_a_canary_is_there_when_a_rule_promotes_it_at_once(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operator.server.admin is not None
    operations = operator.server.admin.models["tiny"]
    start, whys = operations.served.start_canary, []

    def start_and_look(*arguments: Any) -> Any:
        canary = start(*arguments)
        whys.append(operator.status["staged"]["why"])
        return canary

    monkeypatch.setattr(operations.served, "start_canary", start_and_look)
    operator.change("stage", 2, why="staged")
    operator.change("canary", why="try it")
    assert whys == ["try it"]
    assert operator.change("canary", why="again", share=0.5, promote_if="nothing > 0").status == 400
    assert operator.status["staged"]["why"] == "try it"


def test_a_push_that_is_no_longer_staged_at_its_answer(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage_and_end(self: ModelOperations, *arguments: Any) -> None:
        self.stage(*arguments)
        self.discard(StageRequest(source=""), "ana")

    monkeypatch.setitem(CHANGES, "stage", (StageRequest, stage_and_end))
    refused = run("push", operator.where, operator.file(2), "--point", "--stage", status=1)
    assert "committed or discarded since" in refused.stderr


times = st.lists(st.tuples(st.floats(0, 5, allow_nan=False), st.sampled_from([0.0, 0.5, None])), max_size=30)


@given(steps=times, seconds=st.integers(0, 9), limit=st.sampled_from(["0.25", "1"]))
def test_a_rule_holds_where_it_was_true_at_each_look_for_so_long(steps: Any, seconds: int, limit: str) -> None:
    rule = Rule(f"errors < {limit} for {seconds} s", frozenset({"errors"}))
    now, since = 0.0, None
    for passed, errors in steps:
        now += passed
        true = errors is not None and errors < float(limit)
        since = (now if since is None else since) if true else None
        assert rule.holds({"errors": errors, "p50": 1.0}, now) == (since is not None and now - since >= seconds)
        assert rule.held_for(now) == (0.0 if since is None else now - since)


@pytest.mark.parametrize(
    ("text", "seconds"), [("errors < 1", 0), ("errors < 1 for 5 min", 300), ("errors<1 for 0.5h", 1800)]
)
def test_how_long_a_rule_has_to_hold(text: str, seconds: float) -> None:
    assert Rule(text, frozenset({"errors"})).seconds == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("errors < 1 for ever", "errors < 1 for 5 minutes", "for 5 min", "errors < 1 for 5 min for 5 min"),
        f"errors * 1{'0' * 400} > 1",
    ],
)
def test_rules_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(Unsupported):
        check_plan(CanaryPlan(promote_if=text))


@pytest.mark.parametrize("rule", ["errors < 0.001", "nonfinite == 0", "errors <= served_errors"])
def test_nothing_is_promoted_before_it_is_measured(rule: str) -> None:
    judgement = CanaryAnalysis(CanaryPlan(share=0.1, promote_if=rule))
    assert judgement.verdict() is None
    answer = Side(requests=1, seconds=[0.1], failed=[False], nonfinite=[False])
    judgement.add(Measured(served=answer, canary=answer))
    assert judgement.verdict() == ("promote", rule)


def test_what_fails_at_once_is_aborted() -> None:
    judgement = CanaryAnalysis(CanaryPlan(share=1))
    assert judgement.verdict() is None
    judgement.add(Measured(canary=failures(1)))
    assert judgement.verdict() == ("abort", judgement.plan.abort_if)


@given(st.lists(st.floats(0, 100) | st.none(), min_size=1, max_size=200))
def test_rates_and_quantiles(outcomes: list[float | None]) -> None:
    side = Side()
    for seconds in outcomes:
        side.add(failures(1) if seconds is None else Side(requests=1, seconds=[seconds], failed=[False]))
    values, good = side.values(""), [each for each in outcomes if each is not None]
    assert values["errors"] == pytest.approx(1 - len(good) / len(outcomes))
    assert values["requests"] == len(outcomes)
    wanted = sorted(good)[min(len(good) - 1, int(0.99 * len(good)))] if good else None
    assert values["p99"] == wanted


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (np.arange(3), np.arange(3), False),
        (np.arange(3), np.arange(3)[::-1].copy(), True),
        (np.ones(3, np.float32), np.ones(4, np.float32), True),
        (np.ones(3, np.float16), np.full(3, 1.005, np.float16), False),
        (np.asarray([np.inf, 1], np.float32), np.asarray([np.inf, 1], np.float32), False),
        (np.asarray([np.nan, 1], np.float32), np.asarray([0, 1], np.float32), True),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), False),
    ],
)
def test_answers_that_differ(one: Any, other: Any, differs: bool) -> None:
    assert compare([("y", array_content(one))], [("y", array_content(other))], 0.01).differing == [differs]
