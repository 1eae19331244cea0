"""Tensors by module, as a treemap and as a table."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from weightswap_tools.module_tree import Branch, grow, sizes_below, split_name, totals
from weightswap_tools.reports.blocks import Column, Table, Treemap, TreemapNode


def weights_map(sizes: Mapping[str, int], details: Mapping[str, str], title: str) -> Treemap:
    """Return a treemap of named tensors. sizes: in bytes. details: a text for each tensor. title: the root's name."""
    root = grow(sizes)
    sums = sizes_below(root, sizes)

    def area(branch: Branch) -> TreemapNode:
        tensors = [TreemapNode(split_name(name)[1], sizes[name], details[name]) for name in branch.names]
        children = (*(area(child) for child in branch.branches.values()), *tensors)
        if len(children) == 1 and branch.parts:  # merge an area that another would fill
            return structs.replace(children[0], name=f"{branch.name}.{children[0].name}")
        return TreemapNode(branch.name or title, sums[branch], f"{len(children)} inside", children)

    return Treemap(area(root), "bytes", "Bytes by module")


def modules_table(sizes: Mapping[str, int]) -> Table:
    """Return a table of modules, with the number and the bytes of the tensors in them and below."""
    rows = tuple((path or "(model)", count, nbytes) for path, count, nbytes in totals(sizes))
    return Table((Column("module"), Column("tensors", "number"), Column("size", "bytes")), rows, "By module")
