"""The graphs of an artifact by module, joined with the weights that the modules have."""

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

MOST_NAMED = 3  # modules that one value comes from or goes to
MOST_FLOWS = 24
SIZE_ARITHMETIC = ("_operator.", "aten.sym_", "math.", "torch.sym_")  # what operators on sizes are called


def read_outline(subject: ArtifactSubject, method: str) -> Outline | str:
    """A method's graph by module, or why it cannot be told. Raises ArtifactError."""
    try:
        return outline(subject.artifact, subject.manifest.methods[method])
    except UnknownPart as reason:
        return f"The graph of {method} cannot be shown by module: it has {reason}."


def module_kinds(subject: ArtifactSubject) -> dict[str, str]:
    """The class of each module that any graph calls, by path. Raises ArtifactError."""
    kinds: dict[str, str] = {}
    for method in subject.manifest.methods:
        found = read_outline(subject, method)
        if isinstance(found, Outline):
            kinds.update({path: module.kind for path, module in found.modules.items() if module.kind})
    return kinds


def module_nodes(outlined: Outline, manifest: Manifest) -> ModuleNode:
    """The modules of a graph as the nodes of a report.

    Neighbours with consecutive numbers are one run if they have the same class, operators and weights, and so do the
    modules in them. Arithmetic on sizes is left out of this, as a graph has it where a size is first used.
    """
    nodes = _Nodes(outlined, manifest)
    return nodes.node(nodes.root)


class _Nodes:
    def __init__(self, outlined: Outline, manifest: Manifest) -> None:
        self.outlined = outlined
        sizes = {weight.name: weight.nbytes for weight in manifest.weights}
        self.weights = {path: (count, nbytes) for path, count, nbytes in totals(sizes)}
        self.root = Branch()
        for path in filter(None, outlined.modules):
            self.root.reach(path.split("."))
        self.marks = fingerprints(self.root, lambda name: name, self._likeness)

    def _likeness(self, path: str) -> Hashable:
        module = self.outlined.modules.get(path)
        calls = module.calls.items() if module else ()
        computed = frozenset(call for call in calls if not call[0].startswith(SIZE_ARITHMETIC))
        return module and module.kind, computed, self.weights.get(path)

    def _group(self, group: list[Branch]) -> ModuleNode | ModuleRun:
        nodes = tuple(map(self.node, group))
        return ModuleRun(nodes) if len(nodes) > 1 else nodes[0]

    def node(self, branch: Branch) -> ModuleNode:
        module = self.outlined.modules.get(branch.path)
        children = tuple(map(self._group, runs(branch.branches.values(), self.marks)))
        if module is None:  # holds modules, and is not called itself
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
