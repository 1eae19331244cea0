"""Several requests are one call, of one generation, and none pays for another's mistake."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.exported import exported
from tests.support.served import as_json, ask, before_calls, expected, occupied, serving
from tests.support.tiny import WriteWeights
from weightswap_exporter import pack
from weightswap_runtime import InputMismatch, Model, Unsupported
from weightswap_runtime.tensors import TensorBytes, array_content, as_array
from weightswap_server import ServedMethod, Server
from weightswap_server.canary import CanaryPlan
from weightswap_server.errors import Overloaded
from weightswap_server.protocol import Answer
from weightswap_server.service import batching
from weightswap_server.service.batching import Call

RNG = np.random.default_rng(0)


def rows(count: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=(count, 3)).astype(np.float32)


def calls_of(server: Server, values: Sequence[np.ndarray[Any, Any]], name: str = "x") -> list[Call]:
    return [server.service.call("tiny", "", {name: array_content(value)}) for value in values]


def submit(server: Server, values: Sequence[np.ndarray[Any, Any]], name: str = "x") -> list[Future[Answer]]:
    """Queue calls while the model is busy, so that all of them wait."""
    calls = calls_of(server, values, name)
    with occupied(server):
        for call in calls:
            server.service.served[0].thread.submit(call)
    return [call.answer for call in calls]


def output(answer: Future[Answer]) -> np.ndarray[Any, Any]:
    return as_array(dict(answer.result(120).outputs)["output"])


def sizes_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the rows of each later call are appended."""
    seen: list[int] = []
    before_calls(monkeypatch, lambda method, _, flat: seen.append(method.rows(flat)))
    return seen


def check_answers(values: Sequence[np.ndarray[Any, Any]], answers: Sequence[Future[Answer]]) -> None:
    """Check that each is the answer of the weights of seed 1."""
    for value, answer in zip(values, answers, strict=True):
        np.testing.assert_allclose(output(answer), expected(1, value), rtol=1e-5, atol=1e-5)


def test_what_is_queued_goes_as_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"tiny": model}, max_batch=6) as server:
        seen = sizes_of_calls(monkeypatch)
        values = [rows(count) for count in (1, 2, 2, 3, 1, 6, 0, 1)]
        check_answers(values, submit(server, values))
        assert seen == [6, 4, 6]  # 1 + 2 + 2 + 1, as 3 had no room; the 3 with the last; and the 6 alone
        text = server.service.metrics.text().decode()
        assert f'weightswap_server_batch_calls_sum{{model="tiny",weights_id="{model.weights_id}"}}' in text


def test_the_same_batch_gives_the_same_bits(model: Model) -> None:
    with serving({"tiny": model}, max_batch=8) as server:
        values = [rows(2), rows(3), rows(1)]
        together = model(torch.from_numpy(np.concatenate(values)))
        found = np.concatenate([output(answer) for answer in submit(server, values)])
        np.testing.assert_array_equal(found, together)


def test_without_batching_each_goes_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"tiny": model}) as server:
        seen = sizes_of_calls(monkeypatch)
        for answer in submit(server, [rows(2), rows(1)]):
            answer.result(120)
        assert seen == [2, 1]


def test_the_first_waits_for_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"tiny": model}, max_batch=4, max_delay=5.0) as server:
        seen = sizes_of_calls(monkeypatch)
        for call in (calls := calls_of(server, [rows(1)] * 4)):
            server.service.served[0].thread.submit(call)
        for call in calls:
            call.answer.result(4)  # the batch is full before the delay is over
        assert seen == [4]


def test_a_request_that_was_given_up_is_not_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"tiny": model}, max_batch=8) as server:
        seen = sizes_of_calls(monkeypatch)
        with occupied(server):
            for call in (calls := calls_of(server, [rows(1)] * 3)):
                server.service.served[0].thread.submit(call)
            assert calls[1].answer.cancel()
        assert [output(calls[0].answer).shape, output(calls[2].answer).shape] == [(1, 5), (1, 5)]
        assert seen == [2]


@pytest.mark.parametrize(("max_batch", "count"), [(1, 1), (8, 3)])
def test_a_batch_never_spans_two_generations(
    model: Model, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch, max_batch: int, count: int
) -> None:
    """After a swap in the middle of a call, the answer names the weights that gave it."""
    first = model.weights_id

    def swap(*_: object) -> None:
        if model.generation == 0:
            model.swap(weight_file(2))

    with serving({"tiny": model}, max_batch=max_batch) as server:
        before_calls(monkeypatch, swap)
        values = [rows(2) for _ in range(count)]
        answers = submit(server, values)
        check_answers(values, answers)
        assert {(each.result().generation, each.result().weights_id) for each in answers} == {(0, first)}
        assert model.generation == 1


class Lookup(nn.Module):
    """A model that fails for tokens that are not in its table."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_none_pays_for_anothers_mistake(tmp_path: Any) -> None:
    eager = Lookup().eval()
    args, shapes = (torch.zeros(2, dtype=torch.int64),), {"tokens": {0: Dim("batch", max=64)}}
    model = exported(eager, args, tmp_path, dynamic_shapes=shapes)
    with serving({"tiny": model}, max_batch=8) as server:
        first, wrong, last = submit(server, [np.array([token]) for token in (1, 9, 3)], "tokens")
        for token, answer in ((1, first), (3, last)):
            np.testing.assert_array_equal(output(answer), eager.table.weight.detach()[[token]])
        assert isinstance(wrong.exception(120), InputMismatch)
        body = {"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1], "data": [9]}]}
        refused = ask(server, "/v2/models/tiny/infer", body)
        assert (refused.status, refused.error.split(":")[:2]) == (400, ["forward", " tokens"])


class Chosen(nn.Module):
    """A model with an input that was fixed at the export."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, wide: bool, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if wide else x


def test_inputs_that_are_fixed_have_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Chosen().eval()
    model = exported(eager, (True, torch.zeros(2, 3)), tmp_path, dynamic_shapes=(None, {0: Dim("batch", max=64)}))
    with serving({"tiny": model}, max_batch=8) as server:
        seen = sizes_of_calls(monkeypatch)
        answers = submit(server, [rows(2), rows(3)])
        assert [output(answer).shape for answer in answers] == [(2, 2), (3, 2)]
        assert ask(server, "/v2/models/tiny/infer", as_json(x=rows(1))).status == 200
        assert seen == [5, 1]


def test_what_cannot_be_put_together_is_served_alone(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with serving({"tiny": model}, max_batch=8, batch_dim="rows") as server:
        assert "tiny: not batched" in caplog.text
        assert ask(server, "/v2/models/tiny/infer", as_json(x=rows(2))).status == 200
        with pytest.raises(Unsupported):
            ServedMethod(model, "forward").batch_limit("rows")


class Dependent(nn.Module):
    """A layer, and what a way adds to its rows."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 2), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.layer(x))


WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "mean": (lambda y: y - y.mean(0), False),
    "place": (lambda y: y + torch.arange(y.shape[0])[:, None], False),
    "size": (lambda y: y / y.shape[0], False),
    "order": (lambda y: y.sort(0)[0], False),
    "a hundredth": (lambda y: y + 0.01 * y.mean(0), False),
    "a small column": (lambda y: torch.cat([y - y.mean(0), y[:, :1] * 1e3], 1), False),
    "each": (lambda y: y.softmax(1), True),
    "half": (lambda y: y.bfloat16().cumsum(1).float(), True),
    "truths": (lambda y: y > 0, True),
    "not finite": (lambda y: torch.where(y > 0, y, math.nan), True),
    "random": (lambda y: y + torch.rand_like(y), True),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_depend_on_those_of_others_are_not_put_together(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, is_batched = WAYS[way]
    torch.manual_seed(0)
    eager = Dependent(function).eval()
    model = exported(eager, (torch.randn(4, 3),), tmp_path, dynamic_shapes={"x": {0: Dim("batch", max=64)}})
    with serving({"tiny": model}, max_batch=8) as server:
        assert ("rows of the output output depend on the other rows" in caplog.text) != is_batched
        seen, values = sizes_of_calls(monkeypatch), [rows(2), rows(3)]
        answers = [output(answer) for answer in submit(server, values)]
        assert seen == ([5] if is_batched else [2, 3])
        for value, found in zip(values, answers, strict=True):
            if way != "random":
                wanted = eager(torch.from_numpy(value)).detach().numpy()
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


class Gated(nn.Module):
    """A layer, and a part that depends on all rows, whose factor is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.gate * x.mean()


@pytest.mark.parametrize("by_canary", [False, True])
def test_rows_that_depend_on_others_with_later_weights_alone_are_not_put_together(
    by_canary: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = Gated().eval()
    model = exported(eager, (torch.randn(4, 3),), tmp_path, dynamic_shapes={"x": {0: Dim("batch", max=64)}})
    with torch.no_grad():
        eager.gate += 1
    later = pack(eager, model.artifact.path, out=tmp_path / "later.safetensors").path
    with serving({"tiny": model}, max_batch=8) as server:
        values = [rows(2), rows(3)]
        seen = sizes_of_calls(monkeypatch)
        submit(server, values)[1].result(120)
        assert seen == [5]
        with model.stage(later) as staged:
            if by_canary:
                server.service.served[0].start_canary(staged, CanaryPlan(share=1.0))
            else:
                staged.commit()
            answers = [answer.result(120) for answer in submit(server, values)]
            assert {answer.weights_id for answer in answers} == {staged.weights_id}
            for value, answer in zip(values, answers, strict=True):
                wanted = eager(torch.from_numpy(value)).detach().numpy()
                np.testing.assert_allclose(as_array(answer.outputs[0][1]), wanted, rtol=1e-5, atol=1e-5)
            server.service.served[0].end_canary()
        assert "rows of the output output depend on the other rows" in caplog.text
        seen.clear()
        submit(server, values)[1].result(120)
        assert seen == [2, 3]


def test_ids_of_a_table_with_one_row_are_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    eager = Lookup(1).eval()
    args, shapes = (torch.zeros(2, dtype=torch.int64),), {"tokens": {0: Dim("batch", max=64)}}
    with (
        caplog.at_level("INFO"),
        serving({"tiny": exported(eager, args, tmp_path, dynamic_shapes=shapes)}, max_batch=8),
    ):
        assert "independent" not in caplog.text
        assert "not batched" not in caplog.text


def test_the_graphs_own_limit_holds(model: Model) -> None:
    with serving({"tiny": model}, max_batch=100) as server:
        method = server.service.served[0].methods["tiny"]
        assert server.service.served[0].thread.limits[method] == 8


async def answer_all(server: Server, values: Sequence[np.ndarray[Any, Any]]) -> list[Answer]:
    calls = calls_of(server, values)
    return await asyncio.gather(*(server.service.answer(call) for call in calls))


def test_what_one_round_of_a_loop_brings_goes_as_one_where_it_came_in(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "QUICK", 60.0)
    with serving({"tiny": model}, max_batch=8) as server:
        seen = sizes_of_calls(monkeypatch)
        threads = set()
        before_calls(monkeypatch, lambda *_: threads.add(current_thread()))
        answers = asyncio.run(answer_all(server, [rows(count) for count in (1, 2, 3, 4, 1)]))
        assert [dict(answer.outputs)["output"].shape for answer in answers] == [(n, 5) for n in (1, 2, 3, 4, 1)]
        assert (seen, threads) == ([7, 4], {current_thread()})
        with occupied(server):
            monkeypatch.setattr(server.service.served[0].thread, "_max_queue", 1)
            with pytest.raises(Overloaded):
                asyncio.run(answer_all(server, [rows(1), rows(1)]))


def test_a_loop_does_other_things_between_two_batches(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "QUICK", 60.0)
    with serving({"tiny": model}, max_batch=8) as server:
        seen = sizes_of_calls(monkeypatch)

        async def watched() -> list[int]:
            rounds, answers = [], asyncio.ensure_future(answer_all(server, [rows(8) for _ in range(5)]))
            while not answers.done():
                await asyncio.sleep(0)
                rounds.append(len(seen))
            return rounds

        assert set(asyncio.run(watched())) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("max_batch", [1, 8])
def test_calls_that_are_slow_for_their_values_keep_no_loop_busy(
    model: Model, monkeypatch: pytest.MonkeyPatch, max_batch: int
) -> None:
    """Each is followed by a quick one, after which its size could count as quick again."""
    monkeypatch.setattr(batching, "QUICK", 0.02)
    with serving({"tiny": model}, max_batch=max_batch) as server:
        threads = []

        def slow(method: ServedMethod, session: Any, flat: Any) -> None:
            if as_array(flat[0])[0, 0] == 9:
                threads.append(current_thread())
                time.sleep(0.15)

        before_calls(monkeypatch, slow)
        for _ in range(6):
            for value in (9, 1):
                asyncio.run(answer_all(server, [np.full((1, 3), value, np.float32)]))
        assert len(threads) == 6
        assert threads.count(current_thread()) <= 1


def test_a_small_call_runs_where_it_came_in(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "QUICK", 60.0)
    with serving({"tiny": model}) as server:
        thread = server.service.served[0].thread
        method = server.service.served[0].methods["tiny"]
        sample = method.sample()
        assert sample is not None
        found = thread.run_here(Call(method, sample))
        assert found is not None
        assert found.weights_id == model.weights_id
        large = Call(method, [TensorBytes("F32", (8, 3), memoryview(bytes(96)))])
        assert not thread.run_here(large)  # nobody knows yet how long that takes
        with occupied(server):
            assert not thread.run_here(Call(method, sample))
