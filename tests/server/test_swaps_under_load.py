"""While clients of another process ask, weights are swapped: none fails, and none gets a mixture."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.server.load import INPUT
from tests.support import warm
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
        expected[str(model.weights_id)] = TinyArtifact.eager(seed, torch.from_numpy(INPUT)).numpy()
    np.savez(tmp_path / "expected.npz", **expected)
    with serving({"tiny": model}, grpc_port=0, **settings) as server:
        command = [warm.python(), "-m", "tests.server.load", str(server.http_port), str(server.grpc_port)]
        client = subprocess.Popen(
            [*command, str(tmp_path / "expected.npz"), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        swaps = 0
        while client.poll() is None:
            model.swap(files[swaps % 3 + 1])
            swaps += 1
            time.sleep(0.02)
        said = client.communicate()[0]
    found = json.loads(said)["answers"]
    assert client.returncode == 0
    assert (found.pop("mixed"), found.pop("stale"), found.pop("failed")) == (0, 0, 0)
    assert all(answers > 10 for answers in found.values())  # of each set of weights
    assert swaps > seconds
