"""The code of docs/ranks.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.pages import blocks, page, python, shell


@pytest.mark.slow
def test_the_page_on_ranks(tmp_path: Path) -> None:
    built, served = blocks(page("ranks"), "python")
    command = re.search(r"```sh\n(.*?)```", page("ranks"), re.DOTALL)
    assert command is not None
    python(tmp_path, built)
    (tmp_path / "serve.py").write_text(served)
    said = re.search(
        r"served (\w{12}) then again (\w{12})",
        shell(tmp_path, command.group(1).replace("torchrun", f"{warm.python()} -m torch.distributed.run")),
    )
    assert said is not None
    assert said.group(1) != said.group(2)
