"""docs/glossary.md: each of its words is used where it says, and none that it replaces is used anywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "glossary.md"
WORDS, _, REPLACED = PAGE.read_text().partition("## Words we do not use")
ROWS = re.findall(r"^\| ([\w -]+) \| .+ \| \[\w+\]\(([^)]+)\) \|$", WORDS, re.MULTILINE)
INSTEAD = [
    word
    for cell in re.findall(r"^\| ([\w ,]+?)(?: \(.*\))? \| .+ \|$", REPLACED, re.MULTILINE)
    for word in cell.split(", ")
    if word != "not"
]
PRODUCT = sorted([*ROOT.glob("runtime/**/*.py"), *ROOT.glob("exporter/**/*.py")])


def parts(name: str) -> list[str]:
    """The words of a name in snake case or camel case, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def has(name: str, word: str) -> bool:
    """Whether a name contains the words of `word`, one after another; a plural is the same word."""
    return re.search(rf"(^| ){word.lower()}s?( |$)", " ".join(parts(name))) is not None


def names(tree: ast.Module) -> Iterator[str]:
    """The names of classes, functions, arguments, fields and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def messages(tree: ast.Module) -> Iterator[str]:
    """The texts of a module but its documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize(("word", "path"), ROWS, ids=[word for word, _ in ROWS])
def test_each_word_is_used_where_the_glossary_says(word: str, path: str) -> None:
    module = (PAGE.parent / path).resolve()
    tree = ast.parse(module.read_text())
    used = [module.stem, *names(tree), *messages(tree)]
    assert any(has(each, word) for each in used)


def test_no_replaced_word_is_the_name_of_anything() -> None:
    replaced = f"({'|'.join(INSTEAD)})"
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PRODUCT
        for name in {path.stem, path.parent.name, *names(ast.parse(path.read_text()))}
        if has(name, replaced)
    ]
    assert found == []


def test_the_glossary_is_read_whole() -> None:
    """A row that is written otherwise would not be tested."""
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and not re.match(r"\| (word|not) ", line)
    ]
    assert len(rows) == len(ROWS) + len(re.findall(r"^\| (?!not )", REPLACED, re.MULTILINE))
    assert len({word for word, _ in ROWS}) == len(ROWS) > 40
    assert len(INSTEAD) > 15
