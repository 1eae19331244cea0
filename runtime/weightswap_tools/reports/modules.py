"""The page data of a graph by module: each module with its path, its calls and its texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs, to_builtins

from .blocks import ModuleGraph, ModuleNode, ModuleRun
from .texts import number_text

ROWS_AT_FIRST = 26
Node = dict[str, Any]


def module_tree(graph: ModuleGraph) -> Node:
    """Return the block as data. Modules that are open at first have `open`."""
    root = _node(structs.replace(graph.root, name=""), "", "") | {"name": graph.root.name}
    _open_first(root)
    return {"type": "modules", "caption": graph.caption, "root": root}


def _node(item: ModuleNode | ModuleRun, parent_path: str, parent_name: str) -> Node:
    if isinstance(item, ModuleRun):
        return _run(item.modules, parent_path, parent_name)
    path = _joined(parent_path, item.name)
    children = [_node(child, path, item.name) for child in item.children]
    own = sum(count for _, count in item.ops)
    calls = own + sum(child["calls"] for child in children)
    text = f"{number_text(own)} of its own, {number_text(calls)} with those of its modules"
    if own == calls:
        text = number_text(calls) if calls else "none of its own"
    fields = to_builtins(structs.replace(item, children=()))
    return {**fields, "children": children, "path": path, "calls": calls, "told": text}


def _run(modules: tuple[ModuleNode, ...], parent_path: str, parent_name: str) -> Node:
    """Return the entry of a run: the class and the weights of each module."""
    first, names = modules[0], f"{modules[0].name}-{modules[-1].name}"
    children = [_node(module, parent_path, parent_name) for module in modules]
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


def _open_first(root: Node) -> None:
    """Open the top levels that fit on a screen; runs stay closed."""
    rows, level = 1, [root]
    while level:
        rows += sum(len(node["children"]) for node in level)
        if rows > ROWS_AT_FIRST and "open" in root:
            break
        for node in level:
            node["open"] = True
        level = list(_below(level))


def _below(level: list[Node]) -> Iterable[Node]:
    return (child for node in level for child in node["children"] if "alike" not in child)
