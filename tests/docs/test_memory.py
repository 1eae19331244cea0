"""The code of docs/memory.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import page, python, served


def test_the_page_on_memory(tmp_path: Path) -> None:
    here, sending = re.findall(r"```python\n(.*?)```", page("memory"), re.DOTALL)
    (command,) = re.findall(r"```sh\n(.*?)```", page("memory"), re.DOTALL)
    found = [line.split(maxsplit=3) for line in python(tmp_path, here).splitlines()]
    assert [line[:3] for line in found] == [[str(step), "{'step':", f"'{step}'}}"] for step in (1, 2, 3)]
    assert len({line[3] for line in found}) == 3
    with served(tmp_path, command.strip() + " --port 0"):
        assert python(tmp_path, here + sending).splitlines()[-1] == "0 {'step': '4'}"
