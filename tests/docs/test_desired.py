"""The code and the commands of docs/desired.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python, shell


@pytest.mark.slow
def test_the_page_on_the_desired_state(tmp_path: Path) -> None:
    (build, *_) = blocks(page("operations"), "python")
    (service,) = blocks(page("desired"), "python")
    (commands,) = blocks(page("desired"), "sh")
    python(tmp_path, build)
    promoted, rolled_back, refused = python(tmp_path, service).splitlines()
    assert (promoted, rolled_back) == ("{'step': '2'}", "{'step': '1'} ana")
    assert re.match(r"superseded: v2.safetensors: its weights \w+ were desired by trainer, then withdrawn", refused)
    said = shell(tmp_path, commands)
    assert [line.split()[1] for line in said.splitlines() if line.startswith("revision ")] == ["4", "5", "6", "7"]
    assert '"revision": 7' in said
