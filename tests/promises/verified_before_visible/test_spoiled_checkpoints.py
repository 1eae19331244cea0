"""README's path of skeleton, publish and watch: a checkpoint with a NaN reaches no worker, the next good one all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.watched import SOON, eventually
from weightswap_exporter import export, publish, skeleton
from weightswap_runtime import Event, GoldenMismatch, NonFiniteWeights, load

BATCH = torch.ones(2, 4)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.mark.parametrize("start", ["newest", "all"])
@pytest.mark.parametrize("residency", ["double", "single"])
def test_a_checkpoint_with_one_nan_is_skipped(residency: Any, start: Any, tmp_path: Path) -> None:
    with skeleton():
        hollow = build()
    artifact = export(hollow, (BATCH,), out=tmp_path / "m.artifact", goldens=[(BATCH,)])
    out, trained = tmp_path / "out", build()
    first = publish(trained, out, artifact, step=1, goldens=[(BATCH,)]).wait(120)
    events_of: list[list[Event]] = [[], []]
    models = [load(artifact, residency=residency) for _ in events_of]
    watchers = [
        model.watch(out, SOON, start=start, callback=events.append)
        for model, events in zip(models, events_of, strict=True)
    ]
    assert eventually(lambda: all(model.history for model in models))
    assert {(model.weights_id, model.history[-1].verified) for model in models} == {(first.weights_id, "goldens")}
    expected = trained(BATCH)
    with torch.no_grad():
        trained[2].weight[1, 2] = math.nan
    bad = publish(trained, out, artifact, step=2).wait(120)
    assert eventually(lambda: all(watcher.skipped for watcher in watchers))
    for model, watcher, events in zip(models, watchers, events_of, strict=True):
        assert list(watcher.skipped) == [bad.path.name]
        (error,) = watcher.skipped.values()
        assert isinstance(error, NonFiniteWeights)
        assert error.problems == ("2.weight: 1 NaN of 24 values",)
        assert (model.generation, model.weights_id) == (0, first.weights_id)
        assert torch.equal(model(BATCH), expected)
        assert eventually(lambda events=events: events[-1].kind == "skipped")  # type: ignore[misc]
    with torch.no_grad():
        trained[2].weight[1, 2] = 0.5
    good = publish(trained, out, artifact, step=3, goldens=[(BATCH,)]).wait(120)
    assert eventually(lambda: all(model.weights_id == good.weights_id for model in models))
    for watcher in watchers:
        watcher.stop()
    for model, events in zip(models, events_of, strict=True):
        assert torch.equal(model(BATCH), trained(BATCH))
        # tried only once, as it cannot improve
        assert [event.kind for event in events if event.source.endswith(bad.path.name)] == [
            "staging",
            "refused",
            "skipped",
        ]
        assert [receipt.nonfinite for receipt in model.history] == [{}, {}]


def test_a_first_checkpoint_with_nan_is_skipped_and_may_be_allowed(tmp_path: Path) -> None:
    with skeleton():
        hollow = build()
    artifact = export(hollow, (BATCH,), out=tmp_path / "m.artifact")
    trained = build()
    with torch.no_grad():
        trained[0].bias[0] = math.nan
    publish(trained, tmp_path / "out", artifact, step=1).wait(120)
    model = load(artifact)
    with model.watch(tmp_path / "out", SOON) as watcher:
        assert eventually(lambda: bool(watcher.skipped))
        assert model.weights_id is None
    with model.watch(tmp_path / "out", SOON, allow_nonfinite="*.bias"):
        assert eventually(lambda: model.generation == 0)
    assert model.history[-1].nonfinite["0.bias"].nan == 1


def test_finite_weights_that_give_nan_are_skipped(tmp_path: Path) -> None:
    """The inputs in the skeleton's artifact reveal it."""
    with skeleton():
        hollow = build()
    artifact = export(hollow, (BATCH,), out=tmp_path / "m.artifact", goldens=[(BATCH,)])
    trained = build()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.fill_(3e38)
    publish(trained, tmp_path / "out", artifact, step=1).wait(120)
    model = load(artifact)
    with model.watch(tmp_path / "out", SOON) as watcher:
        assert eventually(lambda: bool(watcher.skipped))
        (error,) = watcher.skipped.values()
    assert isinstance(error, GoldenMismatch)
    assert model.weights_id is None
