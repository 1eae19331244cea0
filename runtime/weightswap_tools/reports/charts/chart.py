"""A chart: what the library is told, what is around it on the page, and the table with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from weightswap_tools.reports.blocks import Table
from weightswap_tools.reports.embedding import markup
from weightswap_tools.reports.tables import table_markup

Option = dict[str, Any]
HUES = 8
NO_LINES = {"splitLine": {"show": False}}


class Chart(NamedTuple):
    """label: its name for who cannot see it. before, after: markup around it. root: of areas that are entered."""

    label: str
    height: int
    option: Option
    table: Table
    before: str = ""
    after: str = ""
    widest: str = "none"
    root: Option | None = None

    def markup(self) -> str:
        """The box of the drawing, with all that is around it."""
        size = f"height: {self.height}px; max-width: {self.widest}"
        box = f'<div class="chart" role="img" aria-label="{markup(self.label)}" style="{size}"></div>'
        numbers = f"<summary>The same as a table</summary>{table_markup(self.table)}"
        return f"{self.before}{box}{self.after}<details>{numbers}</details>"


def hue(number: int) -> str:
    """A colour for each of a few things, by number from 0 on; more have the same colours again."""
    return f"var(--hue-{number % HUES + 1})"


def moves(label: str, buttons: Mapping[str, tuple[float, float]]) -> str:
    """Buttons for the part of a chart that is shown: by how many of its widths it moves, and how it grows."""
    made = (
        f'<button type="button" class="button" data-shift="{shift}" data-scale="{scale}">{name}</button>'
        for name, (shift, scale) in buttons.items()
    )
    return f'<div class="moves" role="group" aria-label="{label}">{"".join(made)}</div>'
