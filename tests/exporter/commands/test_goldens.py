"""Goldens on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.support.checkpoints import saved
from tests.support.goldens import verified
from weightswap_exporter.commands.build import export_command, pack_command
from weightswap_runtime import Artifact, load
from weightswap_runtime.format.goldens import artifact_goldens, goldens_beside
from weightswap_tools.inspect.command import inspect_command

RECIPE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 6).view(2, 3)
    return {"model": nn.Linear(3, 2).eval(), "args": (x,), "goldens": [(x,), (x + 1,)], "tolerance": (0.0, 0.5)}
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goldens_recipe.py").write_text(RECIPE)
    saved(tmp_path / "c.pt", nn.Linear(3, 2).state_dict())

    def run(command: Any, *arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(command, list(arguments))
        assert result.exit_code == status, result.output
        return result.output

    return run


def test_the_commands_record_what_a_recipe_asks_for(shell: Callable[..., str], tmp_path: Path) -> None:
    recipe = "goldens_recipe.py:build"
    assert "goldens    2 cases\n" in shell(export_command, recipe, "-o", "m.artifact")
    found = artifact_goldens(Artifact.open("m.artifact"))
    assert found is not None
    assert found.record.tolerance == (0.0, 0.5)
    arguments = ["c.pt", "m.artifact", "-o", "v1.safetensors"]
    assert "goldens     2 cases\n" in shell(pack_command, *arguments, "--recipe", recipe)
    beside = goldens_beside("v1.safetensors", Artifact.open("m.artifact").manifest)
    assert beside is not None
    assert verified(beside, load("m.artifact", "v1.safetensors")) == "goldens"
    assert json.loads(shell(pack_command, *arguments, "--recipe", recipe, "--json"))["goldens"] == 2


def test_inputs_of_a_skeleton_are_reported_as_inputs(shell: Callable[..., str], tmp_path: Path) -> None:
    arguments = ["goldens_recipe.py:build", "-o", "m.artifact", "--skeleton"]
    assert "inputs     2 cases\n" in shell(export_command, *arguments)
    document = json.loads(shell(export_command, *arguments, "--json"))
    assert (document["goldens"], document["inputs"]) == (0, 2)


def test_goldens_are_inspected_with_their_weight_file_or_artifact(shell: Callable[..., str]) -> None:
    recipe = "goldens_recipe.py:build"
    shell(export_command, recipe, "-o", "m.artifact")
    packed = json.loads(shell(pack_command, "c.pt", "m.artifact", "-o", "v.safetensors", "--recipe", recipe, "--json"))
    weights_id = packed["weights_id"]
    line = f"goldens    2 of forward; of the weights {weights_id[:12]}; within rtol 0, atol 0.5\n"
    assert line in shell(inspect_command, "v.safetensors")
    assert "2 of forward" in shell(inspect_command, "m.artifact")
    told = json.loads(shell(inspect_command, "v.safetensors", "--json"))["goldens"]
    assert (told["weights_id"], told["tolerance"], told["cases"]) == (weights_id, [0.0, 0.5], {"forward": 2})
    assert told["environment"]["torch"] == torch.__version__
    Path("v.goldens.safetensors").unlink()
    assert "goldens" not in shell(inspect_command, "v.safetensors")
    assert json.loads(shell(inspect_command, "v.safetensors", "--json"))["goldens"] is None


def test_the_commands_leave_goldens_out(shell: Callable[..., str], tmp_path: Path) -> None:
    recipe = "goldens_recipe.py:build"
    for more in ((), ("--skeleton",)):
        said = shell(export_command, recipe, "-o", "m.artifact", "--no-goldens", "--json", *more)
        assert json.loads(said)["goldens"] == 0
    arguments = ["c.pt", "m.artifact", "-o", "v1.safetensors"]
    assert "goldens" not in shell(pack_command, *arguments, "--recipe", recipe, "--no-goldens")
    assert json.loads(shell(pack_command, *arguments, "--json"))["goldens"] == 0
    assert not Path("v1.goldens.safetensors").exists()
