"""Formatting for messages: plurals, shortened lists, escaped text for logs and terminals, and JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import msgspec

MOST_LISTED = 5
MOST_SHOWN = 2000  # characters of a line in a message


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 tensor` or `2 tensors`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(texts: Collection[str], most: int = MOST_LISTED, between: str = ", ") -> str:
    """Return the first texts, and how many more there are."""
    hidden = len(texts) - most
    more = f"{between.strip() if between != ', ' else ''} and {hidden} more" if hidden > 0 else ""
    return between.join(islice(texts, most)) + more


def lines_of(texts: Sequence[str], most: int) -> list[str]:
    """Return the first texts as lines, and a line that says how many more there are."""
    hidden = len(texts) - most
    return [*texts[:most], *([f"and {hidden} more"] if hidden > 0 else [])]


def visible(text: str) -> str:
    """Return a text on one line, with every unprintable character escaped as in `repr`."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def visible_lines(text: str) -> str:
    """Return a text as `visible` does, but keep the line breaks, which are our own."""
    return "\n".join(map(visible, text.split("\n")))


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text as `visible` does; of a text that is too long for a message, only the beginning and the end."""
    return _ends(visible(_ends(text, most)), most)


def _ends(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 20
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def encode_json(document: Any) -> bytes:
    """Return a document as one line of JSON. Lone surrogates, as in paths, are escaped; unknown types become text."""
    try:
        return msgspec.json.encode(document, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(document, enc_hook=str)))


def _escape_surrogates(value: Any) -> Any:
    r"""Return plain Python values, in which a lone surrogate is written like \udcff."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return [_escape_surrogates(item) for item in value] if isinstance(value, list | tuple) else value
