"""Accessibility of pages: names, tab order, focusable regions, contrast."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.browser import FAINT, NAMELESS
from tests.tools.reports.conftest import Open
from tests.tools.reports.samples import EVERYTHING

STOPS = "a, button, input, summary, [tabindex='0'], [role=img], [role=region], [role=group]"
UNREACHED = """all => all.filter(one => {
    const { overflowX, overflowY } = getComputedStyle(one);
    const moves = (way, inside, outside) => /auto|scroll/.test(way) && inside > outside + 1;
    return (moves(overflowX, one.scrollWidth, one.clientWidth) || moves(overflowY, one.scrollHeight, one.clientHeight))
        && one.tabIndex < 0 && !one.querySelector("a, button, [tabindex='0']");
}).map(one => one.className)"""


@pytest.fixture
def page(open_report: Open) -> Any:
    page = open_report(EVERYTHING)
    for summary in page.locator("summary").all():
        summary.press("Enter")
    return page


def test_every_focusable_element_has_a_name(page: Any) -> None:
    assert page.locator(STOPS).count() > 50
    assert page.locator(STOPS).evaluate_all(NAMELESS) == []


@pytest.mark.slow
def test_the_tab_order_is_that_of_the_page(page: Any) -> None:
    assert page.locator("[tabindex]").evaluate_all("all => all.filter(one => one.tabIndex > 0).length") == 0
    page.locator("h1").click()
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.getBoundingClientRect().top + scrollY"))
    assert seen == sorted(seen)


@pytest.mark.slow
def test_scrolling_regions_can_be_focused(page: Any) -> None:
    page.set_viewport_size({"width": 480, "height": 800})
    assert page.locator("body *").evaluate_all(UNREACHED) == []


@pytest.mark.slow
def test_no_two_elements_have_one_id(page: Any) -> None:
    ids = page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids)) > 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.sampled(1)
def test_all_texts_have_enough_contrast(scheme: str, open_report: Open) -> None:
    page = open_report(EVERYTHING, color_scheme=scheme)
    count, faint = page.locator("body *").evaluate_all(FAINT)
    assert count > 100
    assert faint == []
