"""A browser for reports, if one is installed. Its console messages and network requests are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browser
from weightswap_tools.reports.blocks import Report
from weightswap_tools.reports.page import write_report

__all__ = ["browser", "open_report"]
Open = Callable[..., Any]


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open reports in pages; fails at the end if there were console messages or network requests."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_page(report: Report, **options: Any) -> Any:
        path = tmp_path / "report.html"
        write_report(path, report)
        options = {"reduced_motion": "reduce", "viewport": {"width": 1200, "height": 900}} | options
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        assert requests.pop() == path.as_uri()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert requests == []
