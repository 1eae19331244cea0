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


def test_the_commands(tmp_path: Path) -> None:
    page = (README.parent / "docs" / "commands.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "recipe.py").write_text(recipe)
    prepare = (
        "import numpy, recipe, torch; torch.save(recipe.Tagger().state_dict(), 'checkpoint.pt');"
        "numpy.savez('inputs.npz', tokens=numpy.ones((3, 9), 'i8'), mask=numpy.ones((3, 9), 'f4'))"
    )
    program = f"{sys.executable} -W error -c 'from weightswap_runtime.cli import main; main()'"
    script = f'set -e\n{sys.executable} -c "{prepare}"\n{commands.replace("weightswap ", program + " ")}'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "forward(tokens: I64[batch, length], mask: F32[batch, length])" in done.stdout
    assert (tmp_path / "outputs.safetensors").exists()
