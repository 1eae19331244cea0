"""A report as one HTML file: its styles, scripts and data are in it, and it asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import count
from pathlib import Path

from weightswap_runtime.files import new_report

from .blocks import CHARTS, Block, Facts, Note, Report, Section
from .embedding import embedded_json, markup

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
STYLES = ("page.css", "tables.css", "drawings.css", "modules.css", "media.css")
DARK = "screen and (prefers-color-scheme: dark)"  # until somebody chooses
SCRIPTS = ("base.js", "table.js", "module_panel.js", "modules.js")
CHART_SCRIPTS = ("charts.js", "histogram.js", "heatmap.js", "lines.js", "timeline.js", "treemap.js")
CHART_LIBRARY = "vendor/echarts/echarts.min.js"
START_SCRIPT = "start.js"


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write the report as an HTML file, which appears whole or not at all. A pipe or a device is written to.

    Raises OSError, and Unsupported for what cannot be written to in a row.
    """
    with new_report(Path(path)) as file:
        file.write(render(report).encode())


def render(report: Report) -> str:
    """The report as HTML. The same report gives the same text."""
    blocks = [block for section in report.sections for block in section.blocks]
    return "\n".join([*_head(report), *_body(report), *_data(blocks), *_scripts(blocks), "</body>", "</html>", ""])


def _head(report: Report) -> Iterator[str]:
    yield from ("<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">')
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield '<meta name="referrer" content="no-referrer">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>{markup(report.title)}</title>"
    yield f"<style>\n{_asset('assets/colours.css')}</style>"
    yield f'<style id="dark" media="{DARK}">\n{_asset("assets/dark.css")}</style>'
    yield from (f"<style>\n{_asset(f'assets/{name}')}</style>" for name in STYLES)
    yield "</head>"


def _body(report: Report) -> Iterator[str]:
    yield "<body>"
    yield '<a class="skip" href="#content">Skip to the content</a>'
    yield '<header class="top"><div class="heading">'
    yield f"<h1>{markup(report.title)}</h1>"
    if report.verdict:
        yield f'<p class="verdict {_tone(report.good)}">{markup(report.verdict)}</p>'
    yield '</div><button type="button" id="theme" class="button" hidden></button>'
    if report.subtitle:
        yield f'<p class="subtitle">{markup(report.subtitle)}</p>'
    yield "</header>"
    yield "<noscript><p class='note bad'>Tables and charts of this page need JavaScript.</p></noscript>"
    yield from _contents(report.sections)
    yield '<main id="content">'
    numbers = count()
    for place, section in enumerate(report.sections):
        yield from _section(place, section, numbers)
    yield "</main>"


def _tone(good: bool | None) -> str:
    return "plain" if good is None else "good" if good else "bad"


def _contents(sections: tuple[Section, ...]) -> Iterator[str]:
    if len(sections) < 2:
        return
    links = (
        f'<li><a href="#section-{place}">{markup(section.title)}</a></li>' for place, section in enumerate(sections)
    )
    yield f'<nav class="contents" aria-label="Sections"><ul>{"".join(links)}</ul></nav>'


def _section(place: int, section: Section, numbers: Iterator[int]) -> Iterator[str]:
    yield f'<section id="section-{place}" aria-labelledby="title-{place}">'
    yield f'<h2 id="title-{place}">{markup(section.title)}</h2>'
    if section.note:
        yield f'<p class="lead">{markup(section.note)}</p>'
    for block in section.blocks:
        yield _block(block, numbers)
    yield "</section>"


def _block(block: Block, numbers: Iterator[int]) -> str:
    """Facts and notes as they are; of the others the place that a script fills, with the number of its data."""
    match block:
        case Facts():
            rows = (f"<div><dt>{markup(name)}</dt><dd>{markup(value)}</dd></div>" for name, value in block.rows)
            return f'<dl class="facts">{"".join(rows)}</dl>'
        case Note():
            return f'<p class="note {block.kind}">{markup(block.text)}</p>'
        case _:
            return f'<figure class="block" data-block="{next(numbers)}"></figure>'


def _data(blocks: list[Block]) -> Iterator[str]:
    drawn = [block for block in blocks if not isinstance(block, Facts | Note)]
    yield f'<script type="application/json" id="data">{embedded_json(drawn)}</script>'


def _scripts(blocks: list[Block]) -> Iterator[str]:
    charts = any(isinstance(block, CHARTS) for block in blocks)
    names = [CHART_LIBRARY] if charts else []
    names += [f"assets/{name}" for name in (*SCRIPTS, *(CHART_SCRIPTS if charts else ()), START_SCRIPT)]
    for name in names:
        yield f"<script>\n{_asset(name)}</script>"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
