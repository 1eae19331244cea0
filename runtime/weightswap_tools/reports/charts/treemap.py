"""Treemaps. The reader navigates in the chart, in the path above it, or in the list beside it."""

from __future__ import annotations

from collections.abc import Iterator

from weightswap_tools.module_tree import natural
from weightswap_tools.reports.blocks import Column, Table, Treemap, TreemapNode

from .chart import Chart, Option

MOST_PARTS = 150
HEIGHT = 420
_PATH = '<nav aria-label="Path"><ol class="trail"></ol></nav><div class="zoom">'
_LIST = '<nav class="side" aria-label="What is inside" tabindex="-1"><ul class="parts"></ul></nav></div>'
_OPTION = {
    "tooltip": {"trigger": "item"},
    "series": [
        {
            "type": "treemap",
            "animation": False,  # areas and labels would fly across each other
            **dict.fromkeys(("left", "right", "top", "bottom"), 0),
            "roam": False,
            "nodeClick": False,
            "breadcrumb": {"show": False},
            "visibleMin": 60,
            "label": {"lineHeight": 16, "padding": [4, 3], "position": "insideTopLeft"},
            "upperLabel": {"show": True, "height": 22, "padding": [0, 3]},
            "levels": [
                {
                    "itemStyle": {"gapWidth": 3, "borderWidth": 0, "borderColor": "var(--surface)"},
                    "upperLabel": {"show": False},
                },
                {"itemStyle": {"gapWidth": 1, "borderWidth": 2}},
            ],
        }
    ],
}


def treemap(block: Treemap) -> Chart:
    """Return a chart with two levels of areas, starting at the root."""
    columns = (Column("name"), Column(block.what, "bytes" if block.what == "bytes" else "number"), Column("detail"))
    label = block.caption or f"Areas of {block.what}"
    table = Table(columns, tuple(_leaves(block.root, "")))
    return Chart(label, HEIGHT, _OPTION, table, _PATH, _LIST, root=_area(block.root))


def _area(node: TreemapNode) -> Option:
    """Return a node with its children by falling size, then by name; the smallest of many are merged."""
    children = sorted(node.children, key=lambda child: (-child.size, natural(child.name)))
    if rest := children[MOST_PARTS:]:
        size = sum(child.size for child in rest)
        children[MOST_PARTS:] = [TreemapNode(f"{len(rest):,} more", size, "the smallest ones")]
    return {"name": node.name, "value": node.size, "detail": node.detail, "children": [*map(_area, children)]}


def _leaves(node: TreemapNode, path: str) -> Iterator[tuple[str, int, str]]:
    if not node.children:
        yield path or node.name, node.size, node.detail
    for child in node.children:
        yield from _leaves(child, f"{path}.{child.name}" if path else child.name)
