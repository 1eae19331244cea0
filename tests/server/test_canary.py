"""A canary answers its share and nobody else's; what is measured of it is right; rules promote and abort it."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.administered import TOKEN, administered, call, change, status
from tests.support.served import Reply, as_json, ask, occupied
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import DesiredStore, StageClosed, Unsupported, load
from weightswap_runtime.errors import InputMismatch
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.tensors import array_content
from weightswap_server import Server
from weightswap_server.canary import CanaryAnalysis, CanaryPlan, Differences, Rule, Side, check_plan, has_nonfinite
from weightswap_server.methods import ServedMethod
from weightswap_tools.commands.push import canary_command

X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = "/v2/models/tiny/infer"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)


@pytest.fixture
def server(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> Iterator[Server]:
    """A server with the weights of seed 1 that batches requests."""
    with administered(
        {"tiny": load(tiny.path, weight_file(1))},
        allow=(str(tmp_path),),
        audit_log=str(tmp_path / "audit"),
        serving={"max_batch": 8, "max_delay": 0.002, "grpc_port": 0},
    ) as running:
        yield running


def begin(server: Server, weights: Path, **fields: Any) -> str:
    begun = change(server, "canary", source=str(weights), **fields)
    assert begun.status == 200, begun.body
    return str(begun.json["status"]["canary"]["weights_id"])


def answer(server: Server, x: np.ndarray[Any, Any] = X, routing: str | None = None) -> Reply:
    found = ask(server, INFER, as_json(x=x), {} if routing is None else {"X-Weightswap-Canary": routing})
    assert found.status == 200, found.body
    return found


def until(condition: Any) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.usefixtures("_places")
def test_each_answer_is_from_the_weights_that_it_names(
    server: Server, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    """Under load, batched, while a canary starts, grows, and is promoted: never a mixture."""
    model = server.service.served[0].model
    seeds = {str(model.weights_id): 1}
    ended = False

    def client(number: int) -> list[str]:
        found, connection = [], http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
        with closing(connection):
            while not ended:
                x = np.full((1 + number % 3, 3), len(found) % 50, np.float32)
                connection.request("POST", INFER, json.dumps(as_json(x=x)))
                said = json.loads(connection.getresponse().read())
                weights_id = said["parameters"]["weights_id"]
                data = np.asarray(said["outputs"][0]["data"], np.float32).reshape(x.shape[0], 5)
                wanted = TinyArtifact.eager(seeds[weights_id], torch.from_numpy(x)).numpy()
                np.testing.assert_allclose(data, wanted, rtol=1e-5, atol=1e-4)
                found.append(weights_id)
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            for seed, source in ((2, delta(1, 2)), (3, weight_file(3))):
                staged = change(server, "stage", source=str(source)).json["status"]["staged"]
                seeds[staged["weights_id"]] = seed
                assert change(server, "canary", share=0.25, shadow=True).status == 200
                until(lambda: status(server)["canary"]["values"]["requests"] >= 25)
                assert change(server, "canary", share=0.75).status == 200
                until(lambda: status(server)["canary"]["values"]["requests"] >= 25)
                assert change(server, "commit" if seed == 2 else "discard").status == 200
        finally:
            ended = True
        counts = Counter(each for found in clients for each in found.result(20))
    assert set(counts) == set(seeds)
    assert serves(model, 2)


def test_the_share_is_kept_and_wishes_are_met(server: Server, weight_file: WriteWeights) -> None:
    served = server.service.served[0].model.weights_id
    canary = begin(server, weight_file(2), share=0.2)
    answers = [answer(server).json["parameters"] for _ in range(40)]
    assert Counter(each["weights_id"] for each in answers) == {served: 32, canary: 8}
    wished = answer(server, routing="1").json
    assert (wished["model_version"], wished["parameters"]) == ("canary", {"generation": None, "weights_id": canary})
    assert {answer(server, routing="0").json["parameters"]["weights_id"] for _ in range(9)} == {served}
    asked = ask(server, "/v2/models/tiny/versions/0/infer", as_json(x=X), {"X-Weightswap-Canary": "1"})
    assert asked.json["parameters"]["weights_id"] == served

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        tensor = tritonclient.grpc.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)
        found = client.infer("tiny", [tensor], headers={"x-weightswap-canary": "1"})
        assert found.get_response().parameters["weights_id"].string_param == canary
        np.testing.assert_array_equal(found.as_numpy("output"), TinyArtifact.eager(2, torch.from_numpy(X)).numpy())
    metrics = ask(server, "/metrics").body.decode()
    assert f'weightswap_server_requests_total{{model="tiny",status="200",weights_id="{canary}"}} 10.0' in metrics

    assert change(server, "discard").json["status"]["canary"] is None
    assert answer(server, routing="1").json["parameters"]["weights_id"] == served


def test_a_batch_is_never_of_both(server: Server, weight_file: WriteWeights) -> None:
    canary = begin(server, weight_file(2))
    with ThreadPoolExecutor(8) as pool:
        with occupied(server):
            asked = [pool.submit(answer, server, X[:1], str(number % 2)) for number in range(8)]
            until(lambda: server.service.served[0].thread.queued == 8)
        found = Counter(each.result(20).json["parameters"]["weights_id"] for each in asked)
    assert found[canary] == 4
    metrics = ask(server, "/metrics").body.decode()
    assert f'weightswap_server_batch_calls_bucket{{le="4.0",model="tiny",weights_id="{canary}"}} 4.0' in metrics
    assert f'weightswap_server_batch_calls_bucket{{le="2.0",model="tiny",weights_id="{canary}"}} 0.0' in metrics


def test_a_shadow_is_compared_and_answers_nobody(
    server: Server, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    served = server.service.served[0].model.weights_id
    begin(server, weight_file(2), shadow=True)
    assert {answer(server).json["parameters"]["weights_id"] for _ in range(5)} == {served}
    until(lambda: status(server)["canary"]["values"]["compared"] + status(server)["canary"]["skipped"] >= 5)
    values = status(server)["canary"]["values"]
    one, other = (TinyArtifact.eager(seed, torch.from_numpy(X)).numpy().astype(np.float64) for seed in (1, 2))
    assert values["max_abs"] == pytest.approx(np.abs(one - other).max())
    assert values["max_rel"] == pytest.approx(np.abs(one - other).max() / np.abs(one).max())
    assert (values["differing"], values["errors"]) == (1.0, 0.0)
    change(server, "discard")
    alike = tiny.values(1) | {"steps": torch.tensor(9)}  # which no answer depends on
    begin(server, tiny.write(tmp_path / "alike.safetensors", alike), shadow=True)
    answer(server)
    until(lambda: status(server)["canary"]["values"]["compared"] == 1)
    values = status(server)["canary"]["values"]
    assert (values["differing"], values["max_abs"]) == (0.0, 0.0)


def test_a_shadow_that_is_slow_keeps_nobody_waiting(
    server: Server, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, method_call = [], ServedMethod.call

    def slow(self: ServedMethod, session: Any, flat: Any, *variants: Any) -> Any:
        if isinstance(session, Staged):
            called.append(1)
            time.sleep(0.3)
        return method_call(self, session, flat, *variants)

    monkeypatch.setattr(ServedMethod, "call", slow)
    begin(server, weight_file(2), shadow=True)
    began = time.monotonic()
    for _ in range(20):
        answer(server)
    assert time.monotonic() - began < 2
    assert status(server)["canary"]["skipped"] >= 10  # not kept for later without an end
    assert len(called) < 10
    change(server, "discard")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("broken weights"), InputMismatch("tiny", ["x: an id that these weights compute is in no table"])],
    ids=["any", "of values"],
)
def test_a_canary_that_fails_is_nobodys_error_and_is_aborted(
    error: Exception, server: Server, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    method_call = ServedMethod.call

    def broken(self: ServedMethod, session: Any, flat: Any, *variants: Any) -> Any:
        if isinstance(session, Staged):
            raise error
        return method_call(self, session, flat, *variants)

    monkeypatch.setattr(ServedMethod, "call", broken)
    served = server.service.served[0].model.weights_id
    canary = begin(server, weight_file(2), share=0.5)
    assert {answer(server).json["parameters"]["weights_id"] for _ in range(6)} == {served}
    until(lambda: status(server)["canary"] is None)
    assert status(server)["staged"] is None
    refusals = call(server, "/admin/models/tiny/history").json["refusals"]
    assert refusals[0]["event"] == "canary aborted"
    assert "errors 100 %" in refusals[0]["error"]
    assert (
        f'weightswap_server_canary_errors_total{{model="tiny",weights_id="{canary}"}}'
        in ask(server, "/metrics").body.decode()
    )
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(each["call"], each["outcome"]) for each in lines[-2:]] == [
        ("abort by rule", "begun"),
        ("abort by rule", "done"),
    ]


def test_a_canary_with_nan_is_aborted(server: Server, tiny: TinyArtifact, tmp_path: Path) -> None:
    nan = tiny.write(tmp_path / "nan.safetensors", tiny.values(2) | {"bias": torch.full((5,), torch.nan)})
    assert change(server, "canary", source=str(nan), shadow=True).status == 422
    begin(server, nan, shadow=True, allow_nonfinite=True)
    answer(server)
    until(lambda: status(server)["canary"] is None)
    assert serves(server.service.served[0].model, 1)


def test_what_the_requests_break_is_not_the_canarys_fault(
    server: Server, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedMethod, "call", lambda *_: 1 / 0)
    begin(server, weight_file(2), share=0.5)
    assert [ask(server, INFER, as_json(x=X)).status for _ in range(10)] == [500] * 10
    values = status(server)["canary"]["values"]
    assert (values["errors"], values["served_errors"]) == (1.0, 1.0)
    time.sleep(0.6)
    assert status(server)["canary"] is not None


def test_a_rule_promotes_and_has_it_desired(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    desired_store = DesiredStore(tmp_path / "service")
    desired_store.set(weight_file(1), revision=0)
    assert change(server, "follow", desired_store=desired_store.where, interval=0.05).status == 200
    canary = begin(
        server,
        weight_file(2),
        share=0.5,
        promote_if="requests >= 5 and errors < 0.001 and p99_ratio < 1e6 for 0.6 s",
        why="better tags",
    )
    for _ in range(20):
        answer(server)
    until(lambda: status(server)["canary"] is None)
    model = server.service.served[0].model
    assert (model.weights_id, serves(model, 2)) == (canary, True)
    state = desired_store.read()
    assert state.weights is not None
    assert (state.weights.weights_id, state.weights.by) == (canary, "token")
    assert state.weights.why.startswith("better tags (canary: requests >= 5")
    assert status(server)["served"]["why"] == state.weights.why


def test_the_reason_of_a_canary_of_what_is_staged_is_kept(server: Server, weight_file: WriteWeights) -> None:
    change(server, "stage", source=str(weight_file(2)), why="staged")
    change(server, "canary", share=0.5)
    assert status(server)["staged"]["why"] == "staged"
    change(server, "canary", share=0.5, promote_if="requests >= 0", why="let it decide")
    until(lambda: status(server)["canary"] is None)
    assert status(server)["served"]["why"] == "let it decide (canary: requests >= 0)"


def test_a_verdict_is_about_the_canary_that_it_was_told_of(server: Server, weight_file: WriteWeights) -> None:
    """If an operator replaces the canary before a verdict is obeyed, the new one is promoted by its own rule alone."""
    assert server.admin is not None
    operations, rule = server.admin.models["tiny"], "requests >= 5"
    begin(server, weight_file(2), share=1, promote_if="requests >= 1000")
    with pytest.raises(StageClosed, match="has ended"):
        operations.act_on("promote", rule)
    assert status(server)["canary"]["promote_if"] == "requests >= 1000"
    assert serves(operations.model, 1)


def test_a_canary_gives_way_to_what_others_desire(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    desired_store = DesiredStore(tmp_path / "service")
    desired_store.set(weight_file(1), revision=0)
    change(server, "follow", desired_store=desired_store.where, interval=0.05)
    begin(server, weight_file(2), share=0.5, promote_if="requests >= 1000")
    desired_store.set(weight_file(3), revision=1, by="bo")
    until(lambda: serves(server.service.served[0].model, 3))
    assert status(server)["canary"] is None


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
def test_canaries_that_cannot_be_meant(server: Server, fields: Any, code: int) -> None:
    refused = change(server, "canary", **fields)
    assert (refused.status, bool(refused.json["error"])) == (code, True)


def test_what_is_served_is_no_canary_of_itself(server: Server, weight_file: WriteWeights) -> None:
    refused = change(server, "canary", source=str(weight_file(1)), share=0.1, shadow=True)
    assert (refused.status, "a canary needs others" in refused.json["error"]) == (400, True)
    assert status(server)["staged"] is None
    assert change(server, "stage", source=str(weight_file(1))).status == 200
    assert change(server, "canary", share=0.1).status == 400
    assert (status(server)["canary"], change(server, "discard").status) == (None, 200)


def test_where_what_is_staged_cannot_be_called(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    single = load(tiny.path, weight_file(1), residency="single")
    with administered({"tiny": single}, allow=(str(tmp_path),)) as server:
        refused = change(server, "canary", source=str(weight_file(2)), share=0.1)
        assert (refused.status, "double" in refused.json["error"]) == (400, True)
        assert status(server)["staged"] is None
    with administered({"tiny": load(tiny.path)}, warm=False, allow=(str(tmp_path),)) as server:
        refused = change(server, "canary", source=str(weight_file(2)), share=0.1)
        assert (refused.status, "serves nothing" in refused.json["error"]) == (400, True)


def test_a_share_in_per_cent_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    result = CliRunner().invoke(canary_command, ["http://127.0.0.1:9", "--share", "20", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert "--share" in result.stderr


def test_the_command(server: Server, weight_file: WriteWeights, tmp_path: Path) -> None:
    assert server.admin is not None
    url = server.admin.where

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(canary_command, [url, *arguments])

    shown = run(str(weight_file(2)), "--point", "--share", "0.5", "--shadow")
    assert shown.exit_code == 0, shown.stderr
    assert ", 50 % and shadow\n" in shown.stdout
    answer(server)
    answer(server)  # by the canary
    table = re.sub(" +", " ", run().stdout)
    assert re.search(r"errors │? ?0 %", table), table
    assert re.search(r"p50 │? ?[\d.]+ (ms|µs)", table), table
    assert run("--promote-if", "requests >= 0").exit_code == 2  # of no canary
    assert run("--wait", "--abort").exit_code == 2
    aborted = run(str(weight_file(2)), "--point", "--share", "0.5", "--abort-if", "requests >= 0", "--wait")
    assert (aborted.exit_code, "not promoted: requests >= 0: requests 0" in aborted.stderr) == (1, True)
    done = run(str(weight_file(2)), "--point", "--promote-if", "requests >= 0", "--wait", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["served"]["generation"] == 1
    run(str(weight_file(3)), "--point")
    assert "why         it is better\n" in run("--promote", "--why", "it is better").stdout
    assert serves(server.service.served[0].model, 3)


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


TOO_LARGE = f"errors * 1{'0' * 400} > 1"


@pytest.mark.parametrize(
    ("text", "seconds"), [("errors < 1", 0), ("errors < 1 for 5 min", 300), ("errors<1 for 0.5h", 1800)]
)
def test_how_long_a_rule_has_to_hold(text: str, seconds: float) -> None:
    assert Rule(text, frozenset({"errors"})).seconds == seconds
    for wrong in (
        f"{text} for ever",
        f"{text} for 5 minutes",
        "for 5 min",
        "errors < 1 for 5 min for 5 min",
        TOO_LARGE,
    ):
        with pytest.raises(Unsupported):
            check_plan(CanaryPlan(promote_if=wrong))


@pytest.mark.parametrize("rule", ["errors < 0.001", "nonfinite == 0", "errors <= served_errors"])
def test_nothing_is_promoted_before_it_is_measured(rule: str) -> None:
    judgement = CanaryAnalysis(CanaryPlan(share=0.1, promote_if=rule))
    assert judgement.verdict() is None
    for side in (judgement.canary, judgement.served):
        side.answered(0.1)
        side.examined(False)
    assert judgement.verdict() == ("promote", rule)


def test_what_fails_at_once_is_aborted() -> None:
    judgement = CanaryAnalysis(CanaryPlan(share=1))
    assert judgement.verdict() is None
    judgement.canary.failed()
    assert judgement.verdict() == ("abort", judgement.plan.abort_if)


@given(st.lists(st.floats(0, 100) | st.none(), min_size=1, max_size=200))
def test_rates_and_quantiles(outcomes: list[float | None]) -> None:
    side = Side()
    for seconds in outcomes:
        side.failed() if seconds is None else side.answered(seconds)
    values, good = side.values(""), [each for each in outcomes if each is not None]
    assert values["errors"] == pytest.approx(1 - len(good) / len(outcomes))
    assert values["requests"] == len(outcomes)
    wanted = sorted(good)[min(len(good) - 1, int(0.99 * len(good)))] if good else None
    assert values["p99"] == wanted


numbers = st.lists(st.floats(width=32) | st.just(0.0), min_size=4, max_size=4)


@given(one=numbers, other=numbers)
@settings(max_examples=200)
def test_differences(one: list[float], other: list[float]) -> None:
    first, second = np.asarray(one, np.float32), np.asarray(other, np.float32)
    found = Differences(0.01)
    differs = found.compare([("y", array_content(first))], [("y", array_content(second))])
    assert differs == (not np.array_equal(first, second, equal_nan=True) and found.max_rel > 0.01)
    if np.isfinite(first).all() and np.isfinite(second).all():
        assert found.max_abs == np.abs(first.astype(np.float64) - second.astype(np.float64)).max()
    assert has_nonfinite([("y", array_content(second))]) == (not np.isfinite(second).all())


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
    assert Differences(0.01).compare([("y", array_content(one))], [("y", array_content(other))]) == differs
