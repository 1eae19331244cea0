"""Words of messages: lists, numbers of things, text from elsewhere as logs and terminals may show it, and JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import msgspec

MOST_LISTED = 5
MOST_SHOWN = 2000  # characters of a line in a message


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(texts: Collection[str], most: int = MOST_LISTED, between: str = ", ") -> str:
    """The first texts, and how many more there are."""
    left = len(texts) - most
    more = f"{between.strip() if between != ', ' else ''} and {left} more" if left > 0 else ""
    return between.join(islice(texts, most)) + more


def lines_of(texts: Sequence[str], most: int) -> list[str]:
    """The first texts, each a line, and one that says how many more there are."""
    left = len(texts) - most
    return [*texts[:most], *([f"and {left} more"] if left > 0 else [])]


def visible(text: str) -> str:
    """On one line, with everything spelled out that a reader could not see, or that a terminal or a page would obey."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def visible_lines(text: str) -> str:
    """As `visible`, for a text that we have written over several lines ourselves."""
    return "\n".join(map(visible, text.split("\n")))


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """As `visible`; of a text that is too long for a message, the beginning and the end."""
    return _ends(visible(_ends(text, most)), most)


def _ends(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 20
    return f"{text[:half]} ... {len(text) - 2 * half} letters ... {text[-half:]}"


def encode_json(document: Any) -> bytes:
    """One line. What UTF-8 cannot hold, as in paths of other bytes, is spelled out; what JSON has not is text."""
    try:
        return msgspec.json.encode(document, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_spelled_out(msgspec.to_builtins(document, enc_hook=str)))


def _spelled_out(found: Any) -> Any:
    r"""Plain Python values; what UTF-8 cannot hold is written like \udcff."""
    if isinstance(found, str):
        return found.encode(errors="backslashreplace").decode()
    if isinstance(found, dict):
        return {_spelled_out(name): _spelled_out(value) for name, value in found.items()}
    return [_spelled_out(value) for value in found] if isinstance(found, list | tuple) else found
