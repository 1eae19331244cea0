"""Every page: its links lead somewhere, the names that it gives are there, and its lines fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "README.md"])
WIDTH = 120
WIDE_TABLES = {"architecture", "glossary", "libraries", "transformers"}
MAP = ROOT / "docs" / "architecture.md"
SUBPACKAGES = [page.parent for page in ROOT.glob("[er]*/weightswap_*/*/__init__.py")]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, and the anchors in them."""
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        yield page.parent / path if path else page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    assert [path for path, _ in links(page) if not path.exists()] == []
    assert [(path, anchor) for path, anchor in links(page) if anchor and anchor not in anchors(path)] == []


@every_page
def test_names_are_there(page: Path) -> None:
    for name in re.findall(
        r"\bweightswap_(?:exporter|fleet|runtime|server|tools)(?:\.[A-Za-z]\w*)+(?!\w*/)", page.read_text()
    ):
        assert resolve_name(name) is not None


@every_page
def test_lines_fit(page: Path) -> None:
    """Tables of figures and of types are as scripts print them; tests, architecture and glossary have links."""
    has_wide_tables = page.parent.name in ("benchmarks", "tests") or page.stem in WIDE_TABLES
    printed = "|" if has_wide_tables else "\0"
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > WIDTH and not line.startswith(printed)] == []


def test_every_page_can_be_reached() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        found = {path.resolve() for page in new for path, _ in links(page)}
        new = {path for path in found if path.suffix == ".md"} - reached
    assert [page for page in PAGES if page not in reached] == []


def test_every_subpackage_is_on_the_map() -> None:
    shown = {path.resolve() for path, _ in links(MAP)}
    assert len(SUBPACKAGES) > 20
    assert [subpackage for subpackage in SUBPACKAGES if subpackage not in shown] == []


def test_the_modules_on_the_map_are_there() -> None:
    """Those that are named as `subpackage/module`, also in drawings."""
    text = re.sub(r"\]\([^)]+\)", "", MAP.read_text())
    named = re.findall(rf"\b({'|'.join({subpackage.name for subpackage in SUBPACKAGES})})/([a-z_]+)\b", text)
    assert len(named) > 20
    packages = {subpackage.parent for subpackage in SUBPACKAGES}
    assert [name for name in named if not any(is_there(package.joinpath(*name)) for package in packages)] == []


def is_there(module: Path) -> bool:
    return module.is_dir() or module.with_suffix(".py").exists()
