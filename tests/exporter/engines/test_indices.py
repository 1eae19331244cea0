"""Indices and divisors that eager refuses are refused by every engine: none counts indices from the end, or writes
elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.functional import embedding, embedding_bag, one_hot

from tests.support.models import Does
from tests.support.setups import loaded
from weightswap_exporter import export

ROWS = 6


def along(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None].expand(-1, 4)


def source(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return w[:1].expand(ids.shape[0], -1)


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda w, ids: embedding(ids, w),
    "bag": lambda w, ids: embedding_bag(ids, w, torch.zeros(1, dtype=torch.long), mode="sum"),
    "one_hot": lambda w, ids: one_hot(ids, ROWS) * w[0, 0].detach(),
    "index_select": lambda w, ids: w.index_select(0, ids),
    "columns": lambda w, ids: w.t().index_select(1, ids),
    "gather": lambda w, ids: w.gather(0, along(ids)),
    "take_along_dim": lambda w, ids: torch.take_along_dim(w[:, 0], ids),
    "of a number": lambda w, ids: w[0, 0].index_select(0, ids[:1]),
    "scatter": lambda w, ids: w.scatter(0, along(ids), source(w, ids)),
    "a value": lambda w, ids: w.scatter(0, along(ids), 1.5),
    "scatter_add": lambda w, ids: w.scatter_add(0, along(ids), source(w, ids)),
    "integers": lambda w, ids: torch.zeros(ROWS, dtype=torch.long).scatter_add(0, ids, ids),
    "in place": lambda w, ids: torch.zeros_like(w).scatter_add_(0, along(ids), source(w, ids)),
    "scatter_reduce": lambda w, ids: w.scatter_reduce(0, along(ids), source(w, ids), "amax"),
    "index_add": lambda w, ids: w.index_add(0, ids, source(w, ids)),
    "index_copy": lambda w, ids: w.index_copy(0, ids, source(w, ids)),
}
OF_AOTI: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # ONNX has none of them
    "index_reduce": lambda w, ids: w.index_reduce(0, ids, source(w, ids), "amax"),
    "reduce": lambda w, ids: w.scatter(0, along(ids), source(w, ids), reduce="multiply"),
}


@pytest.mark.parametrize(
    ("engine", "calls"),
    [
        ("torch", READS),
        ("onnx", READS),
        pytest.param("aoti", READS | OF_AOTI, marks=pytest.mark.slow),
    ],
)
def test_indices_that_eager_refuses_are_refused(engine: str, calls: dict[str, Any], tmp_path: Path) -> None:
    reads = list(calls.values())
    weight = nn.Parameter(torch.rand(ROWS, 4))
    eager = Does(lambda m, ids: [read(m.w, each) for read, each in zip(reads, ids, strict=True)], w=weight)
    good = [torch.tensor([0, 2, 5]) for _ in reads]
    shapes = [{0: Dim("n", min=2, max=50)} for _ in reads]
    engines = [engine] if engine != "torch" else []
    artifact = export(eager, (good,), out=tmp_path / "a", dynamic_shapes=(shapes,), engines=engines)
    served = loaded(artifact, tmp_path, eager, engine=engine)
    take: Callable[[torch.Tensor], Any] = torch.Tensor.numpy if engine == "onnx" else torch.Tensor.clone
    for one, other in zip(served(list(map(take, good))), eager(good), strict=True):
        assert torch.equal(torch.as_tensor(one), other)
    for place in range(len(reads)):
        for wrong in (-1, ROWS, ROWS + 100_000):
            ids = [*good[:place], torch.tensor([wrong, 0, 2]), *good[place + 1 :]]
            for call, given in ((eager, ids), (served, list(map(take, ids)))):
                with pytest.raises((RuntimeError, IndexError)):
                    call(given)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_offsets_that_eager_refuses_are_refused(mode: str, tmp_path: Path) -> None:
    eager = Does(lambda m, x: embedding_bag(x[0], m.w, x[1], mode=mode), w=nn.Parameter(torch.rand(ROWS, 4)))
    ids = torch.arange(8) % ROWS
    shapes = [{0: Dim("n", min=2, max=50)}, {0: Dim("bags", min=2, max=50)}]
    sample = [ids, torch.tensor([0, 3, 3])]
    artifact = export(eager, (sample,), out=tmp_path / "a", dynamic_shapes=(shapes,), engines=["onnx"])
    served = loaded(artifact, tmp_path, eager, engine="onnx")
    for good in ([0, 3, 3], [0, 8], [0, 0, 5, 8]):
        found = served([ids.numpy(), np.array(good)])
        assert torch.allclose(torch.as_tensor(found), eager([ids, torch.tensor(good)]))
    for wrong in ([1, 3], [-1, 3], [0, 3, 9]):
        with pytest.raises(RuntimeError):
            eager([ids, torch.tensor(wrong)])
        with pytest.raises(RuntimeError):
            served([ids.numpy(), np.array(wrong)])


DIVISIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: a // b,
    lambda a, b: a.int() % b.int(),
    lambda _, b: 100 % b,
    lambda a, b: a.clone().fmod_(b),
]


@pytest.mark.parametrize("engine", ["torch", "onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_divisions_by_zero_are_refused_beside_other_calls(engine: str, tmp_path: Path) -> None:
    def forward(m: Any, x: list[torch.Tensor]) -> Any:
        a, b, c = x
        return [each(a, b) for each in DIVISIONS], a // (1 if engine == "onnx" else c.nonzero().shape[0]), m.w * 2

    eager = Does(forward, w=nn.Parameter(torch.rand(1)))
    dividends, divisors = torch.tensor([5, -7, 100, 9]), torch.tensor([1, 2, -3, 4])
    good, by_zero = [dividends, divisors, divisors], [dividends, torch.tensor([1, 0, 2, 3]), divisors]
    engines = [engine] if engine != "torch" else []
    artifact = export(eager, (good,), out=tmp_path / "a", engines=engines)
    served = loaded(artifact, tmp_path, eager, engine=engine)
    take: Callable[[torch.Tensor], Any] = torch.Tensor.numpy if engine == "onnx" else torch.Tensor.clone

    def call(x: list[torch.Tensor]) -> list[Any]:
        quotients, by_size, _ = served(list(map(take, x)))
        return [torch.as_tensor(each).tolist() for each in (*quotients, by_size)]

    def refused(x: list[torch.Tensor]) -> bool:
        with pytest.raises(RuntimeError):
            call(x)
        return True

    quotients, by_size, _ = eager(good)
    expected = [each.tolist() for each in (*quotients, by_size)]
    wrong = [by_zero] if engine == "onnx" else [by_zero, [dividends, divisors, divisors * 0]]
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(call, good) for _ in range(200)]
        refusals = [threads.submit(refused, wrong[number % len(wrong)]) for number in range(200)]
        assert all(each.result() == expected for each in answers)
        assert all(each.result() for each in refusals)
