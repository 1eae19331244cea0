"""A graph by module, as text: what each module calls, takes and gives. Needs no torch.

Everything that is shown was written by `torch.export` into the archive: the module of a call is the last entry of its
`nn_module_stack`, whose entries are `key,path,class` and end with `;`.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from weightswap_runtime.engines.graphs.archives import check_records
from weightswap_runtime.engines.graphs.schema import Argument, NamedArgument, SchemaRecord, argument_names, model_json
from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Method
from weightswap_runtime.format.signature import Tensor, input_leaves
from weightswap_runtime.tensors.dtypes import DTYPES
from weightswap_tools.module_tree import MOST_LEVELS

_DAMAGED = (msgspec.MsgspecError, zipfile.BadZipFile, OverflowError, RecursionError, ValueError, KeyError)
_DTYPES = {row.code: row.name for row in DTYPES.values() if row.code} | {9: "C32", 11: "C128"}


class _Expression(SchemaRecord, frozen=True):
    expr_str: str


class _Size(SchemaRecord, frozen=True):
    as_int: int | None = None
    as_expr: _Expression | None = None


class _Meta(SchemaRecord, frozen=True):
    dtype: int
    sizes: tuple[_Size, ...]


class _CallNode(SchemaRecord, frozen=True):
    target: str
    inputs: tuple[NamedArgument, ...]
    outputs: tuple[Argument, ...]
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class _Graph(SchemaRecord, frozen=True):
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    nodes: tuple[_CallNode, ...]
    tensor_values: dict[str, _Meta] = msgspec.field(default_factory=dict)
    sym_int_values: dict[str, _Size] = msgspec.field(default_factory=dict)


class _WithGraph(SchemaRecord, frozen=True):
    """The module of a program, or the argument of a higher-order operator."""

    graph: _Graph


class _Program(SchemaRecord, frozen=True):
    graph_module: _WithGraph


class Flow(NamedTuple):
    """A value that crosses the border of a module. `others`: the modules and inputs that it is from or goes to."""

    name: str
    type: str
    others: list[str]


@dataclass
class ModuleOutline:
    """A module of a graph. `calls` are its own, by operator, without those of the modules in it.

    `takes` and `gives` are by the value's name.
    """

    path: str
    kind: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    takes: dict[str, Flow] = field(default_factory=dict)
    gives: dict[str, Flow] = field(default_factory=dict)


class Outline(NamedTuple):
    """A graph's modules by path, in the order of their first call; the model itself has the empty path."""

    modules: dict[str, ModuleOutline]

    @property
    def operators(self) -> Counter[str]:
        """How often the graph calls each operator."""
        return sum((module.calls for module in self.modules.values()), Counter())


def outline(artifact: Artifact, method: Method) -> Outline:
    """The graph of a method by module.

    Raises ArtifactError for a file that is damaged, UnknownPart for one with something that is not known here.
    """
    raw = artifact.read(method.graph)
    where = str(artifact.path / method.graph)
    check_records(raw, where)
    try:
        graph = msgspec.json.decode(model_json(raw), type=_Program).graph_module.graph
        return _OutlineReader(graph, method).read()
    except _DAMAGED as error:
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error


class _OutlineReader:
    """Goes through the calls once; then every value is known with its maker and its users."""

    def __init__(self, graph: _Graph, method: Method) -> None:
        self.graph = graph
        self.tensors: dict[str, _Meta] = {}
        self.numbers: dict[str, _Size] = {}
        self.modules = {"": ModuleOutline("")}
        self.made: dict[str, str] = {}  # value -> path of the module that made it
        self.given: dict[str, str] = {}  # value -> what it is, for inputs of the graph
        self.owned: dict[str, str] = {}  # weights and the like: value -> path of the module that has it
        self.used: list[tuple[str, str]] = []  # value, path of the module
        self._read_inputs(method)
        self.symbols = _symbols(graph, method)

    def read(self) -> Outline:
        self._calls(self.graph, "")
        for argument in self.graph.outputs:
            self.used += [(name, _OUTSIDE) for name in argument_names(argument)]
        self._join()
        return Outline(self.modules)

    def _read_inputs(self, method: Method) -> None:
        for argument, item in zip(self.graph.inputs, method.inputs, strict=True):
            for name in argument_names(argument):
                if item.kind == "input":
                    self.given[name] = f"the input {item.name}"
                else:
                    self.given[name] = f"the {item.kind} {item.name}"
                    self.owned[name] = item.name.rpartition(".")[0]

    def _calls(self, graph: _Graph, default: str) -> None:
        """The calls of a graph, and of those that its higher-order operators run."""
        self.tensors = graph.tensor_values | self.tensors
        self.numbers = graph.sym_int_values | self.numbers
        for call in graph.nodes:
            path = self._module_of(call, default)
            self.modules[path].calls[call.target.removeprefix("torch.ops.")] += 1
            for argument in call.inputs:
                if "as_graph" in argument.arg:
                    inner = msgspec.json.decode(argument.arg["as_graph"], type=_WithGraph).graph
                    self._calls(inner, path)
                else:
                    self.used += [(name, path) for name in argument_names(argument.arg)]
            for output in call.outputs:
                self.made.update(dict.fromkeys(argument_names(output), path))

    def _module_of(self, call: _CallNode, default: str) -> str:
        """Where a call is made. Every module on the way is noted with its class."""
        path = default
        for entry in call.metadata.get("nn_module_stack", "").split(";"):
            _, comma, rest = entry.partition(",")
            found, between, kind = rest.rpartition(",")
            if not comma or not between or _HOOK in entry:
                continue
            path = _plain_path(found)
            module = self.modules.setdefault(path, ModuleOutline(path))
            module.kind = module.kind or kind
        return path

    def _join(self) -> None:
        """Note what crosses a border of modules, at every border that it crosses."""
        for name, user in dict.fromkeys(self.used):
            maker = self.made.get(name, _OUTSIDE)
            if maker == user:
                continue
            source = self.given.get(name) or _told(maker)
            for module in self._left(user, self.owned.get(name, maker)):
                self._note(module.takes, name, source)
            for module in self._left(maker, user):
                self._note(module.gives, name, _told(user))

    def _left(self, path: str, other: str) -> list[ModuleOutline]:
        return [self.modules[inside] for inside in _left(path, other) if inside in self.modules]

    def _note(self, flows: dict[str, Flow], name: str, other: str) -> None:
        flow = flows.setdefault(name, Flow(name, self._type_of(name), []))
        if other not in flow.others:
            flow.others.append(other)

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


_OUTSIDE = "\0"  # no path of a module
_COMPUTED = "?"  # a size that the signature has no name for
_HOOK = "_empty_nn_module_stack"


def _told(path: str) -> str:
    return "the caller" if path == _OUTSIDE else path or "the model itself"


def _plain_path(path: str) -> str:
    """A module that is called again has `@1` behind its path. Deep below, paths end: see `module_tree`."""
    return ".".join(path.partition("@")[0].split(".")[:MOST_LEVELS])


def _left(path: str, other: str) -> Iterator[str]:
    """The modules around `path` that are left on the way to `other`."""
    if path == _OUTSIDE:
        return
    if other == _OUTSIDE:
        yield ""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        inside = ".".join(parts[:end])
        if other != inside and not other.startswith(f"{inside}."):
            yield inside


def _symbols(graph: _Graph, method: Method) -> dict[str, str]:
    """What the signature calls the symbols of the graph."""
    inputs = input_leaves(method.signature)
    arguments = [argument for argument, item in zip(graph.inputs, method.inputs, strict=True) if item.kind == "input"]
    pairs: dict[str, str] = {}
    for leaf, argument in zip(inputs, arguments, strict=True):
        if isinstance(leaf, Tensor):
            pairs.update(_pairs(leaf, graph, argument_names(argument)))
    return pairs


def _pairs(leaf: Tensor, graph: _Graph, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for size, found in zip(leaf.shape, graph.tensor_values[name].sizes, strict=True):
            if found.as_expr is not None:
                yield found.as_expr.expr_str, str(size)
