"""Background stagings beside a trainer that goes on: one step of it is committed, or none, and never parts of two."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.storm import storm
from weightswap_exporter import export
from weightswap_runtime import Model, SourceChanged, load
from weightswap_runtime.staging.reading import STANDSTILL

WIDTH, LAYERS = 512, 6
ENOUGH = 5  # refusals, and as many commits
SECONDS = 20.0  # in which there is one of each, on any machine


class Steps(nn.Module):
    """All its values are the number of the step, so that its output says whether they are of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.stack(list(self.layers))
        return torch.stack([values.min(), values.max()]) + 0 * x


class Trainer:
    """Takes steps, each a list of writes that move none of torch's counters, and notes how long they took."""

    def __init__(self, writes: list[Callable[[], object]]) -> None:
        self._writes, self._pauses = writes, random.Random(0)
        self.longest = 0.0  # seconds of one write, or between two of one step

    def step(self, _: int) -> None:
        before = time.perf_counter()
        for write in self._writes:
            write()
            now = time.perf_counter()
            self.longest, before = max(self.longest, now - before), now
        time.sleep(self._pauses.choice((0.0, 0.03, 0.3)))


def fused(model: Steps) -> list[Callable[[], object]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = -torch.ones_like(parameter)
    return [optimizer.step]


def through_data(model: Steps) -> list[Callable[[], object]]:
    return [partial(parameter.data.add_, 1) for parameter in model.parameters()]


def steps_served(model: Model) -> tuple[float, float]:
    lowest, highest = model(torch.zeros(2)).tolist()
    return lowest, highest


@pytest.mark.parametrize("how", [fused, through_data])
def test_no_staging_mixes_two_steps(
    how: Callable[[Steps], list[Callable[[], object]]], residency: str, tmp_path: Path
) -> None:
    trained = Steps()
    model = load(export(trained, (torch.zeros(2),), out=tmp_path / "a.artifact"), trained, residency=residency)
    trainer, refused, mixed, committed = Trainer(how(trained)), 0, 0, 0
    end = time.monotonic() + SECONDS
    with storm(trainer.step, 1):
        while min(refused, committed) < ENOUGH and time.monotonic() < end:
            try:
                model.stage(trained, background=True).commit()
                committed += 1
            except SourceChanged:
                refused += 1
            lowest, highest = steps_served(model)
            mixed += lowest != highest
    assert refused
    assert committed
    # a step that stood still longer than both looks, as on a busy machine, is the one that cannot be seen
    assert not mixed or trainer.longest > STANDSTILL
    model.swap(trained)
    assert steps_served(model) == (trained.layers[0].detach()[0, 0].item(),) * 2
