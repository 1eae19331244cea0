"""Packing a checkpoint takes the memory of its largest tensor, whatever its size."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import warm
from tests.support.checkpoints import saved, saved_distributed
from weightswap_exporter import export, skeleton
from weightswap_exporter.checkpoints.tensor import pieces
from weightswap_runtime import Artifact
from weightswap_runtime.format.canonical import pack_ranges, render_header

COUNT, ELEMENTS = 20, 8 << 20  # 670 MB in tensors of 34 MB
ALLOWED = 256 << 20

PACK = """
import re, sys
from pathlib import Path
from weightswap_exporter import pack
from weightswap_runtime import Artifact

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

source, artifact, out = sys.argv[1:]
opened = Artifact.open(artifact)
before = status("VmRSS")
packed = pack(source, opened, out=out)
print(packed.nbytes, status("VmHWM") - before)
"""


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.empty(ELEMENTS) for _ in range(COUNT)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts[0][0]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    with skeleton():
        model = Many()
    return export(model, (torch.zeros(2),), out=tmp_path_factory.mktemp("many") / "many.artifact")


def hollow_pickle(path: Path, state: dict[str, torch.Tensor]) -> Path:
    with torch.serialization.skip_data():
        return saved(path / "c.pt", state)


def hollow_safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    ranges = pack_ranges([(name, "F32", tuple(value.shape)) for name, value in state.items()])
    header = render_header(ranges, {})
    with (path / "c.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + COUNT * ELEMENTS * 4)
    return path / "c.safetensors"


def distributed(path: Path, state: dict[str, torch.Tensor]) -> Path:
    return saved_distributed(path / "dcp", state)


@pytest.mark.parametrize(
    "make",
    [hollow_pickle, *(pytest.param(make, marks=pytest.mark.slow) for make in (hollow_safetensors, distributed))],
)
@pytest.mark.slow
def test_memory_is_that_of_the_largest_tensor(
    make: Callable[[Path, dict[str, torch.Tensor]], Path], many: Artifact, tmp_path: Path
) -> None:
    source = make(tmp_path, {f"parts.{index}": torch.zeros(ELEMENTS) for index in range(COUNT)})
    command = [warm.python(), "-c", PACK, source, many.path, tmp_path / "v.safetensors"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for path in (*tmp_path.glob("**/*.distcp"), tmp_path / "v.safetensors"):
            path.unlink(missing_ok=True)
    nbytes, grown = map(int, done.stdout.split())
    assert nbytes == COUNT * ELEMENTS * 4
    assert grown < ELEMENTS * 4 + ALLOWED


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4, 3), (2, 9), (1, 40)])
@pytest.mark.parametrize("permuted", [False, True])
def test_pieces_are_the_row_major_bytes(
    shape: tuple[int, ...], permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightswap_exporter.checkpoints.tensor.PIECE", 16)
    tensor = torch.rand(shape)
    tensor = tensor.permute([*reversed(range(tensor.dim()))]) if permuted else tensor
    parts = list(pieces(tensor, torch.Tensor.double))
    assert b"".join(parts) == tensor.double().contiguous().numpy().tobytes()
    assert all(len(part) <= 2 * 16 for part in parts)
