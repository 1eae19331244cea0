"""The commands and the code of docs/quantised.md run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.packages import needs
from tests.support.pages import blocks, page, python, shell


@needs("torchao")
@pytest.mark.slow
def test_the_page_on_quantised_weights(tmp_path: Path) -> None:
    text = page("quantised")
    build, serve, floats = blocks(text, "python")
    (swap,) = blocks(text, "sh")
    python(tmp_path, build, floats)
    assert python(tmp_path, serve) == "torch.Size([3, 8])\n"
    assert "0.weight.qdata" in shell(tmp_path, "weightswap inspect int8.artifact")
    assert "generation  0: floats.safetensors" in shell(tmp_path, swap)
