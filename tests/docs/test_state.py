"""The code of docs/state.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import page, python, shell


@pytest.mark.slow
def test_the_page_on_state(tmp_path: Path) -> None:
    text = page("state")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    said = python(tmp_path, "\n".join(blocks)).split()
    assert 1 <= len(said) <= 8
    assert all(0 <= int(token) < 64 for token in said)
    (commands,) = re.findall(r"```shell\n(.*?)```", text, re.DOTALL)
    assert 1 <= len(shell(tmp_path, commands).split(",")) <= 8
