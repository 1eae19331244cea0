"""While weights are staged, calls are answered from the served ones."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import Model, Progress, StagingBusy, WaitTimeout, load


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> Model:
    return load(tiny.path, weight_file(0), residency=residency)


def test_a_background_staging_returns_at_once_and_is_committed_later(model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1), background=True)
    assert staged.wait(120) is staged
    assert staged.done
    assert staged.progress == Progress("staged", 92, 92)
    assert torch.equal(staged(X), TinyArtifact.eager(1, X))
    assert serves(model, 0)
    staged.commit()
    assert staged.progress.phase == "committed"
    assert serves(model, 1)
    staged.cancel()
    assert serves(model, 1)


def test_calls_are_answered_while_a_staging_runs(model: Model, weight_file: WriteWeights) -> None:
    staged = model.stage(weight_file(1), background=True, rate_limit=SLOW)
    with pytest.raises(WaitTimeout, match=r"wait again, or cancel\(\)"):
        staged.wait(0.05)
    with pytest.raises(StagingBusy, match=r"wait\(\) until it is staged"):
        staged(X)
    with pytest.raises(StagingBusy):
        _ = staged.weights_id
    for other in (model.stage, model.swap):
        with pytest.raises(StagingBusy, match='busy="wait"'):
            other(weight_file(2))
    with pytest.raises(StagingBusy):
        model.rollback()
    assert not staged.done
    assert staged.progress.phase == "reading"
    assert 0 < staged.progress.bytes_done <= staged.progress.bytes_total == 92
    assert serves(model, 0)
    staged.cancel()
