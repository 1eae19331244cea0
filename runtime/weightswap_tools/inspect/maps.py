"""Tensors by module as nested areas."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from weightswap_tools.module_tree import Branch, grow, sizes_below, split_name, totals
from weightswap_tools.reports.blocks import Column, Table, Treemap, TreemapNode


def weights_map(sizes: Mapping[str, int], details: Mapping[str, str], title: str) -> Treemap:
    """A map of named tensors with their sizes in bytes; `details` are told of each. `title`: of all of them."""
    root = grow(sizes)
    sums = sizes_below(root, sizes)

    def area(branch: Branch) -> TreemapNode:
        tensors = [TreemapNode(split_name(name)[1], sizes[name], details[name]) for name in branch.names]
        inside = (*(area(child) for child in branch.branches.values()), *tensors)
        if len(inside) == 1 and branch.parts:  # one area would fill another
            return structs.replace(inside[0], name=f"{branch.name}.{inside[0].name}")
        return TreemapNode(branch.name or title, sums[branch], f"{len(inside)} inside", inside)

    return Treemap(area(root), "bytes", "Bytes by module")


def modules_table(sizes: Mapping[str, int]) -> Table:
    """The modules that have tensors in them or below, with the number of these and their sizes in bytes."""
    rows = tuple((path or "(model)", count, nbytes) for path, count, nbytes in totals(sizes))
    return Table((Column("module"), Column("tensors", "number"), Column("size", "bytes")), rows, "By module")
