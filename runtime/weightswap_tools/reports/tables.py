"""Markup of tables without rows, which a script draws on demand."""

from __future__ import annotations

from .blocks import Column, Table
from .embedding import markup

FILTER_FROM = 11  # rows


def table_markup(table: Table) -> str:
    """Return the markup of a table: filters if it has many rows, headings that sort, and a button for more rows."""
    label = markup(table.caption or "Table")
    heads = "".join(map(_heading, table.columns))
    return (
        f"{_tools(table) if len(table.rows) >= FILTER_FROM else ''}"
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}"><table aria-label="{label}">'
        f"<thead><tr>{heads}</tr></thead><tbody></tbody></table></div>"
        '<button type="button" class="button more" hidden></button>'
    )


def _tools(table: Table) -> str:
    flags = ", ".join(column.name for column in table.columns if column.flag)
    check = f'<label><input type="checkbox">only rows with: {markup(flags)}</label>' if flags else ""
    box = '<input type="search" aria-label="Filter rows" placeholder="Filter" autocomplete="off">'
    return f'<div class="tools">{box}{check}<span class="muted" role="status"></span></div>'


def _heading(column: Column) -> str:
    """Return a heading: the column's name, and the sort arrow on the side where its cells have room."""
    parts = [markup(column.name), '<span class="arrow" aria-hidden="true"></span>']
    label = "".join(parts if column.kind == "text" else reversed(parts))
    return f'<th scope="col" class="{column.kind}" aria-sort="none"><button type="button">{label}</button></th>'
