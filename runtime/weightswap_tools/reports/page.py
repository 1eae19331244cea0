"""The page: a report as one HTML file that loads nothing.

Texts are in the markup; tables, charts and module graphs are data in a JSON element, which scripts draw. Nothing in the
data can become markup: texts enter the page through `textContent` alone, and the page's policy forbids requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import structs, to_builtins

from weightswap_runtime.sources.writing import new_report

from .blocks import Block, ChartBlock, Facts, ModuleGraph, ModuleNode, ModuleRun, Note, Report, Section, Table
from .charts import chart_of
from .markup import embedded_json, markup, number_text, table_markup

Data = dict[str, Any]
LOOK = Path(__file__).parents[2] / "weightswap_server" / "admin" / "page"  # not imported: its extra may be absent
_ASSETS = Path(__file__).parent / "assets"
_STYLES = (LOOK / "colours.css", LOOK / "look.css", _ASSETS / "page.css", _ASSETS / "blocks.css")
_SCRIPTS = tuple(_ASSETS / name for name in ("page.js", "table.js", "modules.js", "charts.js", "start.js"))
_CHART_LIBRARY = Path(__file__).parent / "vendor" / "echarts" / "echarts.min.js"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_MODULES = """<div class="tools">
<input type="search" aria-label="Search modules" placeholder="Search modules, classes, operators" autocomplete="off">
<button type="button" class="button expand">Expand all</button>
<button type="button" class="button collapse">Collapse all</button>
<span class="muted" role="status"></span></div>
<div class="modules">
<div class="side"><ul class="tree" role="tree" aria-label="Modules"></ul><p class="muted"></p></div>
<div class="panel" role="region" aria-label="The selected module" tabindex="0"></div></div>"""
_MODULES_AT_FIRST = 26  # as many as fit on a screen


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write the report atomically as an HTML file. A pipe or a device is written to directly.

    Raises OSError, and Unsupported for a path that cannot be written to sequentially.
    """
    with new_report(Path(path)) as file:
        file.write(render(report).encode())


def render(report: Report) -> str:
    """Return the report as HTML, deterministically."""
    data: list[Data] = []
    body = [*_body(report, data)]
    script = f'<script type="application/json" id="data">{embedded_json(data)}</script>'
    library = [_CHART_LIBRARY] if any("option" in block_data for block_data in data) else []
    scripts = (f"<script>\n{_asset(path)}</script>" for path in (*library, *_SCRIPTS))
    return "\n".join([*_head(report), *body, script, *scripts, "</body>", "</html>", ""])


@cache
def _asset(path: Path) -> str:
    return path.read_text("utf-8")


def _head(report: Report) -> Iterator[str]:
    yield from ("<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">')
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield '<meta name="referrer" content="no-referrer">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>{markup(report.title)}</title>"
    yield from (f"<style>\n{_asset(path)}</style>" for path in _STYLES)
    yield "</head>"


def _body(report: Report, data: list[Data]) -> Iterator[str]:
    yield "<body>"
    yield '<a class="skip" href="#content">Skip to the content</a>'
    yield '<header class="top"><div class="heading">'
    yield f"<h1>{markup(report.title)}</h1>"
    if report.verdict:
        tone = "plain" if report.good is None else "good" if report.good else "bad"
        yield f'<p class="verdict {tone}">{markup(report.verdict)}</p>'
    yield '</div><button type="button" id="theme" class="button" hidden></button>'
    if report.subtitle:
        yield f'<p class="subtitle">{markup(report.subtitle)}</p>'
    yield "</header>"
    yield "<noscript><p class='note bad'>Tables and charts of this page need JavaScript.</p></noscript>"
    sections = list(enumerate(report.sections))
    if len(sections) > 1:
        links = (f'<li><a href="#section-{index}">{markup(section.title)}</a></li>' for index, section in sections)
        yield f'<nav class="contents" aria-label="Sections"><ul>{"".join(links)}</ul></nav>'
    yield '<main id="content">'
    for index, section in sections:
        yield from _section(index, section, data)
    yield "</main>"


def _section(index: int, section: Section, data: list[Data]) -> Iterator[str]:
    yield f'<section id="section-{index}" aria-labelledby="title-{index}">'
    yield f'<h2 id="title-{index}">{markup(section.title)}</h2>'
    if section.note:
        yield f'<p class="lead">{markup(section.note)}</p>'
    for block in section.blocks:
        yield _block(block, data)
    yield "</section>"


def _block(block: Block, data: list[Data]) -> str:
    """Return the markup of a block. The data that its script needs is appended to `data`."""
    match block:
        case Facts():
            rows = (f"<div><dt>{markup(name)}</dt><dd>{markup(value)}</dd></div>" for name, value in block.rows)
            return f'<dl class="facts">{"".join(rows)}</dl>'
        case Note():
            return f'<p class="note {block.kind}">{markup(block.text)}</p>'
        case Table():
            return _figure(block, table_markup(block), to_builtins(block), data)
        case ModuleGraph():
            return _figure(block, _MODULES, _module_tree(block), data)
        case _:
            chart = chart_of(block)
            numbers = {**to_builtins(chart.table), "type": "chart", "caption": block.caption}
            return _figure(block, chart.markup(), {**numbers, "option": chart.option, "root": chart.root}, data)


def _figure(block: Table | ModuleGraph | ChartBlock, content: str, block_data: Data, data: list[Data]) -> str:
    data.append(block_data)
    caption = f"<figcaption>{markup(block.caption)}</figcaption>" if block.caption else ""
    return f'<figure class="block" data-block="{len(data) - 1}">{caption}{content}</figure>'


def _module_tree(graph: ModuleGraph) -> Data:
    """Return the block as data. Modules that are open at first have `open`: the top levels, but no runs."""
    root = _module(structs.replace(graph.root, name=""), "", "") | {"name": graph.root.name}
    rows, level = 1, [root]
    while level:
        rows += sum(len(node["children"]) for node in level)
        if rows > _MODULES_AT_FIRST and "open" in root:
            break
        for node in level:
            node["open"] = True
        level = [child for node in level for child in node["children"] if "alike" not in child]
    return {"type": "modules", "caption": graph.caption, "root": root}


def _module(item: ModuleNode | ModuleRun, parent_path: str, parent_name: str) -> Data:
    if isinstance(item, ModuleRun):
        return _run(item.modules, parent_path, parent_name)
    path = _joined(parent_path, item.name)
    children = [_module(child, path, item.name) for child in item.children]
    own = sum(count for _, count in item.ops)
    calls = own + sum(child["calls"] for child in children)
    text = f"{number_text(own)} of its own, {number_text(calls)} with those of its modules"
    if own == calls:
        text = number_text(calls) if calls else "none of its own"
    fields = to_builtins(structs.replace(item, children=()))
    return {**fields, "children": children, "path": path, "calls": calls, "told": text}


def _run(modules: tuple[ModuleNode, ...], parent_path: str, parent_name: str) -> Data:
    """Return the entry of a run: the class and the weights of each module."""
    first, names = modules[0], f"{modules[0].name}-{modules[-1].name}"
    children = [_module(module, parent_path, parent_name) for module in modules]
    counts = [child["calls"] for child in children]
    least, most, calls = map(number_text, (min(counts), max(counts), sum(counts)))
    per_module = least if least == most else f"{least} to {most}"
    return {
        "name": _joined(parent_name, names),
        "path": _joined(parent_path, names),
        "kind": first.kind,
        "detail": first.detail and f"each: {first.detail}",
        "alike": len(modules),
        "calls": sum(counts),
        "told": f"{per_module} each, {calls} in all" if sum(counts) else "none of its own",
        "children": children,
        **dict.fromkeys(("ops", "takes", "gives"), ()),
    }


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
