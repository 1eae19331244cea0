"""The commands of docs/commands.md run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import blocks, prepare_recipe, shell


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    (commands,) = blocks(prepare_recipe(tmp_path), "sh")
    said = shell(tmp_path, commands)
    assert "forward(tokens: I64[batch, length], mask: F32[batch, length])" in said
    assert (tmp_path / "outputs.safetensors").exists()
