"""Expressions are small languages that are interpreted, never executed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime.format.expressions import (
    NAME_MATCHES,
    all_hold,
    parse_condition,
    parse_filter,
    parse_rule,
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("1 < rows < columns", True),
        ("columns % (rows - 4) == 0", False),
        ("not columns % (rows - 4) == 0", False),
        ("max(rows) == 4 and min(columns) == 5", True),
    ],
)
def test_conditions_are_evaluated(text: str, holds: bool) -> None:
    condition = parse_condition(text)
    assert condition.names == {name for name in ("rows", "columns") if name in text}
    assert condition.holds({"rows": 4, "columns": 5}) is holds


@pytest.mark.parametrize(
    ("conditions", "holds"), [((), True), (("rows < 3",), True), (("rows < 3", "rows > 2"), False)]
)
def test_all_conditions_have_to_hold(conditions: tuple[str, ...], holds: bool) -> None:
    assert all_hold(conditions, {"rows": 2}) == holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rows <",
        "__import__('os')",
        "rows.real",
        "rows[0]",
        "lambda: 1",
        "rows ** 9",
        "print(rows)",
        "max()",
        "max(*rows)",
        "1.5 < rows",
        "'a' < rows",
        "(rows := 3)",
        "[rows]",
        "max < 9",
        "rows + min < 9",
        "+".join(["rows"] * 300) + " < 9",
        "-" * 1900 + "rows < 9",
        "(" * 500,
        "rows" * 1000,
        "rows < 9\0",
        "rows < \ud800",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        parse_condition(text)


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "text",
    [
        f"errors * {LARGE} > 1",
        f"errors > -{LARGE}",
        "errors > 1e999",
        "errors < 1e308 * 10",
        "errors < max(1e308, 2) * 1e308 - 1e308 * 1e308",
        "errors < 1 // 0",
        "errors % 0 < 1",
        "errors // (2 - 2) < 1",
        "errors * 2 % (1 - max(1)) < 1",
    ],
)
def test_numbers_that_no_rule_can_mean_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|condition"):
        parse_rule(text)


@pytest.mark.parametrize(
    "text",
    [
        "errors * 1e308 * 1e308 * zero < 1",
        "not errors * 1e308 * 1e308 * zero < 1",
        "endless - endless == 0",
        "not endless % 2 == 0",
        "not errors // zero == 0",
        "errors % (errors - 3) > -1",
        "max(endless * zero, 2) == 2",
    ],
)
def test_what_is_not_a_number_is_neither_true_nor_false(text: str) -> None:
    measured = {"errors": 3, "zero": 0.0, "endless": float("inf")}
    assert parse_rule(text)[0].holds(measured) is False


@pytest.mark.parametrize("text", ["errors * 1e308 * 1e308 > 1", "max(errors) == 3", f"errors < 1{'0' * 300}"])
def test_large_numbers_and_results_are_compared(text: str) -> None:
    assert parse_rule(text)[0].holds({"errors": 3})


names = st.sampled_from(["errors", "zero", "endless", "requests"])
numbers = st.integers(0, 10**320).map(str) | st.floats(0, allow_infinity=False).map(repr)
terms = st.recursive(
    names | numbers,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
    max_leaves=8,
)


@given(left=terms, right=terms)
def test_a_rule_is_refused_or_can_be_evaluated(left: str, right: str) -> None:
    measured = {"errors": 0.25, "zero": 0.0, "endless": float("inf"), "requests": 10**15}
    try:
        condition, _ = parse_rule(f"{left} < {right}")
    except ValueError:
        return
    condition.holds(measured)


Tree = tuple[Any, ...]  # ("and", left, right), ("name", "rows"), ...
BINDS = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(["<", "<=", "==", "!=", ">", ">="], 4), "+": 5, "-": 5}
BINDS |= {"*": 6, "//": 6, "%": 6, "negative": 7}
COMPARISON = st.sampled_from(["<", "<=", "==", "!=", ">", ">="])
PATTERNS = st.sampled_from(["*", "enc*", "head.?", "it's and (not) < 1", "né"])


def formatted(tree: Tree, least: int = 0) -> str:
    """Format a tree, without parentheses if its operator binds at least as tightly as the place needs."""
    kind, *operands = tree
    binds = BINDS.get(kind, 9)
    match kind:
        case "name" | "number":
            text = str(operands[0])
        case "matches":
            text = f'name ~ "{operands[0]}"'
        case "max" | "min":
            text = f"{kind}({', '.join(map(formatted, operands))})"
        case "not" | "negative":
            text = f"{'not ' if kind == 'not' else '-'}{formatted(operands[0], binds)}"
        case _:  # operators group from the left, but comparisons would be a chain
            left, right = formatted(operands[0], binds + (binds == 4)), formatted(operands[1], binds + 1)
            text = f"{left} {kind} {right}"
    return f"({text})" if binds < least else text


def meaning(tree: Tree, values: dict[str, Any]) -> Any:
    kind, *operands = tree
    if kind in ("name", "matches"):
        return values[operands[0]]
    if kind == "number":
        return operands[0]
    if kind in ("and", "or"):
        first = meaning(operands[0], values)
        return meaning(operands[1], values) if bool(first) == (kind == "and") else first
    results = [meaning(operand, values) for operand in operands]
    if None in results and BINDS[kind] == 4:
        return False
    return MEANINGS[kind](*results)


MEANINGS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "max": max,
    "min": min,
    "not": operator.not_,
    "negative": operator.neg,
}


def logical(tests: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.recursive(
        tests,
        lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner),
        max_leaves=6,
    )


def conditions(names: st.SearchStrategy[str], numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Tree]:
    computed = st.recursive(
        st.tuples(st.just("name"), names) | st.tuples(st.just("number"), numbers),
        lambda inner: (
            st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "max", "min"]), inner, inner)
            | st.tuples(st.just("negative"), inner)
        ),
        max_leaves=6,
    )
    return logical(st.tuples(COMPARISON, computed, computed))


QUANTITY = st.tuples(st.just("name"), st.sampled_from(["nan", "cosine"]))
NUMBER = st.tuples(st.just("number"), st.sampled_from([-1, 0, 0.5, 1, float("1e400")]))
FILTERS = logical(QUANTITY | st.tuples(st.just("matches"), PATTERNS) | st.tuples(COMPARISON, QUANTITY, NUMBER))


def expected(tree: Tree, values: dict[str, Any]) -> bool:
    try:
        return bool(meaning(tree, values))
    except ZeroDivisionError:
        return False


@given(conditions(st.sampled_from(["rows", "columns"]), st.integers(0, 4)), st.integers(0, 4), st.integers(0, 4))
def test_a_formatted_condition_is_parsed_as_what_it_was(tree: Tree, rows: int, columns: int) -> None:
    sizes = {"rows": rows, "columns": columns}
    assert parse_condition(formatted(tree)).holds(sizes) is expected(tree, sizes)


@given(
    conditions(st.sampled_from(["errors", "p99"]), st.sampled_from([0.25, 2.0, 1e-3])),
    st.floats(0, 4),
    st.sampled_from([("", 0), (" for 5 min", 300), (" for 0.5h", 1800), ("  for  7 s ", 7)]),
)
def test_a_formatted_rule_is_parsed_as_what_it_was(tree: Tree, errors: float, duration: tuple[str, float]) -> None:
    values = {"errors": errors, "p99": 0.25}
    try:
        condition, seconds = parse_rule(formatted(tree) + duration[0])
    except ValueError as error:
        assert "it computes what is not a number" in str(error)  # noqa: PT017
        return
    assert (condition.holds(values), seconds) == (expected(tree, values), duration[1])


@given(FILTERS, st.sampled_from(["head.1", "encoder", "it's and (not) < 1"]), st.sampled_from([None, -2.0, 0.0, 1.0]))
def test_a_formatted_filter_is_parsed_as_what_it_was(tree: Tree, name: str, cosine: float | None) -> None:
    condition = parse_filter(formatted(tree).replace("inf", "1e999"), ["nan", "cosine"])
    values = {"nan": 1.0, "cosine": cosine}
    for pattern in condition.names - values.keys():
        values[pattern] = fnmatchcase(name, pattern.removeprefix(NAME_MATCHES))
    matches = {pattern.removeprefix(NAME_MATCHES): matched for pattern, matched in values.items()}
    assert condition.holds(values) is expected(tree, values | matches)
