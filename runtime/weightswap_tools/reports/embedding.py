"""Safe embedding of texts and data in a page."""

from __future__ import annotations

import html
import json
import math
from typing import Any

import msgspec

from weightswap_runtime.messages import visible_lines

MOST_EXACT = 2**53  # a browser's numbers are float64
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


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
        case int() if abs(value) > MOST_EXACT:
            return str(value)
        case _:
            return value
