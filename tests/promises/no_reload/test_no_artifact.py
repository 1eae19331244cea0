"""A loaded artifact is never read again: a model keeps swapping after its artifact is deleted."""

from __future__ import annotations

import shutil

from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import load


def test_a_live_model_needs_its_artifact_no_more(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    shutil.rmtree(tiny.path)
    assert serves(model, 0)
    model.swap(weight_file(1))
    assert serves(model, 1)
