"""The colours of the style sheet: the same names in both schemes, and contrasts of WCAG 2.1 AA."""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.tools.reports.conftest import Open
from tests.tools.reports.samples import HEAT, report_of
from weightswap_tools.reports.page import LOOK

PAIRS = [
    *product(["text", "muted", "accent"], ["page", "surface", "raised"]),
    *product(["text", "accent"], ["accent-soft"]),
    ("good", "good-soft"),
    ("bad", "bad-soft"),
    ("mark", "mark-soft"),
    ("text", "mark-soft"),
]
SHAPES = [*product([f"hue-{place}" for place in range(1, 9)], ["surface"]), ("edge", "surface"), ("bad", "surface")]


SHEET = (LOOK / "colours.css").read_text("utf-8")
COLOURS = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", SHEET)
SCHEMES = {
    "light": {name: light for name, light, _ in COLOURS},
    "dark": {name: dark for name, _, dark in COLOURS},
}


def luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_of_both_schemes() -> None:
    assert len(SCHEMES["light"]) == SHEET.count("  --") > 20


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("least", "pairs"), [(4.5, PAIRS), (3.0, SHAPES)])
def test_contrasts(name: str, least: float, pairs: list[tuple[str, str]]) -> None:
    colours = SCHEMES[name]
    weak = {pair: round(found, 2) for pair in pairs if (found := contrast(*(colours[part] for part in pair))) < least}
    assert weak == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_text_on_colours_is_black_or_white_with_enough_contrast(name: str, open_report: Open) -> None:
    page = open_report(report_of(HEAT), color_scheme=name)
    fills = [*(f"hue-{place}" for place in range(1, 9)), *(f"heat-{place}" for place in range(1, 6)), "bad", "raised"]
    inks = page.locator(".swatch").first.evaluate(INKS, fills)
    known = {"lab(0 0 0)": "#000000", "lab(100 0 0)": "#ffffff"}
    assert [
        fill for fill, ink in zip(fills, inks, strict=True) if contrast(known[ink], SCHEMES[name][fill]) < 4.5
    ] == []


INKS = """(swatch, fills) => fills.map((fill) => {
    swatch.style.setProperty("--fill", `var(--${fill})`);
    return getComputedStyle(swatch).color;
})"""
