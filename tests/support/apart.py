"""Python environments with packages that conflict with the installed ones, or that few tests need."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import ROOT


def python_with(folder: Path, *packages: str) -> str:
    """Create an environment with packages on top of the installed ones, and return its program.

    Options of pip may be among the packages. Skips the test if they cannot be installed.
    """
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
