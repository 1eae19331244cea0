"""Records are read by several threads at once, from the first one on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests import ROOT

READING = """
import sys
from threading import Barrier, Thread

import msgspec

from weightswap_runtime import decoding

sys.setswitchinterval(1e-6)
threads = 4
for _ in range(400):
    part = msgspec.defstruct("Part", [(f"p{number}", int | str | None, None) for number in range(8)])
    kind = msgspec.defstruct("Kind", [(f"f{number}", dict[str, list[part]], {}) for number in range(8)])
    raw = {"f0": {"a": [{"p0": 1}]}, "f7": {"b": [{"p7": "x"}]}}
    text = getattr(msgspec, sys.argv[1]).encode(raw) if sys.argv[1] != "values" else raw
    read = {"json": decoding.from_json, "msgpack": decoding.from_msgpack, "values": decoding.converted}[sys.argv[1]]
    begin, found = Barrier(threads), []

    def run():
        begin.wait()
        found.append(read(text, kind))

    running = [Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert [(each.f0["a"][0].p0, each.f7["b"][0].p7) for each in found] == [(1, "x")] * threads
"""


@pytest.mark.parametrize("how", ["json", "msgpack", "values"])
def test_threads_read_the_first_records_of_a_kind_at_once(how: str) -> None:
    """In a process of their own, which msgspec alone would end."""
    done = subprocess.run([sys.executable, "-c", READING, how], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_records_are_read_here_alone() -> None:
    found = {
        path.name
        for folder in ("exporter", "runtime")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and re.fullmatch(r"msgspec\.(convert|json\.decode|msgpack\.decode)", ast.unparse(node.func))
        and (any(keyword.arg == "type" for keyword in node.keywords) or len(node.args) > 1)
    }
    assert found == {"decoding.py"}
