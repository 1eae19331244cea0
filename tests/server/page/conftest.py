"""A server with clients, and a browser at its operator's page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.administered import TOKEN, Operator
from tests.support.browser import browser
from tests.support.served import INFER, X, as_json, ask
from tests.support.storm import storm
from weightswap_server import Server

__all__ = ["browser"]
OpenPage = Callable[..., Any]


@contextmanager
def clients(server: Server) -> Iterator[None]:
    """Run a client that sends requests while the block runs."""
    with storm(lambda _: (ask(server, INFER, as_json(x=X)).status, time.sleep(0.005))[0], 1) as statuses:
        yield
    assert set(statuses[0]) == {200}


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(operator)` opens an operator's page; `token=None`: without a token.

    At the end no other server must have been called, and the console must show no errors but those in `expected`.
    """
    complaints: list[str] = []
    asked: list[tuple[str, str]] = []
    allowed: list[str] = []
    with ExitStack() as stack:

        def open_one(where: str | Operator, token: str | None = TOKEN, expected: str = "", **options: Any) -> Any:
            allowed.extend([expected] if expected else [])
            options = {"reduced_motion": "reduce", "viewport": {"width": 1200, "height": 900}} | options
            context = stack.enter_context(browser.new_context(**options))
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            here = f"{where if isinstance(where, str) else where.where}/"
            page.on("request", lambda request: asked.append((here, request.url)))
            page.goto(here)
            if token is not None:
                sign_in(page, token)
                page.wait_for_selector("#served")
            return page

        yield open_one
    assert [text for text in complaints if not any(part in text for part in allowed)] == []
    assert [url for here, url in asked if not url.startswith((here, "data:,"))] == []


def sign_in(page: Any, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Enter").click()


def section(page: Any, name: str) -> Any:
    return page.locator(f"section[aria-labelledby={name}]")
