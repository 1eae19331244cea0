"""The page of a server with workers: all processes, and what they have answered together."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.page.conftest import OpenPage, section
from tests.server.worker_processes import Fleet, serving

WIDE = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with serving(
        tmp_path, 2, "--follow", str(tmp_path / "desired_store"), "--admin-port", "0", "--worker-timeout", "6"
    ) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_processes_are_shown(fleet: Fleet, open_page: OpenPage, number: int) -> None:
    """Each with its weights; one that is killed is another then, one that is stopped is silent before; and the load is
    that of all."""
    assert fleet.process.stdout is not None
    found = re.match(r"(http://\S+) is for operators", fleet.process.stdout.readline())
    assert found is not None
    page = open_page(found[1])
    rows = section(page, "processes").locator("tbody tr")
    for row, name in enumerate(("owner", "worker 0", "worker 1")):
        rows.nth(row).get_by_text(name).wait_for()
        rows.nth(row).get_by_text("ready").wait_for()
    wanted = fleet.desire(2)
    for row in range(3):
        rows.nth(row).get_by_text(wanted[:12]).first.wait_for()
    for _ in range(40):
        fleet.infer()
    page.wait_for_function("""() => [...document.querySelectorAll("[role=img]")].some(
        (one) => /answered.*, highest [1-9]/.test(one.ariaLabel))""")
    pid = int(rows.nth(1).locator("td").last.inner_text())
    assert pid in fleet.children
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        rows.nth(1).get_by_text("silent for").wait_for()
    rows.nth(1).locator("td").last.filter(has_not_text=str(pid)).wait_for()
    rows.nth(1).get_by_text("ready").wait_for()
    page.set_viewport_size({"width": 360, "height": 800})
    assert not page.evaluate(WIDE)
    cells = rows.nth(1).locator("td")
    assert {cells.nth(at).bounding_box()["x"] for at in range(3)} == {cells.last.bounding_box()["x"]}
    assert not page.evaluate(
        "document.querySelector('.wide').scrollWidth > document.querySelector('.wide').clientWidth"
    )
