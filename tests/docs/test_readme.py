"""The code of the README and of the tour runs as it stands, the build side in one process and the server in another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests import ROOT
from tests.support.pages import blocks, python, served, shell
from tests.support.watched import eventually


def run_both_sides(page: Path, folder: Path, most: int, place: int = 0) -> list[str]:
    """What a build side and its server print; together they have at most so many lines of code.

    place: which build side of the page, with the server that follows it.
    """
    build, serve = blocks(page.read_text(), "python")[2 * place :][:2]
    assert sum(bool(line.strip()) for line in (build + serve).splitlines()) <= most
    return [python(folder, code) for code in (build, serve)]


def test_the_twelve_lines(tmp_path: Path) -> None:
    said = run_both_sides(ROOT / "README.md", tmp_path, 12)
    assert re.fullmatch(r"1 [0-9a-f]{64}\n", said[1])


def test_in_production(tmp_path: Path, unused_port: int) -> None:
    text = (ROOT / "README.md").read_text()
    python(tmp_path, blocks(text, "python")[0])
    ((block, answer),) = re.findall(r"```sh\n(mkdir service.*?)```\n+```json\n(.*?)\[\.\.\.\n```", text, re.DOTALL)
    make, serve, *commands = re.sub(" *#.*", "", block).splitlines()
    shell(tmp_path, make)
    url = f"http://127.0.0.1:{unused_port}/v2/models/digits"
    with served(tmp_path, f"{serve} --port {unused_port} --interval 0.1"):
        said = shell(tmp_path, "\n".join(commands).replace("localhost:8000", f"127.0.0.1:{unused_port}"))
        assert answer in said
        assert eventually(lambda: versions(url) == ["2"])


def versions(url: str) -> list[str]:
    with urlopen(url, timeout=120) as answer:
        found: list[str] = json.load(answer)["versions"]
        return found


def test_the_tour(tmp_path: Path) -> None:
    said = run_both_sides(ROOT / "docs" / "tour.md", tmp_path, 25)
    assert re.fullmatch(r"1 \{'step': '2'\} \d+\.\d µs\ntorch.Size\(\[5, 10\]\) [0-9a-f]{64}\n", said[1])


@pytest.mark.slow
def test_text_across_a_live_swap(tmp_path: Path) -> None:
    said = run_both_sides(ROOT / "docs" / "tour.md", tmp_path, 15, place=1)
    begun, later = re.findall(r"\[([0-9, ]+)\]", said[1])
    check = (
        "from weightswap_runtime import load\n"
        "for n in (1, 2):\n"
        "    model = load('llama.artifact', f'llama-{n}.safetensors')\n"
        "    print(*model.generate([1, 15, 31], max_new_tokens=8), sep=', ')"
    )
    assert python(tmp_path, check).splitlines() == [begun, later]
    assert begun != later
