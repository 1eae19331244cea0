"""tests/README.md, which leads from each promise and each page to its proof, is whole and true."""

from __future__ import annotations

import re

from tests import ROOT

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
