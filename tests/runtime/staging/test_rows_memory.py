"""The memory that an update of rows takes beside the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests import ROOT
from weightswap_exporter import export, pack
from weightswap_runtime import load, write_delta

ROWS, WIDTH, CHANGED = 1_000_000, 16, 14_000
PROGRAM = """
import sys
from tests.support.peaks import taken
from weightswap_runtime import load

artifact, first, residency, *deltas = sys.argv[1:]
model = load(artifact, first, residency=residency)
for delta in deltas[:-1]:
    model.swap(delta)
print(taken(lambda: model.swap(deltas[-1])), model._store.trees.nbytes)
"""


def test_it_is_a_few_times_that_of_the_rows(residency: str, tmp_path: Path) -> None:
    table = nn.Embedding(ROWS, WIDTH)
    artifact = export(table, (torch.arange(4),), out=tmp_path / "artifact").path
    random, files, deltas = np.random.default_rng(0), [tmp_path / "0.safetensors"], []
    pack(table, artifact, out=files[0])
    for number in range(1, 4):
        ids = torch.from_numpy(random.choice(ROWS, CHANGED, replace=False))
        table.weight.data[ids] += 1
        files.append(pack(table, artifact, out=tmp_path / f"{number}.safetensors").path)
        deltas.append(write_delta(files[-2], files[-1], tmp_path / f"d{number}.safetensors").path)
    command = [sys.executable, "-c", PROGRAM, artifact, files[0], residency, *deltas]
    result = subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True, text=True)
    growth, trees = map(int, result.stdout.split())
    assert trees == ROWS * WIDTH * 4 // (1 << 20) * 65536
    rows = CHANGED * WIDTH * 4
    assert growth < 4 * rows + (1 << 20), growth


@pytest.mark.parametrize(("blocks", "trees"), [(3, 0), (4, 4 * 65536)])
def test_a_few_blocks_are_hashed_without_trees(blocks: int, trees: int, tmp_path: Path) -> None:
    table, in_block = nn.Embedding(1 << 17, 16), (1 << 20) // 64
    artifact = export(table, (torch.arange(4),), out=tmp_path / "artifact").path
    first = pack(table, artifact, out=tmp_path / "0.safetensors").path
    table.weight.data[torch.arange(blocks) * in_block] += 1
    after = pack(table, artifact, out=tmp_path / "1.safetensors")
    model = load(artifact, first)
    receipt = model.swap(write_delta(first, after.path, tmp_path / "d.safetensors").path)
    assert (receipt.weights_id, model._store.trees.nbytes) == (after.weights_id, trees)
