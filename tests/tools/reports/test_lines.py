"""Line plots in a browser: positions of points, labels of axes, hidden lines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.drawn import alternative, colour, fills, labels, shapes
from tests.tools.reports.samples import EVIL, LINES, report_of
from weightswap_tools.reports.blocks import Axis, Line, LinePlot

pytestmark = pytest.mark.slow


def strokes(page: Any) -> list[tuple[str, bool]]:
    """The colour of each line, and whether it is dashed."""
    found = page.locator("svg path[fill='none'][stroke-width='2']").evaluate_all(
        "all => all.map(one => [getComputedStyle(one).stroke, one.hasAttribute('stroke-dasharray')])"
    )
    return [(colour, dashed) for colour, dashed in found]


def places(page: Any, side: str) -> list[float]:
    """The positions of the points of the first group."""
    boxes = page.locator("svg path[fill]").evaluate_all(
        "(all, colour) => all.filter(one => getComputedStyle(one).fill === colour)"
        ".map(one => one.getBoundingClientRect()).map(box => [box.x + box.width / 2, box.y + box.height / 2])",
        colour(page, "hue-1"),
    )
    return [box["xy".index(side)] for box in boxes]


def test_a_line_for_each_group_and_style(open_report: Open) -> None:
    page = open_report(report_of(LINES))
    first, second = colour(page, "hue-1"), colour(page, "hue-2")
    assert sorted(strokes(page)) == sorted([(first, False), (first, True), (second, False)])
    assert shapes(page, "hue-1") == 6
    assert shapes(page, "hue-2") == 2


def test_axes_say_what_was_measured_and_in_which_unit(open_report: Open) -> None:
    page = open_report(report_of(LINES))
    assert {"size of batch", "time of a call (ms)", "1", "8", "32", "0.1", "10", "100"} <= set(labels(page))


def test_factors_are_equally_far_apart_on_a_logarithmic_axis(open_report: Open) -> None:
    points = ((1, 0.01), (10, 0.1), (100, 1.0))
    page = open_report(report_of(LinePlot((Line("a", points),), Axis("x", "", "log"), Axis("y", "s", "log"))))
    for side in "xy":
        first, second, third = places(page, side)
        assert abs((second - first) - (third - second)) < 1


def test_a_linear_axis_keeps_proportions(open_report: Open) -> None:
    page = open_report(report_of(LinePlot((Line("a", ((0, 0.0), (1, 1.0), (3, 3.0))),), Axis("x"), Axis("y"))))
    for side in "xy":
        first, second, third = places(page, side)
        assert abs(2 * (second - first) - (third - second)) < 2


def test_lines_are_hidden_by_keyboard(open_report: Open) -> None:
    page = open_report(report_of(LINES))
    keys = page.get_by_role("group", name="Lines")
    keys.get_by_role("button", name="torch").press("Enter")
    assert keys.get_by_role("button", name="torch").get_attribute("aria-pressed") == "false"
    assert strokes(page) == [(colour(page, "hue-2"), False)]
    keys.get_by_role("button", name="torch").press("Space")
    keys.get_by_role("button", name="p50").click()
    assert strokes(page) == [(colour(page, "hue-1"), True)]


def test_a_group_and_a_style_of_one_name_are_hidden_apart(open_report: Open) -> None:
    points = ((1, 1.0), (2, 2.0))
    lines = (Line("same", points, "same"), Line("same", points, "other"), Line("other", points))
    page = open_report(report_of(LinePlot(lines, Axis("x"), Axis("y"))))
    buttons = page.get_by_role("group", name="Lines").get_by_role("button")
    assert buttons.all_text_contents() == ["●same", "■other", "same", "other"]
    buttons.nth(2).click()
    assert len(strokes(page)) == 2
    buttons.nth(0).click()
    assert len(strokes(page)) == 1


def test_all_lines_can_be_hidden(open_report: Open) -> None:
    page = open_report(report_of(LINES))
    for button in page.get_by_role("group", name="Lines").get_by_role("button").all():
        button.click()
    assert strokes(page) == []
    assert "32" in labels(page)


def test_a_tooltip_shows_all_lines_at_a_point(open_report: Open) -> None:
    page = open_report(report_of(LINES))
    page.locator(".chart").hover(
        position={"x": places(page, "x")[2] - page.locator(".chart").bounding_box()["x"], "y": 100}
    )
    page.get_by_text("torch, p99: 90 ms").wait_for()
    assert page.get_by_text("size of batch: 32").is_visible()
    assert page.get_by_text(f"{EVIL}, p50: 1.5 ms").is_visible()
    assert page.locator(".chart").get_by_text("ms").all_text_contents()[-3:] == [
        "torch, p99: 90 ms",
        "torch, p50: 2 ms",
        f"{EVIL}, p50: 1.5 ms",
    ]
    assert page.locator("img").count() == 0


def test_the_table_has_every_point(open_report: Open) -> None:
    page = open_report(report_of(LinePlot((Line("a", ((0, 1.0), (2, 3.0)), "p50"),), Axis("x", "s", "log"), Axis("y"))))
    assert alternative(page) == [["a, p50", "0", "1"], ["a, p50", "2", "3"]]
    assert page.get_by_role("columnheader").all_text_contents() == ["line", "x (s)", "y"]


def test_eight_groups_look_different(open_report: Open) -> None:
    lines = tuple(Line(f"g{place}", ((1, place), (2, place + 1))) for place in range(8))
    page = open_report(report_of(LinePlot(lines, Axis("x"), Axis("y"))))
    marks = page.locator(".mark").evaluate_all("all => all.map(one => one.textContent + getComputedStyle(one).color)")
    assert len(set(marks)) == 8
    assert {colour(page, f"hue-{place}") for place in range(1, 9)} <= set(fills(page))
