"""The code of docs/memory.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import page, python


def test_the_page_on_memory(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page("memory"), re.DOTALL)
    lines = python(tmp_path, code).splitlines()
    ids = {
        re.fullmatch(rf"{step} {{'step': '{step}'}} ([0-9a-f]{{12}})", line)[1] for step, line in enumerate(lines, 1)
    }
    assert len(ids) == 3
