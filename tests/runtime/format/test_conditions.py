"""Conditions are a small language that is interpreted, never executed."""

from __future__ import annotations

import pytest

from weightswap_runtime.format.conditions import all_hold, condition_dims, evaluate, parse_condition


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
