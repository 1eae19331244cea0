"""Pages of reports as text: their content, escaping, and that they load nothing."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.reports.samples import EVERYTHING, EVIL, report_of, table
from weightswap_tools.reports.blocks import Column, Facts, Histogram, Note, Report, Section, Table
from weightswap_tools.reports.markup import embedded_json
from weightswap_tools.reports.page import render, write_report

VOID = {"meta", "link", "input", "br"}
LOADING = {"src", "srcset", "href", "action", "data", "poster", "background", "formaction"}
LIBRARY = "Apache Software Foundation"


class Reader(HTMLParser):
    """A parsed page: elements with their attributes, the texts of scripts, and visible texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.seen = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.seen += data


def test_a_report_is_written_as_it_is_rendered(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", EVERYTHING)
    assert (tmp_path / "r.html").read_bytes() == render(EVERYTHING).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_the_same_report_gives_the_same_text() -> None:
    assert render(report_of(table(3))) == render(report_of(table(3)))


def test_a_page_loads_nothing() -> None:
    page = Reader(render(EVERYTHING))
    for tag, attributes in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form"}
        loaded = {attributes[name] for name in LOADING & attributes.keys()}
        assert all(value is not None and value.startswith(("#", "data:,")) for value in loaded), (tag, attributes)
    assert page.open == []
    ours = [text for text in page.scripts if LIBRARY not in text]
    forbidden = re.compile(r"fetch\(|XMLHttpRequest|import\(|innerHTML|insertAdjacentHTML|eval\(")
    assert len(ours) == len(page.scripts) - 1
    assert not any(forbidden.search(text) for text in ours)


def test_the_policy_forbids_everything_from_outside() -> None:
    policies = [a["content"] for tag, a in Reader(render(EVERYTHING)).elements if tag == "meta" and "http-equiv" in a]
    (policy,) = policies
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'unsafe-inline'"
    assert rules["img-src"] == "data:"


def test_names_are_shown_as_themselves() -> None:
    page = Reader(render(EVERYTHING))
    assert EVIL in page.seen
    assert "\\u202eback\\x1b[31m" in page.seen
    assert not set(page.seen) & set("\u202e\x1b\u2028\ud800")
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert "{b} {c|d}" in page.seen


def test_only_pages_with_charts_include_the_library() -> None:
    assert LIBRARY not in render(report_of(table(3), Note("x")))
    assert LIBRARY in render(report_of(Histogram((0.0, 1.0), (1,), "x")))


@pytest.mark.parametrize(("good", "tone"), [(None, "plain"), (True, "good"), (False, "bad")])
def test_the_verdict_is_marked(good: bool | None, tone: str) -> None:
    assert f'<p class="verdict {tone}">3 mismatches</p>' in render(Report("r", "", (), "3 mismatches", good))
    assert 'class="verdict' not in render(Report("r", "", ()))


def test_facts_need_no_script() -> None:
    page = render(report_of(Facts((("weights id", "3f"),))))
    assert "<dt>weights id</dt><dd>3f</dd>" in page


def embedded(page: str) -> list[dict[str, object]]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    blocks: list[dict[str, object]] = json.loads(text)
    return blocks


def test_numbers_that_json_lacks_become_texts() -> None:
    row = (math.nan, -math.inf, math.inf, 2**60, 2**53, 0.1, None, True)
    (block,) = embedded(render(report_of(Table((Column("n", "number"),) * len(row), (row,)))))
    assert block["rows"] == [["NaN", "-Infinity", "Infinity", str(2**60), 2**53, 0.1, None, True]]


TEXTS = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(["</script>", "<!--", "]]>", EVIL])


@given(st.recursive(TEXTS | st.integers() | st.floats() | st.none(), lambda inner: st.lists(inner, max_size=4)))
def test_data_cannot_leave_its_element(value: object) -> None:
    text = embedded_json(value)
    assert text.isascii()
    assert not set(text) & set("<>&")
    json.loads(text)


@given(TEXTS, TEXTS)
def test_any_text_leaves_the_page_whole(name: str, value: str) -> None:
    report = Report(name, value, (Section(name, (Facts(((name, value),)), Note(value)), value),), name)
    page = Reader(render(report))
    plain = Reader(render(Report("a", "b", (Section("a", (Facts((("a", "b"),)), Note("b")), "b"),), "a")))
    dropped = {"p"} if not name or not value else set()
    kinds = [tag for tag, _ in page.elements if tag not in dropped]
    assert kinds == [tag for tag, _ in plain.elements if tag not in dropped]
