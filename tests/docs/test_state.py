"""The code of docs/state.md runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python, shell


@pytest.mark.slow
def test_the_page_on_state(tmp_path: Path) -> None:
    text = page("state")
    parts = blocks(text, "python")
    assert len(parts) == 5
    said = python(tmp_path, "\n".join(parts)).split()
    assert 1 <= len(said) <= 8
    assert all(0 <= int(token) < 64 for token in said)
    (commands,) = blocks(text, "shell")
    assert 1 <= len(shell(tmp_path, commands).split(",")) <= 8
