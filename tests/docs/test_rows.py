"""The code of docs/rows.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python


@pytest.mark.slow
def test_the_page_on_rows(tmp_path: Path) -> None:
    train, serve, memory = blocks(page("rows"), "python")
    full, *deltas = python(tmp_path, train).splitlines()
    assert re.fullmatch(r"step-000000001-[0-9a-f]{12}\.safetensors 6400068", full)
    assert [re.sub("-[0-9a-f]{12}", "", line).split()[0] for line in deltas] == [
        "step-000000003.delta.safetensors",
        "step-000000005.delta.safetensors",
    ]
    assert all(int(line.split()[1]) < 8_000 for line in deltas)
    assert python(tmp_path, serve) == "delta\ndelta\n"
    said = python(tmp_path, train, serve.partition("\n\n")[0], memory)
    assert said.splitlines()[-3:] == ["delta", "full", "delta"]
