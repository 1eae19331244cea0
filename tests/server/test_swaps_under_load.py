"""While clients of another process ask, weights are swapped: none fails, and none gets a mixture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.server import load as load_of
from tests.support.served import expected as expected_of
from tests.support.served import serving
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import load


@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("residency", "settings"), [("double", {}), ("single", {"max_batch": 8})], ids=["double", "single, batched"]
)
def test_swaps_under_load(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path, residency: Any, settings: Any, seconds: float
) -> None:
    files = {seed: weight_file(seed) for seed in (1, 2, 3)}
    model = load(tiny.path, files[1], residency=residency)
    expected = {}
    for seed, path in files.items():
        model.swap(path)
        expected[str(model.weights_id)] = expected_of(seed)
    with serving({"tiny": model}, grpc_port=0, **settings) as server:
        client, swaps = load_of.start(server, expected, tmp_path, seconds), 0
        while client.poll() is None:
            model.swap(files[swaps % 3 + 1])
            swaps += 1
            time.sleep(0.02)
        load_of.check_all_right(client)
    assert swaps > seconds
