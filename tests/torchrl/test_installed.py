"""The tests of this folder, with the torchrl that they are for: it wants another tensordict than torchrec."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.apart import python_with
from weightswap_runtime.errors import MissingExtra


@pytest.mark.slow
def test_with_torchrl(tmp_path: Path) -> None:
    program = python_with(tmp_path / "venv", "torchrl==0.14.1")
    command = [program, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "tests/torchrl/test_scheme.py"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "WEIGHTSWAP_TESTS_"))}
    done = subprocess.run(command, env=own, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


def test_without_torchrl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl.weight_update", None)
    monkeypatch.delitem(sys.modules, "weightswap_torchrl", raising=False)
    with pytest.raises(MissingExtra, match=r"weightswap\[torchrl\]"):
        importlib.import_module("weightswap_torchrl")
