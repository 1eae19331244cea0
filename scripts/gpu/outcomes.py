"""Plugin of pytest that writes each test's outcome to the file $OUTCOMES at once, so that a run that is killed has it.

A line is a JSON list: ["collected", NODEID, ...], ["begun", NODEID], or [OUTCOME, NODEID]. A test that has failed in
one of its phases has failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

WORDS = ("passed", "failed", "skipped", "missing")


class Outcomes(NamedTuple):
    """The node ids of tests by outcome. `missing` have not ended, and `running` have begun of those."""

    passed: list[str]
    failed: list[str]
    skipped: list[str]
    missing: list[str]
    running: list[str]


def read(path: Path) -> Outcomes:
    """Return the outcomes in a file, whose last line may be incomplete."""
    found, begun = dict[str, str](), list[str]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            word, *names = json.loads(line)
        except ValueError:
            continue
        if word == "begun":
            begun += names
        for name in names:
            before = found.setdefault(name, "missing")
            if before != "failed" and word not in ("begun", "collected"):
                found[name] = word
    by_outcome = ([name for name, each in found.items() if each == outcome] for outcome in WORDS)
    return Outcomes(*by_outcome, [name for name in begun if found[name] == "missing"])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist report to a process that writes
        config.pluginmanager.register(Writer(Path(os.environ["OUTCOMES"])))


class Writer:
    """Hooks of pytest that write to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, word: str, names: Sequence[str]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([word, *names]) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", [item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._write("collected", ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begun", [nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.outcome, [report.nodeid])
