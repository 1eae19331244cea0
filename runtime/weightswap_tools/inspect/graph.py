"""Graphs by module: what each module calls, what it takes from others and gives them.

A graph is flat. It says for each call in which modules it was made; which values cross a module's border follows from
that. The document is read without torch, and no further than an outline needs.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from weightswap_runtime.engines.graph_archive import (
    Graph,
    Node,
    SchemaRecord,
    UnknownPart,
    argument_names,
    check_records,
    read_argument,
    read_program,
)
from weightswap_runtime.errors import ArtifactError, lines_of, listed, plural
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Manifest, Method
from weightswap_runtime.format.signature import Tensor, input_leaves
from weightswap_runtime.tensors import DTYPES
from weightswap_tools.reports.blocks import ModuleNode, ModuleRun
from weightswap_tools.tensor_set import MOST_LEVELS, Branch, fingerprints, runs, totals
from weightswap_tools.terminal import human_bytes

from .subject import ArtifactSubject

_DAMAGED = (msgspec.MsgspecError, zipfile.BadZipFile, OverflowError, RecursionError, ValueError, KeyError)
_DTYPES = {row.code: row.name for row in DTYPES.values() if row.code} | {
    9: "C32",
    11: "C128",
}  # safetensors has no such two
_OUTSIDE = "\0"  # the caller of the model; not a valid path
_COMPUTED = "?"  # a size without a name in the signature
_HOOK = "_empty_nn_module_stack"  # torch's stand-in for the stack of calls that its passes insert
_MOST_NAMED = 3  # the most modules to name as sources or users of a value
_MOST_FLOWS = 24  # of a module, each way
_Flow = tuple[str, list[str]]  # a value: its type, and the modules and inputs that it comes from or goes to
_SIZE_ARITHMETIC = ("_operator.", "aten.sym_", "math.", "torch.sym_")  # prefixes of operators on sizes


@dataclass
class ModuleOutline:
    """A module of a graph."""

    path: str
    kind: str = ""  # its class
    calls: Counter[str] = field(default_factory=Counter)  # its own by operator, without those of its submodules
    takes: dict[str, _Flow] = field(default_factory=dict)  # its inputs by the value's name
    gives: dict[str, _Flow] = field(default_factory=dict)  # its outputs


Outline = dict[str, ModuleOutline]
"""The modules of a graph by path, in the order of their first call. The model has the empty path."""


def read_outline(subject: ArtifactSubject, method: str) -> Outline | str:
    """Return a method's graph by module, or a text that says why it cannot be shown. Raises ArtifactError."""
    try:
        return outline(subject.artifact, subject.manifest.methods[method])
    except UnknownPart as reason:
        return f"The graph of {method} cannot be shown by module: it has {reason}."


def outline(artifact: Artifact, method: Method) -> Outline:
    """Return the outline of a method's graph.

    Raises ArtifactError for a damaged file, and UnknownPart for a graph with parts that are not supported here.
    """
    raw = artifact.read(method.graph)
    where = str(artifact.path / method.graph)
    check_records(raw, where)
    try:
        return _OutlineReader(read_program(raw).graph_module.graph, method).read()
    except _DAMAGED as error:
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error


def module_kinds(subject: ArtifactSubject) -> dict[str, str]:
    """Return the class of each module that a graph calls, by path. Raises ArtifactError."""
    kinds: dict[str, str] = {}
    for method in subject.manifest.methods:
        graph = read_outline(subject, method)
        if not isinstance(graph, str):
            kinds.update({path: module.kind for path, module in graph.items() if module.kind})
    return kinds


def module_nodes(graph: Outline, manifest: Manifest) -> ModuleNode:
    """Return the modules of a graph as the nodes of a report.

    Neighbours with consecutive numbers form a run if they and their submodules have the same classes, operators and
    weights. Arithmetic on sizes is not compared, as a graph has it only where a size is first used.
    """
    nodes = _Nodes(graph, manifest)
    return nodes.node(nodes.root)


# What engines leave undecoded of a graph.


class _Meta(SchemaRecord, frozen=True):
    dtype: int
    sizes: tuple[_Size, ...]


class _Size(SchemaRecord, frozen=True):
    as_int: int | None = None
    as_expr: _Expression | None = None


class _Expression(SchemaRecord, frozen=True):
    expr_str: str


_TENSORS = msgspec.json.Decoder(dict[str, _Meta])
_NUMBERS = msgspec.json.Decoder(dict[str, _Size])
_TEXTS = msgspec.json.Decoder(dict[str, str])


# From a graph to its outline.


class _OutlineReader:
    """Reader of a graph. One pass over the calls collects the producer and the users of every value."""

    def __init__(self, graph: Graph, method: Method) -> None:
        self.graph = graph
        self.tensors: dict[str, _Meta] = {}
        self.numbers: dict[str, _Size] = {}
        self.modules = {"": ModuleOutline("")}
        self.producers: dict[str, str] = {}  # value -> path of the module that computes it
        self.inputs: dict[str, str] = {}  # input of the graph -> description
        self.owners: dict[str, str] = {}  # weight, state or constant -> path of its module
        self.uses: list[tuple[str, str]] = []  # value, path of the module that uses it
        self._read_inputs(method)
        self.symbols = _symbols(graph, method)

    def read(self) -> Outline:
        self._read_calls(self.graph, "")
        for argument in self.graph.outputs:
            self.uses += [(name, _OUTSIDE) for name in argument_names(argument)]
        self._add_flows()
        return self.modules

    def _read_inputs(self, method: Method) -> None:
        for argument, item in zip(self.graph.inputs, method.inputs, strict=True):
            for name in argument_names(argument):
                if item.kind == "input":
                    self.inputs[name] = f"the input {item.name}"
                else:
                    self.inputs[name] = f"the {item.kind} {item.name}"
                    self.owners[name] = item.name.rpartition(".")[0]

    def _read_calls(self, graph: Graph, default: str) -> None:
        """Read the calls of a graph, and of the subgraphs of its higher-order operators."""
        self.tensors = _TENSORS.decode(graph.tensor_values) | self.tensors
        self.numbers = _NUMBERS.decode(graph.sym_int_values) | self.numbers
        for call in graph.nodes:
            path = self._module_of(call, default)
            self.modules[path].calls[call.target.removeprefix("torch.ops.")] += 1
            for argument in call.inputs:
                if "as_graph" in argument.arg:
                    self._read_calls(read_argument(argument.arg)[1].graph, path)
                else:
                    self.uses += [(name, path) for name in argument_names(argument.arg)]
            for output in call.outputs:
                self.producers.update(dict.fromkeys(argument_names(output), path))

    def _module_of(self, call: Node, default: str) -> str:
        """Return the path of the module that makes a call. Adds all modules of its stack, with their classes."""
        path = default
        for entry in _TEXTS.decode(call.metadata).get("nn_module_stack", "").split(";"):
            _, comma, rest = entry.partition(",")
            raw_path, second_comma, kind = rest.rpartition(",")
            if not comma or not second_comma or _HOOK in entry:
                continue
            path = _plain_path(raw_path)
            module = self.modules.setdefault(path, ModuleOutline(path))
            module.kind = module.kind or kind
        return path

    def _add_flows(self) -> None:
        """Add each value to the modules that it enters or leaves on the way from its producer to its users."""
        for name, user in dict.fromkeys(self.uses):
            producer = self.producers.get(name, _OUTSIDE)
            if producer == user:
                continue
            source = self.inputs.get(name) or _module_words(producer)
            for module in self._modules_left(user, self.owners.get(name, producer)):
                self._add_flow(module.takes, name, source)
            for module in self._modules_left(producer, user):
                self._add_flow(module.gives, name, _module_words(user))

    def _modules_left(self, path: str, other: str) -> list[ModuleOutline]:
        return [self.modules[inner] for inner in _paths_left(path, other) if inner in self.modules]

    def _add_flow(self, flows: dict[str, _Flow], name: str, other: str) -> None:
        _, others = flows.setdefault(name, (self._type_of(name), []))
        if other not in others:
            others.append(other)

    def _type_of(self, name: str) -> str:
        meta = self.tensors.get(name)
        if meta is None:
            number = self.numbers.get(name)
            return f"int {self._size(number)}".removesuffix(f" {_COMPUTED}") if number else "number"
        sizes = ", ".join(self._size(size) for size in meta.sizes)
        return f"{_DTYPES.get(meta.dtype, '?')}[{sizes}]"

    def _size(self, size: _Size) -> str:
        if size.as_expr is None:
            return str(size.as_int)
        return self.symbols.get(size.as_expr.expr_str, _COMPUTED)


def _module_words(path: str) -> str:
    return "the caller" if path == _OUTSIDE else path or "the model itself"


def _plain_path(path: str) -> str:
    """Remove the suffix `@1` of a repeated call, and cut deep paths as `split_name` does."""
    return ".".join(path.partition("@")[0].split(".")[:MOST_LEVELS])


def _paths_left(path: str, other: str) -> Iterator[str]:
    """Yield `path` and the modules around it that do not contain `other`."""
    if path == _OUTSIDE:
        return
    if other == _OUTSIDE:
        yield ""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        inner = ".".join(parts[:end])
        if other != inner and not other.startswith(f"{inner}."):
            yield inner


def _symbols(graph: Graph, method: Method) -> dict[str, str]:
    """Return the signature's names for the symbols of the graph."""
    inputs = input_leaves(method.signature)
    arguments = [argument for argument, item in zip(graph.inputs, method.inputs, strict=True) if item.kind == "input"]
    tensors, pairs = _TENSORS.decode(graph.tensor_values), dict[str, str]()
    for leaf, argument in zip(inputs, arguments, strict=True):
        if isinstance(leaf, Tensor):
            pairs.update(_symbol_names(leaf, tensors, argument_names(argument)))
    return pairs


def _symbol_names(leaf: Tensor, tensors: Mapping[str, _Meta], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for size, graph_size in zip(leaf.shape, tensors[name].sizes, strict=True):
            if graph_size.as_expr is not None:
                yield graph_size.as_expr.expr_str, str(size)


# From an outline to the nodes of a report.


class _Nodes:
    def __init__(self, graph: Outline, manifest: Manifest) -> None:
        self.graph = graph
        sizes = {weight.name: weight.nbytes for weight in manifest.weights}
        self.weights = {path: (count, nbytes) for path, count, nbytes in totals(sizes)}
        self.root = Branch()
        for path in filter(None, graph):
            self.root.reach(path.split("."))
        self.marks = fingerprints(self.root, lambda name: name, self._comparison_key)

    def _comparison_key(self, path: str) -> Hashable:
        module = self.graph.get(path)
        calls = module.calls.items() if module else ()
        computed = frozenset(call for call in calls if not call[0].startswith(_SIZE_ARITHMETIC))
        return module and module.kind, computed, self.weights.get(path)

    def node(self, branch: Branch) -> ModuleNode:
        module = self.graph.get(branch.path)
        children = tuple(map(self._run, runs(branch.branches.values(), self.marks)))
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

    def _run(self, run: list[Branch]) -> ModuleNode | ModuleRun:
        nodes = tuple(map(self.node, run))
        return ModuleRun(nodes) if len(nodes) > 1 else nodes[0]

    def _weights(self, path: str) -> str:
        count, size = self.weights.get(path, (0, 0))
        return f"{plural(count, 'weight')}, {human_bytes(size)}" if count else "no weights"


def _flows(flows: Mapping[str, _Flow], way: str) -> tuple[str, ...]:
    texts = [f"{kind}  {way} {listed(others, _MOST_NAMED)}" for kind, others in flows.values()]
    return tuple(lines_of(texts, _MOST_FLOWS))
