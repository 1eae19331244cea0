"""The memory that weights from memory take beside the arenas and what was given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import ROOT
from tests.support import warm
from weightswap_exporter import export

MB = 1 << 20
PROGRAM = """
import ctypes, sys
import torch
from tests.support.peaks import taken
from weightswap_runtime import load

# what is freed goes back at once; otherwise malloc comes to keep pieces of 16 MiB for each thread. The environment says
# this to no fork of an interpreter
assert ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
model = load(sys.argv[1])
given = {f"{i}.weight": torch.ones(2048, 2048) for i in range(8)}
if sys.argv[2] == "transposed":
    given = {name: value.T for name, value in given.items()}

def swap():
    model.swap(iter(given.items()) if sys.argv[2] == "iterator" else given)

for _ in range(3):
    swap()
print(taken(swap))
"""


@pytest.mark.parametrize(("form", "most"), [("mapping", 4 * MB), ("iterator", 4 * MB), ("transposed", 68 * MB)])
def test_it_is_little(form: str, most: int, tmp_path: Path) -> None:
    """A tensor in another order than rows is copied: at most two for each of the two threads."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    artifact = export(model, (torch.zeros(1, 2048),), out=tmp_path / "artifact").path
    code = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n" + PROGRAM
    command = [warm.python(), "-c", code, str(artifact), form]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert int(result.stdout) < most
