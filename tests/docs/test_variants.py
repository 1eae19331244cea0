"""The code of docs/variants.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import page, python


@pytest.mark.slow
def test_the_page_on_variants(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", page("variants"), re.DOTALL)
    quiet = "import warnings; warnings.simplefilter('ignore', FutureWarning)  # of peft's own"
    said = python(tmp_path, quiet, block + 'print([*model.variants["lora"]])')
    assert said.strip().endswith("['customer-a']")
