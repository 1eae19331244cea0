"""The colours of the style sheet: the same names in both schemes, and contrasts of WCAG 2.1 AA."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import product

import pytest

PAIRS = [
    *product(["text", "muted", "accent"], ["page", "surface", "raised"]),
    *product(["text", "accent"], ["accent-soft"]),
    ("good", "good-soft"),
    ("bad", "bad-soft"),
    ("mark", "mark-soft"),
    ("text", "mark-soft"),
]
SHAPES = [*product([f"hue-{place}" for place in range(1, 9)], ["surface"]), ("edge", "surface"), ("bad", "surface")]


def scheme(name: str) -> dict[str, str]:
    sheet = files("weightswap_runtime.reports").joinpath(f"assets/{name}.css").read_text("utf-8")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", sheet))


SCHEMES = {"light": scheme("colours"), "dark": scheme("dark")}


def luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_schemes_have_the_same_colours() -> None:
    assert SCHEMES["light"].keys() == SCHEMES["dark"].keys()
    assert len(SCHEMES["light"]) > 20


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("least", "pairs"), [(4.5, PAIRS), (3.0, SHAPES)])
def test_contrasts(name: str, least: float, pairs: list[tuple[str, str]]) -> None:
    colours = SCHEMES[name]
    weak = {pair: round(found, 2) for pair in pairs if (found := contrast(*(colours[part] for part in pair))) < least}
    assert weak == {}
