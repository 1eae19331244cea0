"""Charts in a browser: the drawn SVG, and the tables with the same numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.drawn import alternative, colour, fills, labels, shapes
from tests.tools.reports.samples import (
    BINS,
    CHARTS,
    EVERYTHING,
    EVIL,
    MAP,
    NOTHING,
    ODD_NUMBERS,
    report_of,
    table,
)
from weightswap_tools.reports.blocks import Block, ChartBlock, Treemap, TreemapNode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_one_labelled_svg(open_report: Open, name: str) -> None:
    page = open_report(report_of(CHARTS[name]))
    image = page.get_by_role("img", name=CHARTS[name].caption)
    assert image.locator("svg").count() == 1
    assert page.locator("canvas").count() == 0


@pytest.mark.parametrize("name", CHARTS)
def test_hovered_shapes_keep_their_colour(open_report: Open, name: str) -> None:
    page = open_report(report_of(CHARTS[name]))
    drawn = Counter(fills(page))
    box = page.locator(".chart").bounding_box()
    for part in (0.2, 0.4, 0.6, 0.8):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + 0.45 * box["height"])
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert drawn <= Counter(fills(page))


def test_bins_are_bars(open_report: Open) -> None:
    page = open_report(report_of(BINS))
    assert shapes(page, "hue-1") == 3
    assert {"0", "1e-8", "1e-4", "1", "difference"} <= set(labels(page))
    assert alternative(page) == [["0", "1e-8", "5"], ["1e-8", "1e-4", "0"], ["1e-4", "1", "7"]]


def test_bins_of_orders_of_magnitude_are_equally_wide(open_report: Open) -> None:
    page = open_report(report_of(BINS))
    widths = page.locator("svg path[fill]").evaluate_all("all => all.map(one => Math.round(one.getBBox().width))")
    colours = fills(page)
    bars = [width for width, colour in zip(widths, colours, strict=True) if colour == colours[-1]]
    assert len(bars) == 3
    assert max(bars) - min(bars) <= 1
    assert {"0", "1e-8", "1e-4", "1"} <= set(labels(page))


def test_areas_are_zoomed_by_mouse(open_report: Open) -> None:
    page = open_report(report_of(MAP))
    assert any(text.startswith("encoder   600 B") for text in labels(page))
    assert EVIL in labels(page)
    page.locator("svg text").filter(has_text="encoder").click(force=True)
    page.locator("[aria-current]").get_by_text("encoder").wait_for()
    assert EVIL not in labels(page)
    assert labels(page).count("weight") == 12
    page.get_by_role("button", name="model").click()
    assert EVIL in labels(page)


def test_a_click_survives_a_redraw(open_report: Open) -> None:
    page = open_report(report_of(MAP))
    box = page.locator("svg text").filter(has_text="encoder").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.evaluate(REDRAWN)
    page.mouse.up()
    page.locator("[aria-current]").get_by_text("encoder").wait_for()


REDRAWN = """() => document.querySelectorAll("svg text").forEach((text) => text.parentNode.append(text))"""


def test_areas_are_zoomed_by_keyboard(open_report: Open) -> None:
    page = open_report(report_of(MAP))
    parts = page.get_by_role("navigation", name="What is inside")
    parts.get_by_role("button", name="encoder").press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "encoder"
    assert parts.get_by_role("button").count() == 12
    parts.get_by_role("button").first.press("Space")
    assert page.locator(".trail").text_content() == "modelencoder0 50 B"
    assert parts.get_by_role("listitem").all_text_contents() == ["weight40 B80.0 %", "bias10 B20.0 %"]
    assert {"weight", "bias", "40 B"} <= set(labels(page))
    page.get_by_role("button", name="model").press("Enter")
    assert page.locator("[aria-current]").text_content() == "model"


def test_every_leaf_of_a_map_is_in_its_table(open_report: Open) -> None:
    rows = alternative(open_report(report_of(MAP)))
    assert len(rows) == 25
    assert rows[0] == ["encoder.0.weight", "40 B", "F32[2]"]
    assert rows[-1] == [EVIL, "400 B", "F32[2]"]


def test_the_smallest_of_very_many_areas_are_one(open_report: Open) -> None:
    children = tuple(TreemapNode(f"w{place}", 1000 - place) for place in range(500))
    page = open_report(report_of(Treemap(TreemapNode("all", sum(c.size for c in children), "", children), "bytes")))
    parts = page.get_by_role("navigation", name="What is inside").get_by_role("listitem")
    assert parts.count() == 151
    assert parts.last.text_content().startswith("350 more")


@pytest.mark.parametrize("blocks", [NOTHING, ODD_NUMBERS], ids=["nothing", "odd numbers"])
def test_every_block_is_drawn(open_report: Open, blocks: tuple[Block, ...]) -> None:
    page = open_report(report_of(*blocks))  # which sees to it that nothing was complained about
    assert page.locator("figure").count() == len(blocks)
    for summary in page.locator("summary").all():
        summary.press("Enter")
    charts = sum(isinstance(block, ChartBlock) for block in blocks)
    page.locator("details tbody").nth(charts - 1).wait_for()
    assert not any("NaN" in path or "Infinity" in path for path in page.locator("svg path").evaluate_all(PATHS))


PATHS = "all => all.map(one => one.getAttribute('d'))"


def test_ten_thousand_weights_make_a_small_page(open_report: Open) -> None:
    """A large map, of which few elements are drawn at a time."""
    layers = tuple(
        TreemapNode(str(layer), 100, "", tuple(TreemapNode(f"w{place}", 1, "F32[1]") for place in range(100)))
        for layer in range(100)
    )
    areas = Treemap(TreemapNode("model", 10_000, "", layers), "bytes")
    page = open_report(report_of(areas, table(10_000)))
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    page.get_by_role("searchbox").fill("layer.9999")
    assert page.locator("tbody th").all_text_contents() == ["layer.9999"]


@pytest.mark.parametrize("width", [1200, 360])
def test_a_page_with_everything_fits_its_window(open_report: Open, width: int) -> None:
    page = open_report(EVERYTHING, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h1").text_content() == EVIL
    assert page.locator("img").count() == 0
    assert page.evaluate("[...document.querySelectorAll('svg')].every(one => one.clientWidth <= innerWidth)")


def test_charts_follow_the_colours_of_the_page(open_report: Open) -> None:
    page = open_report(report_of(BINS), color_scheme="dark")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark, bars = page.evaluate(background), set(fills(page))
    page.get_by_role("button", name="Light colours").press("Enter")
    assert page.evaluate(background) != dark
    assert shapes(page, "hue-1") == 3
    assert set(fills(page)) != bars
    page.get_by_role("button", name="Dark colours").click()
    assert (page.evaluate(background), set(fills(page))) == (dark, bars)


@pytest.mark.parametrize("chosen", [False, True])
def test_paper_is_light(open_report: Open, chosen: bool) -> None:
    page = open_report(report_of(BINS), color_scheme="light" if chosen else "dark")
    if chosen:
        page.get_by_role("button", name="Dark colours").click()
    on_screen = colour(page, "hue-1")
    assert shapes(page, "hue-1") == 3
    page.emulate_media(media="print")
    assert colour(page, "hue-1") != on_screen
    assert shapes(page, "hue-1") == 3
    assert page.get_by_role("button", name="colours").is_hidden()


def test_the_colours_are_not_kept_for_another_page(open_report: Open) -> None:
    page = open_report(report_of(BINS), color_scheme="light")
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
