"""The command for machines with a GPU, on one without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT

SCRIPT, EMULATED = ROOT / "scripts" / "test_cuda", ROOT / "scripts" / "test_emulated"
FAKE = """#!/usr/bin/env bash
case "$*" in
  *is_available*) exit 0 ;;
  *find_spec*) [[ "$*" != *pytest* ]] || echo "${LACKS:-}" ;;
  *test_accelerator*) echo "3 passed" ;;
  *test_storm*) echo begun; exec sleep 300 ;;
  *benchmarks*) echo "wrong output"; exit 1 ;;
esac
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so that it would run for minutes")
def test_without_a_gpu_nothing_is_reported_as_passed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(SCRIPT), str(tmp_path / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "scripts/test_cuda needs a GPU, and torch finds none here"
    assert not (tmp_path / "report").exists()


def run_with_a_fake_interpreter(folder: Path, **environment: str) -> str:
    """The report of a run whose steps are those of FAKE, and which is said to fail."""
    fake = folder / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    command = [str(SCRIPT), str(folder / "report")]
    known = os.environ | {"PYTHON": str(fake)} | environment
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    report = (folder / "report" / "report.md").read_text()
    assert done.stdout == report
    return report


def test_a_step_that_hangs_or_fails_keeps_no_other_from_its_place_in_the_report(tmp_path: Path) -> None:
    report = run_with_a_fake_interpreter(tmp_path, TIME_S="14")
    assert re.search(r"^## devices: passed, \d+ s\n\n```\n3 passed\n```$", report, re.MULTILINE)
    assert re.search(r"^## storm: \*\*ended after \d+ s\*\*, \d+ s\n\n```\nbegun", report, re.MULTILINE)
    assert re.search(r"^## bench: \*\*skipped\*\*\n\n```\nwhat it needs is not here: time\n```$", report, re.MULTILINE)


def test_a_step_without_its_packages_is_skipped_with_their_names(tmp_path: Path) -> None:
    report = run_with_a_fake_interpreter(tmp_path, LACKS="msgspec pytest")
    for name in ("devices", "storm"):
        assert f"## {name}: **skipped**\n\n```\nwhat it needs is not here: msgspec pytest\n```" in report
    assert re.search(r"^## bench: \*\*failed\*\* \(1\), \d+ s\n\n```\nwrong output\n```$", report, re.MULTILINE)


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    asking = re.compile(r"^@(on_accelerator|on_every_device|pytest\.mark\.cuda)", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py") if asking.search(path.read_text())}
    assert found == named_in(SCRIPT)
    assert found - named_in(EMULATED) == {"tests/devices/test_onnx.py"}  # ONNX Runtime brings kernels of its own


def named_in(script: Path) -> set[str]:
    """The files with tests that a script names."""
    return set(re.findall(r"tests/[\w/]+\.py", script.read_text())) - {"tests/emulator/sitecustomize.py"}


def test_what_the_emulation_leaves_out_is_there() -> None:
    left_out = re.findall(r'"(tests/\S+\.py)::(\w+)\[', EMULATED.read_text())
    assert left_out
    for file, name in left_out:
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is torch's CUDA build")
def test_the_emulation_asks_for_the_cuda_build_of_torch() -> None:
    command = [str(EMULATED)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"scripts/test_emulated needs the CUDA build of torch: this is {torch.__version__}"
