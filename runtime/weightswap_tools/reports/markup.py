"""What stands in a page: escaped texts, data for scripts, numbers in words, tables."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from weightswap_runtime.errors import visible_lines

from .blocks import Column, Table

_MOST_EXACT = 2**53  # a browser's numbers are float64
# An HTML parser looks for `</script>` and `<!--` even in JSON; U+2028 and U+2029 end lines in older scripts.
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
_FILTER_FROM = 11  # rows


def markup(text: str) -> str:
    """Escape a text for HTML elements and quoted attributes."""
    return html.escape(visible_lines(text))


def embedded_json(value: Any) -> str:
    """Return a value as JSON that is safe in a `<script>` element.

    Numbers that JSON or browsers cannot represent become strings: `NaN`, `Infinity`, integers of more than 53 bits.
    """
    plain = _exact(msgspec.to_builtins(value))
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _exact(value: Any) -> Any:
    match value:
        case str():
            return visible_lines(value)
        case dict():
            return {key: _exact(item) for key, item in value.items()}
        case list() | tuple():
            return [_exact(item) for item in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
        case int() if abs(value) > _MOST_EXACT:
            return str(value)
        case _:
            return value


def table_markup(table: Table) -> str:
    """Return the markup of a table: filters if it has many rows, headings that sort, and a button for more rows."""
    label = markup(table.caption or "Table")
    heads = "".join(map(_heading, table.columns))
    return (
        f"{_filters(table) if len(table.rows) >= _FILTER_FROM else ''}"
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}"><table aria-label="{label}">'
        f"<thead><tr>{heads}</tr></thead><tbody></tbody></table></div>"
        '<button type="button" class="button more" hidden></button>'
    )


def _filters(table: Table) -> str:
    flags = ", ".join(column.name for column in table.columns if column.flag)
    check = f'<label><input type="checkbox">only rows with: {markup(flags)}</label>' if flags else ""
    box = '<input type="search" aria-label="Filter rows" placeholder="Filter" autocomplete="off">'
    return f'<div class="tools">{box}{check}<span class="muted" role="status"></span></div>'


def _heading(column: Column) -> str:
    """Return a heading: the column's name, and the sort arrow on the side where its cells have room."""
    parts = [markup(column.name), '<span class="arrow" aria-hidden="true"></span>']
    label = "".join(parts if column.kind == "text" else reversed(parts))
    return f'<th scope="col" class="{column.kind}" aria-sort="none"><button type="button">{label}</button></th>'


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
