"""`weightswap pack` and what `weightswap inspect` shows of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.support.checkpoints import saved, saved_distributed, saved_shards
from weightswap_exporter import export, skeleton
from weightswap_exporter.commands.build import pack_command
from weightswap_tools.inspect.command import inspect_command

RECIPE = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 2).bfloat16()

def recipe():
    return {"model": build(), "args": (torch.zeros(1, 3),)}

def loading():
    def load(model, checkpoint):
        model.load_state_dict({"weight": checkpoint["w"], "bias": checkpoint["b"]})

    return {"model": build(), "load": load}
"""


class Shell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, status: int = 0) -> Any:
        result = CliRunner().invoke(pack_command, [*arguments, "-o", "v.safetensors", "--json"])
        assert result.exit_code == status, result.output
        return json.loads(result.stdout) if result.stdout.startswith("{") else result.output


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run commands in a folder with an artifact that takes bfloat16, and a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    with skeleton():
        model = nn.Linear(3, 2).bfloat16().eval()
    export(model, (torch.zeros(1, 3, dtype=torch.bfloat16),), out=tmp_path / "a.artifact")
    return Shell(tmp_path)


STATE = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}


def test_a_trainers_checkpoint_is_cast_and_inspected(shell: Shell) -> None:
    saved(shell.folder / "c.pt", {"model": STATE, "optimizer": {}})
    packed = shell("c.pt", "a.artifact", "--dtype", "bfloat16", "--label", "step=7")
    assert (packed["level"], packed["cast"]) == ("model", {"F32": ["bias", "weight"]})
    said = CliRunner().invoke(inspect_command, ["v.safetensors"]).output
    assert "cast       2 tensors from F32: bias, weight" in said
    document = json.loads(CliRunner().invoke(inspect_command, ["v.safetensors", "--json"]).output)
    assert document["stamp"]["cast"] == {"F32": ["bias", "weight"]}
    said = CliRunner().invoke(pack_command, ["c.pt", "a.artifact", "-o", "v.safetensors", "--dtype", "bfloat16"]).output
    assert "found in    model\ncast        2 tensors from F32\n" in said


def test_values_that_are_not_finite_are_said(shell: Shell) -> None:
    state = {key: value.bfloat16() for key, value in STATE.items()}
    state["weight"][0, :2] = torch.tensor([torch.nan, torch.inf])
    saved(shell.folder / "c.pt", state)
    packed = shell("c.pt", "a.artifact")
    assert packed["nonfinite"] == {"weight": {"nan": 1, "infinite": 1, "of": 6}}
    said = CliRunner().invoke(pack_command, ["c.pt", "a.artifact", "-o", "v.safetensors"])
    assert "warning: v.safetensors: weight is not finite: 1 NaN and 1 infinite of 6 values\n" in said.stderr


def test_folders_are_taken(shell: Shell) -> None:
    narrow = {key: value.bfloat16() for key, value in STATE.items()}
    saved_shards(shell.folder / "hf", narrow, ".safetensors")
    saved_distributed(shell.folder / "dcp", narrow)
    assert shell("hf", "a.artifact")["weights_id"] == shell("dcp", "a.artifact")["weights_id"]


def test_a_recipes_model_loads_the_checkpoint(shell: Shell) -> None:
    saved(shell.folder / "c.pt", {"w": STATE["weight"], "b": STATE["bias"]})
    packed = shell("c.pt", "a.artifact", "--recipe", "recipe.py:loading")
    saved(shell.folder / "d.pt", STATE)
    assert shell("d.pt", "a.artifact", "--recipe", "recipe.py:recipe")["weights_id"] == packed["weights_id"]


def test_a_level_and_a_prefix(shell: Shell) -> None:
    narrow = {f"net.{key}": value.bfloat16() for key, value in STATE.items()}
    wrong = {key: value + 1 for key, value in narrow.items()}
    saved(shell.folder / "c.pt", {"ema": narrow | {f"loss.{i}": torch.ones(1) for i in range(12)}, "model": wrong})
    saved(shell.folder / "d.pt", {key.removeprefix("net."): value for key, value in narrow.items()})
    packed = shell("c.pt", "a.artifact", "--level", "ema", "--prefix", "net.")
    assert (packed["level"], len(packed["ignored"])) == ("ema", 12)
    assert shell("d.pt", "a.artifact")["weights_id"] == packed["weights_id"]
    arguments = ["c.pt", "a.artifact", "-o", "v.safetensors", "--level", "ema", "--prefix", "net."]
    said = CliRunner().invoke(pack_command, arguments).output
    assert "found in    ema\n" in said
    assert "loss.9 and 2 more\n" in said


def test_help_names_every_recipe(shell: Shell) -> None:
    said = CliRunner().invoke(pack_command, ["--help"], env={"COLUMNS": "400"}).output
    assert "file.py:function, module:function or hf:DIR" in said


REFUSED = {
    "no dtype": (("c.pt", "a.artifact", "--dtype", "bf16"), 1, "'bf16'"),
    "another dtype": (("c.pt", "a.artifact"), 1, "expected BF16[2], found F32[2]"),
    "a recipe that is not there": (("c.pt", "a.artifact", "--recipe", "x.py:f"), 2, "no such file"),
    "a model that does not load it": (("n.pt", "a.artifact", "--recipe", "recipe.py:recipe"), 1, "Missing key(s)"),
    "a folder of something else": ((".", "a.artifact"), 1, "no checkpoint in this folder"),
}


@pytest.mark.parametrize(("arguments", "status", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_have_a_reason_and_a_status(arguments: tuple[str, ...], status: int, says: str, shell: Shell) -> None:
    saved(shell.folder / "c.pt", STATE)
    saved(shell.folder / "n.pt", {"other": torch.zeros(1)})
    assert says in str(shell(*arguments, status=status))
    assert not (shell.folder / "v.safetensors").exists()


def test_old_keys_are_left_out_where_they_are_named(shell: Shell) -> None:
    narrow = {key: value.bfloat16() for key, value in STATE.items()}
    saved(shell.folder / "c.pt", {"model": narrow | {"emb.position_ids": torch.ones(1)}})
    saved(shell.folder / "d.pt", narrow)
    assert "emb.position_ids: unexpected" in str(shell("c.pt", "a.artifact", status=1))
    packed = shell("c.pt", "a.artifact", "--ignore", "*.position_ids")
    assert packed["ignored"] == ["emb.position_ids"]
    assert shell("d.pt", "a.artifact")["weights_id"] == packed["weights_id"]
    assert "bias: missing" in str(shell("c.pt", "a.artifact", "--ignore", "*s", status=1))
    arguments = ["d.pt", "a.artifact", "-o", "v.safetensors", "--ignore", "*.position_ids"]
    said = CliRunner().invoke(pack_command, arguments)
    assert (said.exit_code, said.stderr) == (0, "warning: ignore='*.position_ids': matches no name of d.pt\n")


def test_a_models_own_code_does_not_see_what_is_ignored(shell: Shell) -> None:
    saved(shell.folder / "c.pt", STATE | {"old": torch.ones(1)})
    assert "old" in str(shell("c.pt", "a.artifact", "--recipe", "recipe.py:recipe", status=1))
    shell("c.pt", "a.artifact", "--recipe", "recipe.py:recipe", "--ignore", "old")
