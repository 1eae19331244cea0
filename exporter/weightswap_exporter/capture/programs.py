"""What programs consist of: graphs in one another, inputs, and nodes that others are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec
from torch.fx import GraphModule, Node


def graphs(program: ExportedProgram) -> Iterator[GraphModule]:
    """The program's graph and those within it."""
    return (module for module in program.graph_module.modules() if isinstance(module, GraphModule))


def graph_inputs(program: ExportedProgram) -> list[tuple[Node, InputSpec]]:
    """The placeholders, with what they stand for."""
    return list(zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))


def reached(nodes: Iterable[Node], sources: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Nodes, their `sources`, and so on."""
    found, unseen = set[Node](), set(nodes)
    while unseen:
        node = unseen.pop()
        found.add(node)
        unseen |= set(sources(node)) - found
    return found


def all_inputs(nodes: Iterable[Node]) -> set[Node]:
    """Nodes, and all that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
