"""The code and the commands of docs/fleet.md run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.apart import python_with
from tests.support.pages import blocks, page, python
from tests.support.ray_turns import ray_turn


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One with the files of the page on serving."""
    (build, *_) = blocks(page("serving"), "python")
    python(tmp_path, build)
    with ray_turn():
        yield tmp_path


def run(folder: Path, command: list[str]) -> str:
    """In an interpreter of its own: Ray starts others from it."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_program(folder: Path) -> None:
    program, _ = blocks(page("fleet"), "python")
    assert run(folder, [sys.executable, "-c", program]).splitlines()[-2:] == ["True True {}", "['DigestMismatch']"]


@pytest.fixture
def with_ray_train(tmp_path: Path) -> str:
    """A Python with what Ray Train asks for."""
    return python_with(tmp_path / "venv", "pandas", "pyarrow", "tensorboardX")


@pytest.mark.slow
def test_ray_train(folder: Path, with_ray_train: str) -> None:
    _, program = blocks(page("fleet"), "python")
    (folder / "train.py").write_text(program)
    assert run(folder, [with_ray_train, "train.py"]).splitlines()[-1] == "{'step': '3'} True"


def test_the_table_is_the_model_s() -> None:
    program = [sys.executable, str(ROOT / "scripts" / "benchmarks" / "fleet_model.py")]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert "\n".join(line for line in said.splitlines() if line.startswith("|")) in page("fleet")


@pytest.mark.slow
def test_the_commands(folder: Path) -> None:
    _, deploy, ask, back, canary, end = blocks(page("fleet"), "sh")
    try:
        said = run(folder, ["sh", "-ec", deploy])
        assert said.count("desired     v1.safetensors") == 2
        assert re.search(r"^swap +\S+/v2.safetensors$", said, re.MULTILINE)
        assert json.loads(run(folder, ["sh", "-ec", ask]))["model_name"] == "tagger"
        said = run(folder, ["sh", "-ec", back])
        assert re.search(r"^rollback +\S+/v1.safetensors$", said, re.MULTILINE)
        said = run(folder, ["sh", "-ec", canary])
        assert re.search(r"^answers +20 % of \w+$", said, re.MULTILINE)
        assert '"model_version":"canary"' in said
        assert re.search(r"^swap +\S+/v2.safetensors$", said, re.MULTILINE)
        run(folder, ["sh", "-ec", end])
    finally:
        run(folder, ["ray", "stop", "--force"])


@pytest.mark.slow
def test_the_demo() -> None:
    with ray_turn():
        program = str(ROOT / "scripts" / "digits" / "fleet.py")
        said = run(ROOT, [sys.executable, program, "--epochs", "2", "--pace", "0.5"])
    assert re.search(r"^passed: \d+ answers checked, 0 wrong; \d+ s$", said, re.MULTILINE)
    assert re.search(r"refused by 3 ", said)
