"""Some thousand mutated files against their readers: only errors of the family, bounded memory, no hang."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import warm


@pytest.mark.parametrize(
    "arguments",
    [
        ["6000", "--seed", "11"],
        ["2400", "--seed", "12", "--guided"],
        pytest.param(["60000", "--seed", "13"], marks=pytest.mark.slow),
    ],
    ids=["plain", "guided", "long"],
)
@pytest.mark.slow
def test_mutated_files_are_refused_by_name(arguments: list[str], tmp_path: Path) -> None:
    command = [warm.python(), "-m", "tests.fuzzing", *arguments, "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "--guided" in arguments:  # which inputs come depends on the process, so that one outcome may be missing
        joined = re.search(r"covered, (\d+) inputs joined", done.stdout)
        assert joined is not None
        assert int(joined[1]) > 0
        return
    runtime = ("weights", "part", "delta", "merge", "index", "offsets", "manifest", "graph")
    for subject in (*runtime, "pt", "old pt", "metadata", "chunk", "peft config", "peft"):
        counts = [line for line in done.stdout.splitlines() if line.startswith(f"{subject:12} ")]
        assert len(counts) > 1, "all inputs had one outcome"


@pytest.mark.parametrize(("size", "every"), [(1_000_000, 97), pytest.param(1_000_000, 1, marks=pytest.mark.slow)])
def test_documents_that_are_large_in_one_place(size: int, every: int) -> None:
    """Bounds are generous: on an idle machine the worst takes half a second, 30 MB, and stops others for 0.05 s."""
    command = [warm.python(), "-m", "tests.fuzzing.bombs", str(size), "--every", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"weights", "delta", "index", "manifest", "goldens", "context", "call"} <= {each["reader"] for each in found}
    for each in found:
        assert each["seconds"][0] < 3, each
        assert each["bytes"][0] < 200 << 20, each
        assert each["stopped"][0] < 2, each
