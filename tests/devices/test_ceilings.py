"""The figures that a run on a GPU begins with: those of the host, and with a device all of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT
from tests.support.accelerators import ACCELERATOR, on_accelerator

MB = 1 << 20
FOLDER = ROOT / "scripts" / "gpu"


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ceilings")


@pytest.mark.slow
def test_rates_of_the_host_are_measured(ceilings: ModuleType) -> None:
    found = list(ceilings._host(64 * MB))
    assert {figure.what.partition(",")[0] for figure in found} == {"memmove", "BLAKE3 of blocks of 1 MiB"}
    assert all(figure.value > 0.01 for figure in found)


@on_accelerator
@pytest.mark.skipif(ACCELERATOR != "cuda", reason="asks CUDA itself")
def test_every_figure_is_printed_and_written(device: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "ceilings.py"), str(tmp_path / "ceilings.json"), "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "ceilings.json").read_text())
    assert [f"{row['what']}: {row['value']:.4g} {row['unit']}" for row in written] == done.stdout.splitlines()
    assert {row["unit"] for row in written} == {"", "GB/s", "us", "ms", "s for each GB", "million a second"}
    assert all(row["value"] >= 0 for row in written)
