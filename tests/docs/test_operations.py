"""The code of docs/operations.md runs as it stands, and the page names every metric and every error of a swap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python


@pytest.mark.slow
def test_the_page_on_operations(tmp_path: Path) -> None:
    text = page("operations")
    build, serve, canary, watch, asynchronous = blocks(text, "python")
    assert python(tmp_path, build) == "296 of 258600 bytes change\n"
    said = python(tmp_path, serve).splitlines()
    assert re.fullmatch(
        r"goldens \{'step': '2'\} \d+\.\d µs", next(line for line in said if line.startswith("goldens"))
    )
    kinds = [line.split(" ", 2)[:2] for line in said[-5:]]
    assert kinds == [["0", "full"], ["1", "full"], ["2", "rollback"], ["3", "delta"], ["4", "partial"]]
    assert said[-4].endswith("v2.safetensors deploy 42")
    assert re.fullmatch(r"0 of \d\d answers were wrong; \{'step': '2'\} are served\n", python(tmp_path, canary))
    seen = python(tmp_path, watch)
    assert f"committed for watch: {tmp_path}/outbox/v2.safetensors" in seen
    assert 'weightswap_swaps_total{kind="full",model="tagger",outcome="committed"} 1.0' in seen
    assert python(tmp_path, asynchronous) == "torch.Size([3, 10]) 2\n"
    metrics = set(re.findall(r"`(weightswap_\w+)`", text))
    assert [name for name in metrics if name not in seen] == []


def test_every_error_is_explained() -> None:
    from weightswap_runtime import errors

    text = page("operations")
    refused = [name for name in errors.__all__ if issubclass(getattr(errors, name), errors.SwapError)]
    assert [name for name in refused if name != "SwapError" and f"`{name}`" not in text] == []
