"""A chart: the options of the library, the markup around it, and the table with the same numbers."""

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
    """A chart. label: for screen readers. before, after: markup around it. root: of a treemap's areas."""

    label: str
    height: int
    option: Option
    table: Table
    before: str = ""
    after: str = ""
    widest: str = "none"
    root: Option | None = None

    def markup(self) -> str:
        """Return the box of the chart with the markup around it and the table."""
        size = f"height: {self.height}px; max-width: {self.widest}"
        box = f'<div class="chart" role="img" aria-label="{markup(self.label)}" style="{size}"></div>'
        numbers = f"<summary>The same as a table</summary>{table_markup(self.table)}"
        return f"{self.before}{box}{self.after}<details>{numbers}</details>"


def hue(number: int) -> str:
    """Return a categorical colour by number from 0 on; colours repeat after HUES."""
    return f"var(--hue-{number % HUES + 1})"


def moves(label: str, buttons: Mapping[str, tuple[float, float]]) -> str:
    """Return buttons that move the visible range, by a fraction of its width, and scale it."""
    markups = (
        f'<button type="button" class="button" data-shift="{shift}" data-scale="{scale}">{name}</button>'
        for name, (shift, scale) in buttons.items()
    )
    return f'<div class="moves" role="group" aria-label="{label}">{"".join(markups)}</div>'
