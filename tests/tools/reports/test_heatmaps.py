"""Heat maps in a browser: a colour for every value, and a legend that is read in any window."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.drawn import alternative, labels, shapes
from tests.tools.reports.samples import EVIL, HEAT, report_of
from weightswap_tools.reports.blocks import HeatMap, Mark

pytestmark = pytest.mark.slow

MARKS = (Mark("new NaN", "NaN", "bad"), Mark("removed", "-"), Mark("added", "+"), Mark(EVIL, "!"))


def heat(*rows: tuple[float | str | None, ...], what: str = "change") -> HeatMap:
    names = tuple(f"row {place}" for place in range(len(rows)))
    return HeatMap(names, tuple(f"c{place}" for place in range(len(rows[0]))), rows, what, "", MARKS)


def legend(page: Any) -> list[str]:
    """The numbers of the scale."""
    texts: list[str] = page.locator(".ramp .number").all_text_contents()
    return texts


def keys(page: Any) -> list[str]:
    """The legend's entries beside the scale, each with its sign."""
    texts: list[str] = page.locator(".mark-key").all_text_contents()
    return texts


def test_a_cell_for_each_value(open_report: Open) -> None:
    page = open_report(report_of(HEAT))
    assert {"encoder", EVIL, "head", "cpu", "aoti"} <= set(labels(page))
    assert shapes(page, "bad") == 1  # NaN
    assert keys(page) == ["0zero", "?NaN"]
    assert legend(page) == ["1e-7", "4.5e-4", "2"]
    assert alternative(page) == [["encoder", "1e-7", "0.001"], [EVIL, "", "NaN"], ["head", "0", "2"]]


def test_a_long_heat_map_is_drawn_in_pages(open_report: Open) -> None:
    rows = tuple(f"row {place}" for place in range(450))
    page = open_report(report_of(HeatMap(rows, ("a",), tuple((float(n),) for n in range(450)), "x")))
    assert "row 199" in labels(page)
    assert "row 200" not in labels(page)
    page.get_by_role("button", name="Last").press("Enter")
    page.locator("svg text").filter(has_text="row 449").wait_for()
    assert [text for text in labels(page) if text.startswith("row")] == [f"row {place}" for place in range(250, 450)]
    page.get_by_role("button", name="First").press("Enter")
    page.locator("svg text").filter(has_text="row 199").wait_for()
    page.get_by_role("button", name="Next").press("Enter")
    page.locator("svg text").filter(has_text="row 200").first.wait_for()


def test_marks_are_drawn_and_in_the_legend(open_report: Open) -> None:
    page = open_report(report_of(heat((0.5, "removed", "added"), (EVIL, "new NaN", None), ("removed", 0.1, 0.2))))
    assert keys(page) == ["NaNnew NaN", "-removed", "+added", f"!{EVIL}"]
    assert sorted(set(labels(page)) & {"NaN", "-", "+", "!"}) == ["!", "+", "-", "NaN"]
    assert [shapes(page, name) for name in ("bad", "hue-2", "hue-3", "hue-4")] == [1, 2, 1, 1]
    assert page.locator("img").count() == 0
    assert alternative(page)[:2] == [["row 0", "0.5", "removed", "added"], ["row 1", EVIL, "new NaN", ""]]


def test_an_infinite_value_leaves_the_scale_to_the_others(open_report: Open) -> None:
    page = open_report(report_of(heat((1e-4, 1e-2, math.inf))))
    assert legend(page) == ["1e-4", "0.001", "0.01"]
    assert keys(page) == ["∞infinite"]
    assert shapes(page, "hue-7") == 1
    assert shapes(page, "heat-1") == shapes(page, "heat-5") == 1  # the ends of the scale
    page.locator("svg text").filter(has_text="∞").hover(force=True)
    page.get_by_text("c2: infinite").wait_for()
    assert alternative(page) == [["row 0", "1e-4", "0.01", "infinite"]]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0.5000001, 0.5000002), ["0.5000001", "0.50000015", "0.5000002"]),
        ((1e-300, 1e300), ["1e-300", "1", "1e300"]),
        ((5e-324, 1.5e308), ["5e-324", "2.7e-8", "1.5e308"]),
        ((3.0, 3.0), ["3"]),
        ((math.inf, math.nan), []),
        ((0.0, -1.0), []),
    ],
)
def test_the_legend_shows_scales_of_any_range(values: tuple[float, ...], says: list[str], open_report: Open) -> None:
    assert legend(open_report(report_of(heat(values)))) == says


def test_zero_is_off_a_logarithmic_scale(open_report: Open) -> None:
    page = open_report(report_of(heat((0.0, 1e-9, 1.0), (-2.0, 0.0, 0.0))))
    assert keys(page) == ["0zero or less"]
    assert shapes(page, "raised") == 4


@pytest.mark.parametrize("width", [320, 480, 1600])
@pytest.mark.parametrize("columns", [1, 40])
def test_nothing_of_a_legend_is_cut(open_report: Open, width: int, columns: int) -> None:
    row = (1.23456e-300, "removed", "added", "new NaN", EVIL, math.inf, -math.inf, math.nan, 0.0, 1.5e300)
    cells = tuple(tuple(row[(line + place) % len(row)] for place in range(columns)) for line in range(10))
    what = "largest relative change of an element, as a share of the norm of the tensor"
    page = open_report(report_of(heat(*cells, what=what)), viewport={"width": width, "height": 800})
    assert len(keys(page)) == 8
    sides = page.locator(".legend, .legend *").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(({left, right}) => [left, right])"
    )
    assert all(0 <= left <= right <= width for left, right in sides)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    overlaps = page.locator(".ramp .number").evaluate_all(
        "all => all.slice(1).some((one, place) => "
        "one.getBoundingClientRect().left <= all[place].getBoundingClientRect().right)"
    )
    assert not overlaps


def test_the_legend_follows_the_colours_of_the_page(open_report: Open) -> None:
    page = open_report(report_of(heat(("removed", 1.0))), color_scheme="light")
    colours = "getComputedStyle(document.querySelector('.swatch')).backgroundColor"
    light = page.evaluate(colours)
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate(colours) != light


@pytest.mark.parametrize("width", [480, 1600])
@pytest.mark.parametrize("columns", [1, 8, 9, 30])
def test_no_label_is_cut_by_the_edge(open_report: Open, width: int, columns: int) -> None:
    names = tuple(f"encoder.self_attention.in_{place}_projection.weight"[-8 - 3 * place :] for place in range(columns))
    block = HeatMap(names, names, ((1.0,) * columns,) * columns, "x")
    page = open_report(report_of(block), viewport={"width": width, "height": 800})
    outside = page.locator("svg text").evaluate_all(
        "all => all.filter(one => {"
        "const [inner, outer] = [one, one.closest('svg')].map(part => part.getBoundingClientRect());"
        "return inner.left < outer.left - 1 || inner.right > outer.right + 1"
        " || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;"
        "}).map(one => one.textContent)"
    )
    assert outside == []


def test_long_names_keep_what_tells_them_apart(open_report: Open) -> None:
    names = tuple(f"encoder.layers.0.self_attention.in_projection.{kind}{place}" for place in range(9) for kind in "ab")
    page = open_report(report_of(HeatMap(names, names, ((1.0,) * 18,) * 18, "x")))
    drawn = [text for text in labels(page) if "…" in text]
    assert {name[-15:] for name in names} == {text[-15:] for text in drawn}
    assert len(drawn) == 36
