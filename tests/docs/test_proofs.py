"""tests/README.md, which leads from each promise and each page to its proof, is whole and true."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from tests import ROOT
from tests.support.shares import left_for_other_days
from tests.support.short_run import spread

TESTS = ROOT / "tests"
PAGE = (TESTS / "README.md").read_text()
NAMED = {(TESTS / path).resolve() for path in re.findall(r"\]\((?!http)([^)]+)\)", PAGE)}


def test_what_it_names_is_there() -> None:
    assert [path for path in NAMED if not path.exists()] == []
    proofs = re.findall(r"\(([\w/]+\.py)\) `(test_\w+)`", PAGE)
    assert proofs
    assert [each for each in proofs if f"def {each[1]}(" not in (TESTS / each[0]).read_text()] == []


def test_each_promise_has_a_proof() -> None:
    _, *parts = re.split(r"^\*\*(\d+)\. ", PAGE.partition("## The pages")[0], flags=re.MULTILINE)
    assert parts[::2] == [str(number) for number in range(1, 11)]
    assert all("/test_" in part for part in parts[1::2])


def test_each_page_and_each_module_of_the_promises_is_named() -> None:
    pages, modules = ROOT.glob("docs/*.md"), TESTS.glob("promises/**/test_*.py")
    assert {ROOT / "README.md", *pages, *modules} - NAMED == set()


def test_each_proof_that_the_promises_name_is_named() -> None:
    promises = (ROOT / "docs/promises.md").read_text()
    assert {
        (ROOT / "docs" / path).resolve() for path in re.findall(r"\]\((\.\./tests/[^)]+\.py)\)", promises)
    } - NAMED == set()


def test_what_ci_leaves_for_other_days_is_run_within_three() -> None:
    """The long run in thirds; what is not slow runs each day."""

    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    names = ["a", *(f"b[{number}]" for number in range(7)), "c", "d[x]", "d[y]", "e"]
    items = [Item(nodeid=name, get_closest_marker=lambda _, name=name: name != "e") for name in names]
    days = [{item.nodeid for item in items} - {item.nodeid for item in _left(items, day)} for day in range(3)]
    assert set().union(*days) == set(names)
    assert set.intersection(*days) == {"e"}
    assert [len(day) for day in days] == [6, 4, 4]
    assert _left(items, 0, share=1) == set()


def test_of_many_examples_the_short_run_has_some() -> None:
    assert spread(7, 3) == {0, 2, 4}
    assert spread(2, 4) == spread(2, 2) == {0, 1}
    assert spread(5, 1) == {0}


def _left(items: Any, day: int, share: int = 3) -> Any:
    return left_for_other_days(items, share, day)
