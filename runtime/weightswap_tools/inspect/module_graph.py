"""The graphs of an artifact by module, together with the weights of the modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from weightswap_runtime.engines.graphs.schema import UnknownPart
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.messages import lines_of, listed, plural
from weightswap_tools.module_tree import Branch, fingerprints, runs, totals
from weightswap_tools.reports.blocks import ModuleNode, ModuleRun
from weightswap_tools.terminal import human_bytes

from .graph_outline import Flow, Outline, outline
from .subject import ArtifactSubject

MOST_NAMED = 3  # the most modules to name as sources or users of a value
MOST_FLOWS = 24
SIZE_ARITHMETIC = ("_operator.", "aten.sym_", "math.", "torch.sym_")  # prefixes of operators on sizes


def read_outline(subject: ArtifactSubject, method: str) -> Outline | str:
    """Return a method's graph by module, or a text that says why it cannot be shown. Raises ArtifactError."""
    try:
        return outline(subject.artifact, subject.manifest.methods[method])
    except UnknownPart as reason:
        return f"The graph of {method} cannot be shown by module: it has {reason}."


def module_kinds(subject: ArtifactSubject) -> dict[str, str]:
    """Return the class of each module that a graph calls, by path. Raises ArtifactError."""
    kinds: dict[str, str] = {}
    for method in subject.manifest.methods:
        graph = read_outline(subject, method)
        if isinstance(graph, Outline):
            kinds.update({path: module.kind for path, module in graph.modules.items() if module.kind})
    return kinds


def module_nodes(graph: Outline, manifest: Manifest) -> ModuleNode:
    """Return the modules of a graph as the nodes of a report.

    Neighbours with consecutive numbers form a run if they and their submodules have the same classes, operators and
    weights. Arithmetic on sizes is not compared, as a graph has it only where a size is first used.
    """
    nodes = _Nodes(graph, manifest)
    return nodes.node(nodes.root)


class _Nodes:
    def __init__(self, graph: Outline, manifest: Manifest) -> None:
        self.graph = graph
        sizes = {weight.name: weight.nbytes for weight in manifest.weights}
        self.weights = {path: (count, nbytes) for path, count, nbytes in totals(sizes)}
        self.root = Branch()
        for path in filter(None, graph.modules):
            self.root.reach(path.split("."))
        self.marks = fingerprints(self.root, lambda name: name, self._comparison_key)

    def _comparison_key(self, path: str) -> Hashable:
        module = self.graph.modules.get(path)
        calls = module.calls.items() if module else ()
        computed = frozenset(call for call in calls if not call[0].startswith(SIZE_ARITHMETIC))
        return module and module.kind, computed, self.weights.get(path)

    def _group(self, group: list[Branch]) -> ModuleNode | ModuleRun:
        nodes = tuple(map(self.node, group))
        return ModuleRun(nodes) if len(nodes) > 1 else nodes[0]

    def node(self, branch: Branch) -> ModuleNode:
        module = self.graph.modules.get(branch.path)
        children = tuple(map(self._group, runs(branch.branches.values(), self.marks)))
        if module is None:  # a container that is not called itself
            return ModuleNode(branch.name, "", self._weights(branch.path), (), (), (), children)
        return ModuleNode(
            branch.name,
            module.kind.rpartition(".")[2],
            self._weights(branch.path),
            tuple(module.calls.most_common()),
            _flows(module.takes, "from"),
            _flows(module.gives, "to"),
            children,
        )

    def _weights(self, path: str) -> str:
        count, size = self.weights.get(path, (0, 0))
        return f"{plural(count, 'weight')}, {human_bytes(size)}" if count else "no weights"


def _flows(flows: Mapping[str, Flow], way: str) -> tuple[str, ...]:
    texts = [f"{flow.type}  {way} {listed(flow.others, MOST_NAMED)}" for flow in flows.values()]
    return tuple(lines_of(texts, MOST_FLOWS))
