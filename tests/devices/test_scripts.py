"""The command for machines with a GPU, on one without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so that it would run for minutes")
def test_without_a_gpu_nothing_is_reported_as_passed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "test_cuda"), str(tmp_path / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "scripts/test_cuda needs a GPU, and torch finds none here"
    assert not (tmp_path / "report").exists()
