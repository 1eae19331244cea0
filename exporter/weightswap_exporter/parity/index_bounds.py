"""Which integers an embedding takes: inputs that index one must be below its number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from weightswap_runtime.engines.graphs.archives import check_records
from weightswap_runtime.engines.graphs.schema import Argument, Graph, Node, UnknownPart, read_argument, read_program
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.signature import input_leaves

_TABLES = ("torch.ops.aten.embedding.", "torch.ops.aten.embedding_bag.")
# operators whose results are elements of their first argument
_CARRIERS = {
    "alias",
    "clone",
    "contiguous",
    "detach",
    "expand",
    "flatten",
    "permute",
    "reshape",
    "select",
    "slice",
    "squeeze",
    "to",
    "transpose",
    "unsqueeze",
    "view",
}


def index_bounds(artifact: Artifact, method: str) -> dict[str, int]:
    """The rows of the smallest table that an input indexes, by the name of the input.

    An input that is changed on its way to a table is not followed, nor is one in a part of the graph with a graph of
    its own. Raises ArtifactError.
    """
    wanted = artifact.manifest.methods[method]
    raw = artifact.read(wanted.graph)
    check_records(raw, str(artifact.path / wanted.graph))
    try:
        graph = read_program(raw).graph_module.graph
        given = [_tensor_name(argument) for argument in graph.inputs]
    except (UnknownPart, msgspec.MsgspecError):  # an engine says so
        return {}
    rows = {name: row.shape[0] for row in artifact.manifest.weights if row.shape for name in row.names}
    flat = iter(input_leaves(wanted.signature))
    carried: dict[str, str] = {}
    tables: dict[str, int] = {}
    for name, item in zip(given, wanted.inputs, strict=True):
        if item.kind == "input":
            carried[name] = next(flat).name
        elif item.name in rows:
            tables[name] = rows[item.name]
    carried.pop("", None)
    found: dict[str, int] = {}
    for name, bound in _indexed(graph, carried, tables):
        found[name] = min(bound, found.get(name, bound))
    return found


def _indexed(graph: Graph, carried: dict[str, str], tables: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Inputs that index a table, with its rows. carried: the input whose elements a value has; it grows."""
    for node in graph.nodes:
        first, second = ([_tensor_name(item.arg) for item in node.inputs] + ["", ""])[:2]
        if node.target.startswith(_TABLES) and first in tables and second in carried:
            yield carried[second], tables[first]
        elif _carries(node) and first in carried:
            carried |= {name: carried[first] for output in node.outputs if (name := _tensor_name(output))}


def _carries(node: Node) -> bool:
    parts = node.target.split(".")
    return parts[:3] == ["torch", "ops", "aten"] and parts[3] in _CARRIERS


def _tensor_name(argument: Argument) -> str:
    """The name of a tensor; empty for anything else."""
    return read_argument(argument)[1].name if "as_tensor" in argument else ""
