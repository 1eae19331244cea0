"""Text from elsewhere (names, labels, paths, messages of others), as messages, logs and terminals show it."""

from __future__ import annotations

MOST_SHOWN = 2000  # characters of a line in a message


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
