"""`weightswap pack` and what `weightswap inspect` shows of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import saved, saved_distributed, saved_shards
from tests.support.program import document, run, said
from weightswap_exporter import export, skeleton

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


PACK = ("a.artifact", "-o", "v.safetensors")


def packed(source: str, *options: str) -> Any:
    return document("pack", source, *PACK, *options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an artifact that takes bfloat16, and a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    with skeleton():
        model = nn.Linear(3, 2).bfloat16().eval()
    export(model, (torch.zeros(1, 3, dtype=torch.bfloat16),), out=tmp_path / "a.artifact")
    return tmp_path


STATE = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
NARROW = {key: value.bfloat16() for key, value in STATE.items()}


def test_a_trainers_checkpoint_is_cast_and_inspected(here: Path) -> None:
    saved(here / "c.pt", {"model": STATE, "optimizer": {}})
    found = packed("c.pt", "--dtype", "bfloat16", "--label", "step=7")
    assert (found["level"], found["cast"]) == ("model", {"F32": ["bias", "weight"]})
    assert "cast       2 tensors from F32: bias, weight" in said("inspect", "v.safetensors")
    assert document("inspect", "v.safetensors")["stamp"]["cast"] == {"F32": ["bias", "weight"]}
    text = said("pack", "c.pt", *PACK, "--dtype", "bfloat16")
    assert "found in    model\ncast        2 tensors from F32\n" in text


def test_values_that_are_not_finite_are_said(here: Path) -> None:
    saved(here / "c.pt", NARROW | {"weight": torch.tensor([[torch.nan, torch.inf, 1], [1, 1, 1]]).bfloat16()})
    assert packed("c.pt")["nonfinite"] == {"weight": {"nan": 1, "infinite": 1, "of": 6}}
    says = "warning: v.safetensors: weight is not finite: 1 NaN and 1 infinite of 6 values\n"
    assert says in run("pack", "c.pt", *PACK).stderr


def test_folders_are_taken(here: Path) -> None:
    saved_shards(here / "hf", NARROW, ".safetensors")
    saved_distributed(here / "dcp", NARROW)
    assert packed("hf")["weights_id"] == packed("dcp")["weights_id"]


def test_a_recipes_model_loads_the_checkpoint(here: Path) -> None:
    saved(here / "c.pt", {"w": STATE["weight"], "b": STATE["bias"]})
    saved(here / "d.pt", STATE)
    found = [packed("c.pt", "--recipe", "recipe.py:loading"), packed("d.pt", "--recipe", "recipe.py:recipe")]
    assert found[0]["weights_id"] == found[1]["weights_id"]
    says = "file.py:function, module:function or hf:DIR"  # of the help, which is one line here
    assert says in said("pack", "--help", width=400)


def test_a_level_and_a_prefix(here: Path) -> None:
    narrow = {f"net.{key}": value for key, value in NARROW.items()}
    wrong = {key: value + 1 for key, value in narrow.items()}
    saved(here / "c.pt", {"ema": narrow | {f"loss.{i}": torch.ones(1) for i in range(12)}, "model": wrong})
    saved(here / "d.pt", NARROW)
    found = packed("c.pt", "--level", "ema", "--prefix", "net.")
    assert (found["level"], len(found["ignored"])) == ("ema", 12)
    assert packed("d.pt")["weights_id"] == found["weights_id"]
    text = said("pack", "c.pt", *PACK, "--level", "ema", "--prefix", "net.")
    assert "found in    ema\n" in text
    assert "loss.9 and 2 more\n" in text


REFUSED = {
    "no dtype": (("c.pt", *PACK, "--dtype", "bf16"), 1, "'bf16'"),
    "another dtype": (("c.pt", *PACK), 1, "expected BF16[2], found F32[2]"),
    "a recipe that is not there": (("c.pt", *PACK, "--recipe", "x.py:f"), 2, "no such file"),
    "a model that does not load it": (("n.pt", *PACK, "--recipe", "recipe.py:recipe"), 1, "Missing key(s)"),
    "a folder of something else": ((".", *PACK), 1, "no checkpoint in this folder"),
}


@pytest.mark.parametrize(("arguments", "status", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_have_a_reason_and_a_status(arguments: tuple[str, ...], status: int, says: str, here: Path) -> None:
    saved(here / "c.pt", STATE)
    saved(here / "n.pt", {"other": torch.zeros(1)})
    assert says in said("pack", *arguments, status=status)
    assert not (here / "v.safetensors").exists()


def test_old_keys_are_left_out_where_they_are_named(here: Path) -> None:
    saved(here / "c.pt", {"model": NARROW | {"emb.position_ids": torch.ones(1)}})
    saved(here / "d.pt", NARROW)
    assert "emb.position_ids: unexpected" in said("pack", "c.pt", *PACK, status=1)
    found = packed("c.pt", "--ignore", "*.position_ids")
    assert found["ignored"] == ["emb.position_ids"]
    assert packed("d.pt")["weights_id"] == found["weights_id"]
    assert "bias: missing" in said("pack", "c.pt", *PACK, "--ignore", "*s", status=1)
    says = "warning: ignore='*.position_ids': matches no name of d.pt\n"
    assert run("pack", "d.pt", *PACK, "--ignore", "*.position_ids").stderr == says


def test_a_models_own_code_does_not_see_what_is_ignored(here: Path) -> None:
    saved(here / "c.pt", STATE | {"old": torch.ones(1)})
    assert "old" in said("pack", "c.pt", *PACK, "--recipe", "recipe.py:recipe", status=1)
    packed("c.pt", "--recipe", "recipe.py:recipe", "--ignore", "old")
