"""The commands and the code of docs/parity.md run as they stand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.pages import blocks, page, prepare_recipe, python, shell

TAGGER = """
import recipe, torch
from weightswap_exporter import export, pack
torch.manual_seed(0)
built = recipe.build()
model, artifact, (tokens, mask) = built["model"], "tagger.artifact", built["args"]
export(**built, out=artifact, engines=["onnx"])
pack(model, artifact, out="v1.safetensors")
pack(recipe.Tagger(), artifact, out="v2.safetensors")
"""


@pytest.mark.slow
def test_the_page_on_parity(tmp_path: Path) -> None:
    prepare_recipe(tmp_path)
    text = page("parity")
    test, more, located = blocks(text, "python")
    (commands,) = blocks(text, "sh")
    assert len([line for line in test.splitlines() if line]) <= 10
    assert "aten.embedding.default of embed.weight" in python(tmp_path, TAGGER, located)
    (tmp_path / "test_tagger.py").write_text(test + TAGGER + more)
    command = [warm.python(), "-m", "pytest", "-q", "--weightswap-update-goldens", "test_tagger.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout
    assert (tmp_path / "kept" / "tagger.goldens.safetensors").exists()
    said = shell(tmp_path, commands)
    assert said.count("verified, in") == 2
    assert '"same": true' in said
    assert (tmp_path / "report.html").exists()
