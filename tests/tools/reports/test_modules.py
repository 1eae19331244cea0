"""The tree of modules in a browser: ARIA's pattern of a tree view, by keyboard and by mouse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.samples import BLOCK, FOLDED, GRAPH, module, report_of
from weightswap_tools.reports.blocks import ModuleGraph, ModuleRun

pytestmark = pytest.mark.slow


@pytest.fixture
def page(open_report: Open) -> Any:
    return open_report(report_of(GRAPH))


def focused(page: Any) -> str:
    name: str = page.evaluate("document.activeElement.querySelector('.name')?.textContent ?? ''")
    return name


def start(page: Any) -> None:
    page.get_by_role("treeitem").first.focus()


def press(page: Any, *keys: str) -> str:
    for key in keys:
        page.keyboard.press(key)
    return focused(page)


def names(page: Any) -> list[str]:
    found: list[str] = page.locator("[role=treeitem] .name").all_text_contents()
    return found


def test_arrows_go_through_what_is_visible(page: Any) -> None:
    start(page)
    assert press(page, "ArrowDown") == "embed"
    assert press(page, "ArrowDown") == "layers"
    assert press(page, "ArrowUp", "ArrowUp") == "(model)"
    assert press(page, "ArrowUp") == "(model)"
    assert press(page, "End") == "14"
    assert press(page, "Home") == "(model)"


def test_arrows_open_and_close(page: Any) -> None:
    start(page)
    assert press(page, "ArrowDown", "ArrowDown", "ArrowRight") == "0"
    assert press(page, "ArrowRight") == "0"
    assert page.locator("[aria-selected=true]").get_attribute("aria-expanded") == "true"
    assert names(page)[3:6] == ["0", "attention", "mlp"]
    assert press(page, "ArrowRight") == "attention"
    assert press(page, "ArrowLeft") == "0"
    assert press(page, "ArrowLeft") == "0"
    assert names(page)[3:5] == ["0", "1"]
    assert press(page, "Enter", "ArrowDown") == "attention"


def test_letters_find_the_next_name(page: Any) -> None:
    start(page)
    assert press(page, "l") == "layers"
    assert press(page, "e") == "embed"


def test_one_item_is_in_the_tab_order(page: Any) -> None:
    start(page)
    press(page, "ArrowDown")
    assert page.locator("[role=treeitem][tabindex='0']").count() == 1
    item = page.locator("[role=treeitem][tabindex='0']")
    places = [item.get_attribute(f"aria-{name}") for name in ("level", "setsize", "posinset", "selected")]
    assert places == ["2", "2", "1", "true"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_click_selects_and_its_mark_opens(page: Any) -> None:
    page.get_by_role("treeitem", name="embed").click()
    panel = page.get_by_role("region", name="The selected module")
    texts = panel.text_content()
    for text in ("Embedding", "2 weights", "F32[3] from the input x", "F32[4] to head", "aten.embedding.default"):
        assert text in texts
    page.get_by_role("treeitem", name="layers").locator(".twist").click()
    assert names(page) == ["(model)", "embed", "layers"]


def test_modules_are_searched_by_name_class_and_operator(page: Any) -> None:
    box = page.get_by_role("searchbox", name="Search modules")
    box.fill("layers.3.att")
    assert names(page) == ["(model)", "layers", "3", "attention"]
    box.fill("ATEN.LINEAR")
    assert names(page).count("mlp") == 15
    assert page.get_by_role("status").first.text_content() == "15 modules"
    box.fill("embedding")
    assert names(page) == ["(model)", "embed"]
    assert page.locator("[aria-selected=true] .name").text_content() == "embed"
    box.fill("nowhere")
    assert page.get_by_text("No module matches.").is_visible()
    box.fill("")
    assert len(names(page)) == 18


def test_all_are_expanded_and_collapsed(page: Any) -> None:
    page.get_by_role("button", name="Expand all").press("Enter")
    assert len(names(page)) == 18 + 30
    page.get_by_role("button", name="Collapse all").click()
    assert names(page) == ["(model)"]


def test_calls_are_counted_with_those_below(page: Any) -> None:
    calls = page.locator("[role=treeitem] .calls").all_text_contents()
    assert calls[:4] == ["62 calls", "2 calls", "60 calls", "4 calls"]


@pytest.mark.slow
def test_the_rows_that_are_drawn_follow_the_arrows(open_report: Open) -> None:
    page = open_report(report_of(ModuleGraph(module("", "Net", *(module(f"m{place}", "") for place in range(3000))))))
    start(page)
    assert press(page, "End") == "m2999"
    assert press(page, *["ArrowUp"] * 3) == "m2996"
    assert press(page, "Home", *["ArrowDown"] * 3) == "m2"
    page.get_by_role("treeitem", name="m900").click()
    assert press(page, *["ArrowDown"] * 120) == "m1020"
    assert page.locator("[aria-selected=true]").count() == page.locator("[tabindex='0'][role=treeitem]").count() == 1


@pytest.fixture
def folded(open_report: Open) -> Any:
    return open_report(report_of(FOLDED))


def rows(page: Any) -> list[str]:
    texts: list[str] = page.get_by_role("treeitem").all_text_contents()
    return texts


def test_equal_modules_are_one_entry(folded: Any) -> None:
    assert rows(folded) == [
        "(model)Net64 calls",
        "embedEmbedding2 calls",
        "layers60 calls",
        "layers.0-14Block(15 alike)60 calls",
        "headLinear2 calls",
    ]
    folded.get_by_role("treeitem", name="15 alike").click()
    told = folded.get_by_role("region", name="The selected module").text_content()
    for text in ("layers.0-14", "each: 2 weights", "4 each, 60 in all", "15 alike; open it to see"):
        assert text in told


def test_a_run_of_equal_modules_is_opened(folded: Any) -> None:
    start(folded)
    assert press(folded, "ArrowDown", "ArrowDown", "ArrowDown") == "layers.0-14"
    assert folded.locator("[aria-selected=true]").get_attribute("aria-expanded") == "false"
    assert press(folded, "ArrowRight", "ArrowRight") == "0"
    assert len(names(folded)) == 5 + 15
    item = folded.locator("[aria-selected=true]")
    assert [item.get_attribute(f"aria-{name}") for name in ("level", "setsize", "posinset")] == ["4", "15", "1"]
    assert "layers.0" in folded.get_by_role("region", name="The selected module").text_content()
    assert press(folded, "ArrowLeft", "ArrowLeft") == "layers.0-14"
    assert len(names(folded)) == 5


def test_calls_of_a_run_are_a_range(open_report: Open) -> None:
    run = ModuleRun((module("0", "Block", *BLOCK, module("size", "Size")), module("1", "Block", *BLOCK)))
    page = open_report(report_of(ModuleGraph(module("", "Net", run))))
    page.get_by_role("treeitem", name="0-1").click()
    assert page.get_by_text("4 to 6 each, 10 in all").is_visible()


def test_a_search_opens_what_is_folded(folded: Any) -> None:
    box = folded.get_by_role("searchbox", name="Search modules")
    box.fill("layers.3.att")
    assert names(folded) == ["(model)", "layers", "layers.0-14", "3", "attention"]
    assert folded.get_by_role("status").first.text_content() == "1 module"
    box.fill("")
    assert folded.locator("[aria-selected=true] .name").text_content() == "attention"
    assert len(names(folded)) == 5 + 15 + 2


def test_a_run_is_not_a_module(folded: Any) -> None:
    folded.get_by_role("searchbox", name="Search modules").fill("0-14")
    assert folded.get_by_text("No module matches.").is_visible()
    folded.get_by_role("searchbox", name="Search modules").fill("")
    folded.get_by_role("button", name="Expand all").click()
    assert len(names(folded)) == 5 + 15 * 3


def test_a_graph_of_twenty_thousand_modules_draws_few_of_them(open_report: Open) -> None:
    parts = [[module(f"p{part}", f"Kind{layer}") for part in range(19)] for layer in range(1000)]
    layers = tuple(module(str(layer), "Block", *inside) for layer, inside in enumerate(parts))
    page = open_report(report_of(ModuleGraph(module("", "Net", module("layers", "", *layers)))))
    assert page.evaluate("document.querySelectorAll('*').length") < 200
    page.get_by_role("button", name="Expand all").click()
    assert len(names(page)) == 1000
    page.get_by_role("searchbox").fill("layers.999.p18")
    assert names(page) == ["(model)", "layers", "999", "p18"]
    page.get_by_role("searchbox").fill("")
    assert page.locator("[aria-selected=true] .name").text_content() == "p18"
