"""The code of docs/state.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import page, python


def test_the_page_on_state(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page("state"), re.DOTALL)
    assert len(blocks) == 4
    said = python(tmp_path, "\n".join(blocks)).split()
    assert 1 <= len(said) <= 8
    assert all(0 <= int(token) < 64 for token in said)
