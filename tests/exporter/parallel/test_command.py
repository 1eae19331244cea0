"""`weightswap export --ranks`, and what the commands print of such an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import document, said
from tests.support.split import llama
from weightswap_runtime import Artifact

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


def words(*arguments: object, status: int = 0) -> str:
    return " ".join(said(*arguments, status=status, width=400).split())


SPLIT = ("export", "recipe_of_ranks.py:split", "-o")


def ranks_of(path: str) -> Any:
    ranks = Artifact.open(path).manifest.ranks
    assert ranks
    return ranks


@pytest.mark.usefixtures("_here")
def test_recipes_have_a_plan_and_the_command_the_number_of_ranks() -> None:
    assert "ranks 2, each with " in words(*SPLIT, "2.artifact")
    assert document(*SPLIT, "4.artifact", "--ranks", "4")["ranks"] == 4
    assert ranks_of("2.artifact").cuts == ranks_of("4.artifact").cuts
    assert ranks_of("2.artifact").whole == ranks_of("4.artifact").whole
    alone = words("export", "recipe_of_ranks.py:alone", "-o", "none.artifact", "--ranks", "2", status=1)
    assert "Packed has no plan of its own" in alone
    assert not Path("none.artifact").exists()


@pytest.mark.usefixtures("_here")
def test_a_directory_has_the_plan_of_its_model() -> None:
    model: Any = llama(num_hidden_layers=1)
    model.save_pretrained("llama")
    assert "8 of 12 are cut" in words("export", "hf:llama", "-o", "2.artifact", "--ranks", "2")
    assert ranks_of("2.artifact").cuts.keys() >= {"lm_head.weight", "model.layers.0.self_attn.o_proj.weight"}
    three = words("export", "hf:llama", "-o", "3.artifact", "--ranks", "3", status=1)
    assert "model.layers.0.self_attn.q_proj: has 8 heads, which 3 ranks do not divide" in three
    generating = ("export", "hf:llama", "-o", "3.artifact", "--ranks", "2", "--task", "generate")
    assert "what generates is not split over ranks" in words(*generating, status=2)


@pytest.mark.usefixtures("_here")
def test_inspect_shows_the_cut_of_each_weight() -> None:
    words(*SPLIT, "2.artifact")
    words("inspect", "2.artifact", "--html", "page.html")
    for text in (words("inspect", "2.artifact"), Path("page.html").read_text()):
        assert "8 of 10 are cut" in text
        assert "dimension 0 in 2, in each of 2 parts" in text
    assert "on ranks" in words("inspect", "2.artifact")
