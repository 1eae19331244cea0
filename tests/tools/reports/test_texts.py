"""Numbers and names as short texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightswap_tools.reports.markup import cut_text, distinct_texts, number_text, short_text


@pytest.mark.parametrize(
    ("value", "digits", "says"),
    [
        (0.0, 2, "0"),
        (1234.0, 2, "1200"),
        (0.25, 3, "0.25"),
        (1e-7, 2, "1e-7"),
        (4.47e-4, 2, "4.5e-4"),
        (123456.0, 3, "1.23e5"),
        (-1e308, 2, "-1e308"),
        (5e-324, 2, "5e-324"),
        (math.inf, 3, "inf"),
    ],
)
def test_numbers_have_few_digits(value: float, digits: int, says: str) -> None:
    assert short_text(value, digits) == says


@pytest.mark.parametrize(
    ("value", "says"),
    [(1234567, "1,234,567"), (-2.0, "-2"), (0.123456789, "0.123457"), (1e-9, "1e-9"), (1e300, "1e300")],
)
def test_whole_numbers_are_shown_in_full(value: float, says: str) -> None:
    assert number_text(value) == says


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=3, unique=True))
def test_different_numbers_have_different_texts(values: list[float]) -> None:
    assert len(set(distinct_texts(values))) == len(values)


@given(st.text(max_size=60), st.integers(5, 40))
def test_long_names_keep_both_ends(name: str, most: int) -> None:
    cut = cut_text(name, most)
    assert len(cut) == min(most, len(name))
    first, _, last = cut.rpartition("…") if len(name) > most else (name, "", "")
    assert name.startswith(first)
    assert name.endswith(last)
