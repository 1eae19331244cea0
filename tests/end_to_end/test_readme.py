"""The README's code runs as it stands, the build side in one process and the server in another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_tour(tmp_path: Path) -> None:
    build, serve = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in (build + serve).splitlines()) <= 25
    said = []
    for code in (build, serve):
        command = [sys.executable, "-W", "error", "-c", code]
        said.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert re.fullmatch(r"1 \{'step': '2'\} \d+\.\d µs\ntorch.Size\(\[5, 10\]\) [0-9a-f]{64}\n", said[1])


def test_every_linked_page_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
