"""The code and the commands of docs/fleet.md run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.pages import page, python, shell


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with the files of the page on serving."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (build, *_) = re.findall(r"```python\n(.*?)```", page("serving"), re.DOTALL)
    python(tmp_path, build)
    return tmp_path


@pytest.mark.slow
def test_the_program(folder: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", page("fleet"), re.DOTALL)
    said = python(folder, program).splitlines()
    assert said[-2:] == ["True True {}", "['DigestMismatch']"]


@pytest.mark.slow
def test_the_commands(folder: Path) -> None:
    _, deploy, ask, end = re.findall(r"```sh\n(.*?)```", page("fleet"), re.DOTALL)
    try:
        said = shell(folder, deploy)
        assert said.count("desired     v1.safetensors") == 2
        assert re.search(r"^swap +\S+/v2.safetensors$", said, re.MULTILINE)
        assert json.loads(shell(folder, ask))["model_name"] == "tagger"
        said = shell(folder, end)
        assert re.search(r"^rollback +\S+/v1.safetensors$", said, re.MULTILINE)
    finally:
        shell(folder, "ray stop --force")
