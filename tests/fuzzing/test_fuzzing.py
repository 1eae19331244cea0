"""Some thousand mutated files against their readers: only errors of the family, bounded memory, no hang."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import warm


@pytest.mark.parametrize(
    "arguments",
    [
        ["3000", "--seed", "11"],
        ["1000", "--seed", "12", "--guided"],
        pytest.param(["200000", "--seed", "13"], marks=pytest.mark.slow),
    ],
    ids=["plain", "guided", "long"],
)
@pytest.mark.slow
def test_mutated_files_are_refused_by_name(arguments: list[str], tmp_path: Path) -> None:
    command = [warm.python(), "-m", "tests.fuzzing", *arguments, "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for subject in ("weights", "part", "delta", "index", "manifest", "graph"):
        counts = [line.split() for line in done.stdout.splitlines() if line.startswith(subject)]
        assert len(counts) > 1, "all inputs had one outcome"
