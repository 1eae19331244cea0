"""A Python with packages that do not go with the others here, or that only few tests need."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import ROOT


def python_with(folder: Path, *packages: str) -> str:
    """The program of a new environment that has them above all that is installed here; skips where they are not to be
    had. Options of pip may be among them."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    below = [path for path in sys.path if path.endswith("site-packages")]
    (site / "below.pth").write_text("\n".join([str(ROOT), str(ROOT / "exporter"), str(ROOT / "runtime"), *below]))
    program = str(folder / "bin" / "python")
    command = [program, "-m", "pip", "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot be installed: {done.stderr[-200:]}")
    return program
