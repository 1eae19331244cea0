"""Goldens on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.checkpoints import saved
from tests.support.goldens import goldens_at, goldens_of, verified
from tests.support.program import document, said
from weightswap_runtime import Artifact, load

RECIPE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 6).view(2, 3)
    return {"model": nn.Linear(3, 2).eval(), "args": (x,), "goldens": [(x,), (x + 1,)], "tolerance": (0.0, 0.5)}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goldens_recipe.py").write_text(RECIPE)
    saved(tmp_path / "c.pt", nn.Linear(3, 2).state_dict())


BUILD = "goldens_recipe.py:build"
EXPORT = ("export", BUILD, "-o", "m.artifact")
PACK = ("pack", "c.pt", "m.artifact", "-o", "v.safetensors")


def test_the_commands_record_what_a_recipe_asks_for() -> None:
    assert "goldens    2 cases\n" in said(*EXPORT)
    artifact = Artifact.open("m.artifact")
    assert goldens_of(artifact).record.tolerance == (0.0, 0.5)
    assert "goldens     2 cases\n" in said(*PACK, "--recipe", BUILD)
    assert verified(goldens_at("v.safetensors", artifact), load("m.artifact", "v.safetensors")) == "goldens"
    assert document(*PACK, "--recipe", BUILD)["goldens"] == 2


def test_inputs_of_a_skeleton_are_reported_as_inputs() -> None:
    assert "inputs     2 cases\n" in said(*EXPORT, "--skeleton")
    told = document(*EXPORT, "--skeleton")
    assert (told["goldens"], told["inputs"]) == (0, 2)


def test_goldens_are_inspected_with_their_weight_file_or_artifact() -> None:
    said(*EXPORT)
    weights_id = document(*PACK, "--recipe", BUILD)["weights_id"]
    line = f"goldens    2 of forward; of the weights {weights_id[:12]}; within rtol 0, atol 0.5\n"
    assert line in said("inspect", "v.safetensors")
    assert "2 of forward" in said("inspect", "m.artifact")
    told = document("inspect", "v.safetensors")["goldens"]
    assert (told["weights_id"], told["tolerance"], told["cases"]) == (weights_id, [0.0, 0.5], {"forward": 2})
    assert told["environment"]["torch"] == torch.__version__
    Path("v.goldens.safetensors").unlink()
    assert "goldens" not in said("inspect", "v.safetensors")
    assert document("inspect", "v.safetensors")["goldens"] is None


def test_the_commands_leave_goldens_out() -> None:
    for more in ((), ("--skeleton",)):
        assert document(*EXPORT, "--no-goldens", *more)["goldens"] == 0
    assert "goldens" not in said(*PACK, "--recipe", BUILD, "--no-goldens")
    assert document(*PACK)["goldens"] == 0
    assert not Path("v.goldens.safetensors").exists()
