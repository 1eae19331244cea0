"""The commands and the code of the page on comparing run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, prepare_recipe, python, shell
from weightswap_tools.diff.weights import QUANTITIES

PAGE = page("diff")
FILES = """
import recipe, torch
from safetensors.torch import save_file
from weightswap_exporter import export, pack
torch.manual_seed(0)
built = recipe.build()
model = built["model"]
export(**built, out="tagger.artifact")
export(torch.nn.Linear(2, 2).eval(), (torch.zeros(2),), out="other.artifact")
pack(model, "tagger.artifact", out="v1.safetensors")
pack(model, "tagger.artifact", out="served.safetensors")
with torch.no_grad():
    model.head.bias += 0.01
save_file(model.state_dict(), "tuned.safetensors")
pack(model, "tagger.artifact", out="v2.safetensors")
pack(model, "tagger.artifact", out="candidate.safetensors")
ema = {name: value.clone() for name, value in model.state_dict().items()}
ema["head.bias"] *= 0.5
torch.save({"model": model.state_dict(), "ema": ema, "epoch": 3}, "last.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    prepare_recipe(folder)
    python(folder, FILES)
    return folder


@pytest.mark.slow
def test_the_commands(folder: Path) -> None:
    tour, pipeline = blocks(PAGE, "sh")
    said = shell(folder, tour)
    assert said.count("1 changed, 2 the same") == 5
    assert "after       last.pt, level ema (3 tensors, 6.7 kB)" in said
    assert "verdict     Weight files of one do not fit the other" in said
    assert shell(folder, pipeline).count("passed ") == 4
    assert "What changed in the weights" in (folder / "diff.html").read_text()


@pytest.mark.slow
def test_the_code(folder: Path) -> None:
    (code,) = blocks(PAGE, "python")
    first, *_, last = python(folder, code).splitlines()
    assert first.startswith("changed head.bias 0.0")
    assert last == "()"


def test_every_quantity_is_explained() -> None:
    rows = [line for line in PAGE.partition("## The quantities")[2].splitlines() if line.startswith("- `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(": ")[0])}
    assert explained == QUANTITIES.keys()
