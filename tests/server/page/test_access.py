"""For who uses no mouse, sees little, or has a phone; what may run in the page, and what is served without a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.server.page.conftest import OpenPage, clients, section
from tests.support.administered import Operator, call
from tests.support.browser import FAINT, NAMELESS
from weightswap_runtime import DesiredStore
from weightswap_server.admin.app import OPEN_PATHS

FOLDER = ROOT / "runtime" / "weightswap_server" / "admin" / "page"
STOPS = "a, button, input, textarea, summary, progress, [tabindex='0'], [role=img], dialog"
WIDE = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture
def eventful(operator: Operator, desired_store: DesiredStore) -> Operator:
    """An operator whose page has something in each section."""
    operator.follow(desired_store, 0.02)
    operator.change("swap", 2, why="better " * 20)
    operator.change("swap", source=Path(desired_store.where))
    operator.change("hold", why="quiet")
    operator.change("canary", 3, share=0.1)
    return operator


def settled(page: Any) -> Any:
    section(page, "history").get_by_text("generation 1").wait_for()
    section(page, "canary").wait_for()
    return page


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_and_all_has_a_name(eventful: Operator, open_page: OpenPage, scheme: str) -> None:
    page = settled(open_page(eventful, color_scheme=scheme))
    for summary in page.locator("summary").all():
        summary.press("Enter")
    assert page.locator(STOPS).count() > 15
    assert page.locator(STOPS).evaluate_all(NAMELESS) == []
    count, faint = page.locator("body *").evaluate_all(FAINT)
    assert count > 60
    assert faint == []
    section(page, "staged").get_by_role("button", name="Abort").click()
    assert page.locator("dialog *").evaluate_all(FAINT)[1] == []
    assert page.locator("dialog *").locator("button, textarea").evaluate_all(NAMELESS) == []
    ids = page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids)) > 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [320, 390, 760])
def test_nothing_is_wider_than_a_phone(eventful: Operator, open_page: OpenPage, width: int) -> None:
    page = settled(open_page(eventful, viewport={"width": width, "height": 700}))
    for summary in page.locator("summary").all():
        summary.press("Enter")
    assert not page.evaluate(WIDE)
    page.get_by_role("button", name="Abort").click()
    assert not page.evaluate(WIDE)
    box = page.get_by_role("dialog").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= width


def test_a_commit_by_keys_alone(operator: Operator, open_page: OpenPage) -> None:
    operator.change("stage", 2)
    page = open_page(operator)
    section(page, "staged").get_by_role("button", name="Commit").wait_for()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Commit":
            break
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent.trim()") == "Commit"  # back where it was
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.type("by keys")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    section(page, "served").get_by_text("by keys").wait_for()
    assert operator.serves(2)


@pytest.mark.slow
def test_nothing_moves_while_numbers_change(eventful: Operator, open_page: OpenPage) -> None:
    page = settled(open_page(eventful))
    with clients(eventful.server):
        section(page, "load").get_by_text("what is served").wait_for()
        page.evaluate("""() => {
            window.moved = 0;
            new PerformanceObserver((list) => list.getEntries().forEach((each) => (window.moved += each.value)))
                .observe({ type: "layout-shift" });
        }""")
        page.wait_for_timeout(2500)
        assert page.evaluate("window.moved") < 0.01


def test_its_files_need_no_token_and_may_run_nothing_else(operator: Operator) -> None:
    assert len(OPEN_PATHS) > 8
    for path in sorted(OPEN_PATHS):
        found = call(operator.server, path, headers={})
        assert found.status == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
    assert call(operator.server, "/", headers={}).headers["content-type"].startswith("text/html")
    assert call(operator.server, "/", {}, headers={}).status == 405
    for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor/htm/LICENSE", "/admin/status", "//"):
        assert call(operator.server, path, headers={}).status == 401, path
