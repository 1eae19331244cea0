"""Parts of exported programs: nested graphs, inputs, and dependencies between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec
from torch.fx import GraphModule, Node


def graphs(program: ExportedProgram) -> Iterator[GraphModule]:
    """Return the program's graph and those nested in it."""
    return (module for module in program.graph_module.modules() if isinstance(module, GraphModule))


def graph_inputs(program: ExportedProgram) -> list[tuple[Node, InputSpec]]:
    """Return the placeholders with their input specs."""
    return list(zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))


def reached(nodes: Iterable[Node], sources: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return nodes, their `sources`, the sources of these, and so on."""
    visited, unseen = set[Node](), set(nodes)
    while unseen:
        node = unseen.pop()
        visited.add(node)
        unseen |= set(sources(node)) - visited
    return visited


def all_inputs(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes, and all nodes that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
