"""The code of docs/variants.md runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python


@pytest.mark.slow
def test_the_page_on_variants(tmp_path: Path) -> None:
    (block,) = blocks(page("variants"), "python")
    quiet = "import warnings; warnings.simplefilter('ignore', FutureWarning)  # of peft's own"
    said = python(tmp_path, quiet, block + 'print([*model.variants["lora"]])')
    assert said.strip().endswith("['customer-a']")
