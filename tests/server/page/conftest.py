"""A server with clients, and a browser at its operator's page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.support.administered import TOKEN, administered
from tests.support.browser import browser
from tests.support.served import as_json, ask
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import DesiredStore, load
from weightswap_server import Server

__all__ = ["browser"]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = "/v2/models/tiny/infer"
OpenPage = Callable[..., Any]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)


@pytest.fixture
def server(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> Iterator[Server]:
    """A server with the weights of seed 1 that follows nothing."""
    with administered({"tiny": load(tiny.path, weight_file(1))}, allow=(str(tmp_path),)) as running:
        yield running


@pytest.fixture
def desired_store(weight_file: WriteWeights, tmp_path: Path) -> DesiredStore:
    (tmp_path / "service").mkdir()
    found = DesiredStore(tmp_path / "service")
    found.set(weight_file(1), revision=0, by="ana", why="the first")
    return found


@contextmanager
def clients(server: Server) -> Iterator[None]:
    """Run a client that sends requests while the block runs."""
    ended = Event()
    failed = []

    def work() -> None:
        while not ended.is_set():
            if (status := ask(server, INFER, as_json(x=X)).status) != 200:
                failed.append(status)
            time.sleep(0.005)

    client = Thread(target=work)
    client.start()
    try:
        yield
    finally:
        ended.set()
        client.join()
    assert failed == []


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(server)` opens an operator's page; `token=None`: without a token.

    At the end no other server must have been called, and the console must show no errors but those in `expected`.
    """
    complaints: list[str] = []
    asked: list[tuple[str, str]] = []
    allowed: list[str] = []
    with ExitStack() as stack:

        def open_one(server: Server, token: str | None = TOKEN, expected: str = "", **options: Any) -> Any:
            assert server.admin is not None
            allowed.extend([expected] if expected else [])
            options = {"reduced_motion": "reduce", "viewport": {"width": 1200, "height": 900}} | options
            context = stack.enter_context(browser.new_context(**options))
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            here = f"{server.admin.where}/"
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
