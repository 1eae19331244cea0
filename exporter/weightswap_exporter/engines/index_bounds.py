"""Indices: how many rows the tables have that a method's inputs index, and operators that refuse negative ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from torch.fx import Node

from weightswap_runtime import Artifact
from weightswap_runtime.engines.graph_archive import (
    Argument,
    Graph,
    UnknownPart,
    check_records,
    read_argument,
    read_program,
)
from weightswap_runtime.format.signature import input_leaves

_TABLES = ("torch.ops.aten.embedding.", "torch.ops.aten.embedding_bag.")
# operators whose results are elements of their first argument
_CARRIERS = tuple(f"torch.ops.aten.{name}." for name in (
    "alias", "clone", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "select", "slice", "squeeze",
    "to", "transpose", "unsqueeze", "view",
))  # fmt: skip

# operators with a tensor, a dimension and indices, of which eager refuses negative ones; in place, too
_ALONG = {"index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"}


def indices_of(node: Node) -> tuple[Node, int, int] | None:
    """Return the tensor that an operator indexes, the dimension, and the position of the indices in its arguments.

    None for other operators, and for those to which negative indices count from the end in eager, too.
    """
    name = str(getattr(node.target, "_opname", "")).removesuffix("_")
    table: Any = node.args[0] if node.args else None
    if name in ("embedding", "embedding_bag"):
        return table, 0, 1
    dimension: Any = node.args[1] if name in _ALONG else None
    return None if dimension is None else (table, dimension, 2)


def index_bounds(artifact: Artifact, method: str) -> dict[str, int]:
    """Return the number of rows of the smallest table that an input indexes, by input name.

    Inputs are not followed through operators that change their elements, nor into subgraphs. Raises ArtifactError.
    """
    described = artifact.manifest.methods[method]
    raw = artifact.read(described.graph)
    check_records(raw, str(artifact.path / described.graph))
    try:
        graph = read_program(raw).graph_module.graph
        inputs = [_tensor_name(argument) for argument in graph.inputs]
    except (UnknownPart, msgspec.MsgspecError):  # the engines report it
        return {}
    rows = {name: row.shape[0] for row in artifact.manifest.weights if row.shape for name in row.names}
    flat = iter(input_leaves(described.signature))
    carried: dict[str, str] = {}
    tables: dict[str, int] = {}
    for name, item in zip(inputs, described.inputs, strict=True):
        if item.kind == "input":
            carried[name] = next(flat).name
        elif item.name in rows:
            tables[name] = rows[item.name]
    carried.pop("", None)
    bounds: dict[str, int] = {}
    for name, bound in _indexed(graph, carried, tables):
        bounds[name] = min(bound, bounds.get(name, bound))
    return bounds


def _indexed(graph: Graph, carried: dict[str, str], tables: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield inputs that index a table, with its rows. carried: input names by the values that carry their elements."""
    for node in graph.nodes:
        first, second = ([_tensor_name(item.arg) for item in node.inputs] + ["", ""])[:2]
        if node.target.startswith(_TABLES) and first in tables and second in carried:
            yield carried[second], tables[first]
        elif node.target.startswith(_CARRIERS) and first in carried:
            carried |= {name: carried[first] for output in node.outputs if (name := _tensor_name(output))}


def _tensor_name(argument: Argument) -> str:
    """Return the name of a tensor argument, else an empty string."""
    return read_argument(argument)[1].name if "as_tensor" in argument else ""
