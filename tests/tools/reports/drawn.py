"""The drawn shapes of a chart's SVG, and the table behind it."""

from __future__ import annotations

from typing import Any


def labels(page: Any) -> list[str]:
    texts: list[str] = page.locator("svg text").all_text_contents()
    return texts


def fills(page: Any) -> list[str]:
    """The computed colour of every drawn shape, in order."""
    colours: list[str] = page.locator("svg path[fill]").evaluate_all(
        "all => all.map(one => getComputedStyle(one).fill)"
    )
    return colours


def colour(page: Any, variable: str) -> str:
    """The computed colour of a variable of the style sheet."""
    seen: str = page.evaluate(
        """(name) => {
            const probe = document.body.appendChild(document.createElement("i"));
            probe.style.color = `var(--${name})`;
            const { color } = getComputedStyle(probe);
            probe.remove();
            return color;
        }""",
        variable,
    )
    return seen


def shapes(page: Any, variable: str) -> int:
    """The number of shapes in the colour of a variable of the style sheet."""
    return fills(page).count(colour(page, variable))


def alternative(page: Any) -> list[list[str]]:
    """The rows of the table behind a chart, opened by keyboard."""
    page.get_by_text("The same as a table").press("Enter")
    page.locator("details tbody").wait_for()
    rows = page.locator("details tbody tr").all()
    return [row.locator("th, td").all_text_contents() for row in rows]
