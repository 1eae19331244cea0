"""The commands of docs/inspect.md run as they stand, and give what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, prepare_recipe, shell


@pytest.mark.slow
def test_the_page_on_inspecting(tmp_path: Path) -> None:
    (commands,) = blocks(prepare_recipe(tmp_path), "sh")
    shell(tmp_path, "\n".join(re.findall(r".* export .*|.* pack checkpoint.*", commands)))
    text = page("inspect")
    (commands,) = blocks(text, "sh")
    (tree,) = re.findall(r"```\n(tagger.*?)```", text, re.DOTALL)
    said = shell(tmp_path, commands)
    assert tree in said
    assert "forward takes tokens (a tensor of 64-bit integers, batch × length) and " in said
    assert "level      the top\n" in said
    for name in ("v1.safetensors", "checkpoint.pt"):
        document = json.loads(shell(tmp_path, f"weightswap inspect {name} --json"))
        assert document.keys() <= set(re.findall(r"`(\w+)`", text)) | {"kind"}
    assert (tmp_path / "tagger.html").exists()
    document = json.loads(shell(tmp_path, "weightswap inspect tagger.artifact --json"))
    assert document.keys() <= set(re.findall(r"`(\w+)`", text)) | {"kind"}
