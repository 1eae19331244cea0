"""`weightswap export --ranks`, and what the commands print of such an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from tests.support.split import llama
from weightswap_exporter.commands.build import export_command
from weightswap_runtime import Artifact
from weightswap_runtime.format.manifest import Split
from weightswap_tools.inspect.command import inspect_command

RECIPE = """
from tests.support.split import PACKED_PLAN, Packed, sample
from weightswap_exporter import Parallel

def split():
    model = Packed().eval()
    return {"model": model, "parallel": Parallel(2, PACKED_PLAN)} | sample(model)

def alone():
    model = Packed().eval()
    return {"model": model} | sample(model)
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe_of_ranks.py").write_text(RECIPE)


def run(app: Typer, *arguments: str) -> str:
    return " ".join(CliRunner().invoke(app, arguments, env={"COLUMNS": "400"}).output.split())


def ranks_of(path: str) -> Split:
    ranks = Artifact.open(path).manifest.ranks
    assert ranks
    return ranks


@pytest.mark.usefixtures("_here")
def test_recipes_have_a_plan_and_the_command_the_number_of_ranks() -> None:
    said = run(export_command, "recipe_of_ranks.py:split", "-o", "2.artifact")
    assert "ranks 2, each with " in said
    document = json.loads(run(export_command, "recipe_of_ranks.py:split", "-o", "4.artifact", "--ranks", "4", "--json"))
    assert document["ranks"] == 4
    assert ranks_of("2.artifact").cuts == ranks_of("4.artifact").cuts
    assert ranks_of("2.artifact").whole == ranks_of("4.artifact").whole
    said = run(export_command, "recipe_of_ranks.py:alone", "-o", "none.artifact", "--ranks", "2")
    assert "Packed has no plan of its own" in said
    assert not Path("none.artifact").exists()


@pytest.mark.usefixtures("_here")
def test_a_directory_has_the_plan_of_its_model() -> None:
    model: Any = llama(num_hidden_layers=1)
    model.save_pretrained("llama")
    said = run(export_command, "hf:llama", "-o", "2.artifact", "--ranks", "2")
    assert "8 of 12 are cut" in said
    assert ranks_of("2.artifact").cuts.keys() >= {"lm_head.weight", "model.layers.0.self_attn.o_proj.weight"}
    said = run(export_command, "hf:llama", "-o", "3.artifact", "--ranks", "3")
    assert "model.layers.0.self_attn.q_proj: has 8 heads, which 3 ranks do not divide" in said
    said = run(export_command, "hf:llama", "-o", "3.artifact", "--ranks", "2", "--task", "generate")
    assert "what generates is not split over ranks" in said


@pytest.mark.usefixtures("_here")
def test_inspect_shows_the_cut_of_each_weight() -> None:
    run(export_command, "recipe_of_ranks.py:split", "-o", "2.artifact")
    said = run(inspect_command, "2.artifact")
    assert "on ranks" in said
    assert "dimension 0 in 2, in each of 2 parts" in said
    run(inspect_command, "2.artifact", "--html", "page.html")
    page = Path("page.html").read_text()
    assert "dimension 0 in 2, in each of 2 parts" in page
