"""The commands and the code of docs/engines.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.compiled import needs_compiler
from tests.support.pages import blocks, page, prepare_recipe, python, shell


@needs_compiler
@pytest.mark.slow
def test_the_page_on_engines(tmp_path: Path) -> None:
    prepare_recipe(tmp_path)
    text = page("engines")
    (commands,) = blocks(text, "sh")
    (code,) = blocks(text, "python")
    said = shell(tmp_path, commands)
    assert "replaced  engines/onnx/forward.onnx" in said
    assert (tmp_path / "tagger.onnx").exists()
    shown = shell(tmp_path, "weightswap inspect tagger.artifact")
    assert re.search(r"^engines +torch, aoti cpu-\S+, onnx$", shown, re.MULTILINE)
    assert python(tmp_path, code) == "onnx (2, 7, 5)\n"
