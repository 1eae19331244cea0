"""Tables in a browser: sorted, filtered and paged, by mouse and by keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.samples import report_of, table
from weightswap_tools.reports.blocks import Cell, Column, Table

pytestmark = pytest.mark.slow


def column(page: Any, place: int) -> list[str]:
    cells: list[str] = page.locator(f"tbody tr > :nth-child({place})").all_text_contents()
    return cells


def of(*values: Cell, kind: Any = "number") -> Table:
    return Table((Column("value", kind),), tuple((value,) for value in values))


def test_a_heading_sorts_by_mouse(open_report: Open) -> None:
    page = open_report(report_of(table(30)))
    heading = page.get_by_role("columnheader", name="size")
    assert heading.get_attribute("aria-sort") == "none"
    page.get_by_role("button", name="size").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(page, 3)[:2] == ["29.0 kB", "28.0 kB"]
    page.get_by_role("button", name="size").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(page, 3)[:2] == ["0 B", "1.0 kB"]


def test_a_heading_sorts_by_keyboard(open_report: Open) -> None:
    page = open_report(report_of(table(30)))
    page.get_by_role("searchbox").focus()
    for key in ("Tab", "Tab", "Tab", "Enter"):  # the box for flags, the table, its first heading
        page.keyboard.press(key)
    assert page.get_by_role("columnheader", name="name").get_attribute("aria-sort") == "ascending"
    assert column(page, 1)[:3] == ["layer.0", "layer.1", "layer.2"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Space")
    assert column(page, 1)[:2] == ["layer.29", "layer.28"]


def test_numbers_are_sorted_as_numbers_and_what_is_missing_comes_last(open_report: Open) -> None:
    page = open_report(report_of(of(3, None, 20, -1.5, 1e-9)))
    page.get_by_role("button", name="value").click()
    assert column(page, 1) == ["20", "3", "1e-9", "-1.5", ""]
    page.get_by_role("button", name="value").click()
    assert column(page, 1) == ["-1.5", "1e-9", "3", "20", ""]


def test_shares_are_shown_in_per_cent(open_report: Open) -> None:
    page = open_report(report_of(of(0.005, 1.0, None, 1e-9, kind="percent")))
    page.get_by_role("button", name="value").click()
    assert column(page, 1) == ["100 %", "0.5 %", "1e-7 %", ""]


def test_the_filter_takes_every_word(open_report: Open) -> None:
    page = open_report(report_of(table(30)))
    box = page.get_by_role("searchbox", name="Filter rows")
    box.fill("LAYER.2 kb")
    assert column(page, 1) == ["layer.2", *(f"layer.2{digit}" for digit in range(10))]
    assert page.get_by_role("status").first.text_content() == "11 of 30 rows"
    box.fill("nowhere")
    assert column(page, 1) == ["no rows"]
    box.press("Control+A")
    box.press("Backspace")
    assert len(column(page, 1)) == 30


def test_flagged_rows_are_marked_and_can_be_shown_alone(open_report: Open) -> None:
    page = open_report(report_of(table(30)))
    assert page.locator("tr.flagged").count() == 6
    page.get_by_role("checkbox", name="only rows with: changed").press("Space")
    assert column(page, 4) == ["yes"] * 6


def test_short_tables_have_no_filter(open_report: Open) -> None:
    page = open_report(report_of(table(10)))
    assert page.get_by_role("searchbox").count() == 0
    assert len(column(page, 1)) == 10


def test_thousands_of_rows_are_drawn_on_demand(open_report: Open) -> None:
    page = open_report(report_of(table(5001)))
    assert len(column(page, 1)) == 200
    more = page.get_by_role("button", name="more of 5,001 rows")
    assert more.text_content() == "2,000 more of 5,001 rows"
    more.press("Enter")
    assert len(column(page, 1)) == 2200
    more.press("Enter")
    assert more.text_content() == "801 more of 5,001 rows"
    more.click()
    assert column(page, 1)[5000:] == ["layer.5000"]
    assert more.is_hidden()
    page.get_by_role("searchbox").fill("layer.499")
    assert len(column(page, 1)) == 11
    page.get_by_role("searchbox").fill("layer")
    assert len(column(page, 1)) == 200


def test_cells_of_every_kind(open_report: Open) -> None:
    columns = (Column("a"), Column("b", "number"), Column("c", "bytes"), Column("d", "number"), Column("e"))
    page = open_report(report_of(Table(columns, (("<b>x</b>", 1234567, 1234567, 0.123456789, None),))))
    cells = page.locator("tbody tr").first.locator("th, td").all_text_contents()
    assert cells == ["<b>x</b>", "1,234,567", "1.2 MB", "0.123457", ""]
