"""`weightswap swap --watch`, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.program import run
from tests.support.tiny import TinyArtifact
from tests.support.watched import Directory, environment

SWAP = """
import signal

from weightswap_tools.program import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background, it is ignored
main()
"""


@contextmanager
def watch_command(tiny: TinyArtifact, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [warm.python(), "-c", SWAP, "swap", str(tiny.path), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            break
    return lines


def test_the_command_prints_each_event_until_it_is_interrupted(
    tiny: TinyArtifact, directory: Directory, weight_file: Any
) -> None:
    first = weight_file(7)
    with watch_command(tiny, str(first), "--watch", str(directory.path), "--interval", "0.01") as process:
        lines = lines_until(process, "committed")
        directory.write(1)
        lines += lines_until(process, "committed")
        directory.damaged(2)
        lines += lines_until(process, "skipped")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
    assert [line.split()[0].rstrip(":") for line in lines] == [
        *("staging", "staged", "committed"),
        *("staging", "staged", "committed"),
        *("staging", "refused", "skipped"),
    ]
    assert "DigestMismatch" in lines[-1]


@pytest.mark.slow
def test_events_are_lines_of_json_even_with_names_that_are_not_text(tiny: TinyArtifact, tmp_path: Path) -> None:
    directory = Directory(tiny, Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    directory.write(1)
    directory.damaged(2)
    arguments = ("--watch", str(directory.path), "--interval", "0.01", "--start", "all", "--json")
    with watch_command(tiny, *arguments) as process:
        lines = lines_until(process, "skipped")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    documents = [json.loads(line) for line in lines]
    assert [document["kind"] for document in documents] == [
        *("staging", "staged", "committed"),
        *("staging", "refused", "skipped"),
    ]
    assert documents[2]["receipt"]["generation"] == 0
    assert documents[5]["error"]["error"] == "DigestMismatch"
    assert len(documents[5]["error"]["problems"]) == 1
    assert all(r"/\udcff/" in document["source"] for document in documents)
    assert r"/\udcff/" in documents[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "give files, or --watch DIR"),
        (("--watch", "x", "--interval", "0"), 2, "expected seconds, more than 0"),
        (("nowhere.safetensors", "--watch", "x"), 1, "cannot be opened"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], status: int, says: str, tiny: TinyArtifact) -> None:
    assert says in run("swap", tiny.path, *arguments, status=status).stderr
