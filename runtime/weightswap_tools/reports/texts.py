"""Numbers as short texts, for axes, legends and tooltips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal


def number_text(value: float) -> str:
    """Return a number as the tables of a page show it: integers in full, others with six digits."""
    if value == value // 1 and abs(value) < 1e15:
        return f"{int(value):,}"
    return short_text(value, 6)


def short_text(value: float, digits: int) -> str:
    """Return a number with this many significant digits: `0.25`, `4.5e-4`, `inf`."""
    rounded = repr(float(f"{value:.{digits}g}"))
    if 1e-3 <= abs(value) < 1e5 or value == 0 or not math.isfinite(value):
        return rounded.removesuffix(".0")
    return f"{Decimal(rounded).normalize():e}".replace("e+", "e")


def distinct_texts(values: Sequence[float]) -> list[str]:
    """Return numbers with the fewest digits that keep their texts distinct."""
    texts: list[str] = []
    for digits in range(2, 18):
        texts = [short_text(value, digits) for value in values]
        if len(set(texts)) == len(values):
            break
    return texts


def cut_text(text: str, most: int) -> str:
    """Cut a text in the middle, as names of weights start alike."""
    end = -(-most * 3 // 5)
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


TIME_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def seconds_text(value: float) -> str:
    """Return a time in the unit that suits it: `0.25` as `250 ms`."""
    factor, unit = time_unit(value)
    return f"{short_text(value * factor, 4)} {unit}"


def time_unit(longest: float) -> tuple[float, str]:
    """Return the units per second of the unit that suits a time, and its name."""
    if longest == 0:
        return 1.0, "s"
    return next((factor, unit) for least, factor, unit in TIME_UNITS if abs(longest) >= least)
