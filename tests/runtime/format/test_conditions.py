"""Conditions are a small language that is interpreted, never executed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime.format.expressions import all_hold, condition_dims, evaluate, parse_condition


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("rows <= columns", True),
        ("rows > columns", False),
        ("rows % 2 == 0 and columns // 3 == 1", True),
        ("not (rows + 1) * 2 == -columns", True),
        ("max(rows, columns, 7) == 7 or rows != 4", True),
        ("1 < rows < columns", True),
        ("columns % (rows - 4) == 0", False),
        ("not columns % (rows - 4) == 0", False),
        ("max(rows) == 4 and min(columns) == 5", True),
    ],
)
def test_conditions_are_evaluated(text: str, holds: bool) -> None:
    condition = parse_condition(text)
    assert condition_dims(condition) == {name for name in ("rows", "columns") if name in text}
    assert evaluate(condition, {"rows": 4, "columns": 5}) is holds


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
        parse_condition(text, fractions=True)


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
    assert evaluate(parse_condition(text, fractions=True), measured) is False


@pytest.mark.parametrize("text", ["errors * 1e308 * 1e308 > 1", "max(errors) == 3", f"errors < 1{'0' * 300}"])
def test_large_numbers_and_results_are_compared(text: str) -> None:
    assert evaluate(parse_condition(text, fractions=True), {"errors": 3})


names = st.sampled_from(["errors", "zero", "endless", "requests"])
values = st.integers(0, 10**320).map(str) | st.floats(0, allow_infinity=False).map(repr)
terms = st.recursive(
    names | values,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
    max_leaves=8,
)


@given(left=terms, right=terms)
def test_a_rule_is_refused_or_can_be_evaluated(left: str, right: str) -> None:
    measured = {"errors": 0.25, "zero": 0.0, "endless": float("inf"), "requests": 10**15}
    try:
        condition = parse_condition(f"{left} < {right}", fractions=True)
    except ValueError:
        return
    evaluate(condition, measured)
