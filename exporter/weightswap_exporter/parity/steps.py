"""Executions operator by operator: what eager code, a graph and an engine compute on the way to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_exporter.capture.archive import graph_archive, method_program, open_program
from weightswap_exporter.checkpoints.tensor import contents_of
from weightswap_exporter.engines.compiling import compile_engines
from weightswap_exporter.modules.stand_ins import first_line
from weightswap_exporter.packing import pack_to_compare
from weightswap_runtime import Artifact, read_weights
from weightswap_runtime.engines.operators import is_fresh, is_mutable
from weightswap_runtime.format.manifest import (
    CONSTANTS_NAME,
    CONVERSION_CONSTANTS_NAME,
    CONVERSION_NAME,
    MANIFEST_NAME,
    encode_manifest,
    with_graph_id,
)
from weightswap_runtime.format.signature import Tensor, Tuple
from weightswap_runtime.torch_tensors import DTYPE_NAMES, tensor_bytes

from .executions import CallCase, PathLike, initial_state

_BLANK = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_KEPT = (CONSTANTS_NAME, CONVERSION_NAME, CONVERSION_CONSTANTS_NAME)


class Position(NamedTuple):
    """Position of a computation in the model and in the graph."""

    modules: tuple[tuple[str, str], ...] = ()  # (FQN, class) from the outermost, the model itself with "", to the inner
    node: str = ""  # empty in eager code
    operator: str = ""

    @property
    def module(self) -> str:
        """The FQN of the innermost module."""
        return self.modules[-1][0] if self.modules else ""

    def renamed(self, names: Mapping[str, str]) -> Position:
        """Return the position with its FQNs replaced."""
        return self._replace(modules=tuple((names.get(fqn, fqn), kind) for fqn, kind in self.modules))

    @property
    def kind(self) -> str:
        """The class of the innermost module."""
        return self.modules[-1][1] if self.modules else ""


class Step(NamedTuple):
    """One call of an operator that computes something."""

    operator: str
    values: tuple[torch.Tensor, ...]  # copies of its results
    inputs: tuple[int | None, ...]  # digests of its tensor arguments; None for weights, state and constants
    position: Position

    @property
    def shape(self) -> tuple[object, ...]:
        """Key that is equal for two steps that compute the same."""
        kinds = ((value.dtype, tuple(value.shape)) for value in self.values)
        return self.position.module, self.operator, *kinds


def aligned(
    expected: Sequence[Step], found: Sequence[Step]
) -> Iterator[tuple[Step | None, Step | None, tuple[Step, ...]]]:
    """Yield steps of two executions that correspond, and those just before them that only one side has.

    The steps of a pair are None if these are after the last.
    """
    ours, theirs = ([step.shape for step in steps] for steps in (expected, found))
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    left = right = 0
    for first, second, size in matcher.get_matching_blocks():
        alone = (*expected[left:first], *found[right:second])
        for offset in range(size):
            yield expected[first + offset], found[second + offset], alone
            alone = ()
        if not size and alone:
            yield None, None, alone
        left, right = first + size, second + size


# Eager execution, by hooks and a dispatch mode.


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records every operator call, except those that only return views.

    position: a callback that returns the current position. own: the tensors of the model.
    """

    def __init__(self, position: Callable[[], Position], own: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._position = position
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _computes(func):
            return func(*args, **(kwargs or {}))
        inputs = tuple(self._digest(value) for value in pytree.tree_leaves((args, kwargs)) if _is_plain(value))
        result = func(*args, **(kwargs or {}))
        copies = tuple(value.detach().clone() for value in pytree.tree_leaves(result) if _is_plain(value))
        if copies:  # an assertion has none
            self.steps.append(Step(func._schema.name, copies, inputs, self._position()))
        return result

    def _digest(self, value: torch.Tensor) -> int | None:
        if value.untyped_storage().data_ptr() in self._own:
            return None
        return hash(tensor_bytes(value).tobytes())


def _computes(operator: OpOverload) -> bool:
    """Return whether the operator computes values, rather than views or uninitialised memory."""
    if operator._schema.name in _BLANK:
        return False
    return is_fresh(operator) or is_mutable(operator) or not operator._schema.name.startswith("aten::")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class ModuleStack:
    """Stack of the modules that are being called, kept by forward hooks inside a `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[tuple[str, str]] = []

    def position(self) -> Position:
        return Position(tuple(self._stack))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                entry = name, type(module).__qualname__
                stack.callback(module.register_forward_pre_hook(partial(self._entered, entry), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._left, always_call=True).remove)
            yield

    def _entered(self, entry: tuple[str, str], *_: Any) -> None:
        self._stack.append(entry)

    def _left(self, *_: Any) -> None:
        self._stack.pop()


def first_names(model: nn.Module) -> dict[str, str]:
    """Return a map from each FQN to the first FQN of the same module."""
    first = {id(module): name for name, module in model.named_modules()}
    return {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False)}


# The graph, by torch's interpreter.


class OpenedGraph:
    """The graph of one method. Weights come from a weight file or any source that `pack` takes."""

    def __init__(self, artifact: Artifact, method: str) -> None:
        self.artifact = artifact
        self.method = method
        self.inputs = artifact.manifest.methods[method].inputs

    def open(self) -> ExportedProgram:
        """Return the program without values. Raises ArtifactError."""
        return open_program(self.artifact, self.artifact.manifest.methods[self.method].graph)

    def steps(self, weights: PathLike, case: CallCase) -> tuple[list[Step], list[Any]]:
        """Run a case. Returns its steps, operator by operator, and its flat outputs."""
        program = self._filled(weights)
        run = _GraphRun(program)
        own = [*program.state_dict.values(), *program.constants.values()]
        recorder = StepRecorder(run.position, [value for value in own if isinstance(value, torch.Tensor)])
        with torch.no_grad(), recorder:
            values = run.run(*_flat(program, case))
        return recorder.steps, contents_of(values)

    def outputs(self, weights: PathLike, case: CallCase) -> list[Any]:
        """Run a case. Returns its flat outputs, with tensors as `TensorBytes`."""
        program = self._filled(weights)
        with torch.no_grad():
            return contents_of(_GraphRun(program).run(*_flat(program, case)))

    def weights_of(self, node: str) -> tuple[str, ...]:
        """Return the first FQN of each weight, state, constant and variant tensor that a node takes."""
        graph = self.open().graph
        pairs = zip(graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        manifest = self.artifact.manifest
        tables = (*manifest.weights, *manifest.state, *manifest.constants, *manifest.variable)
        first = {name: row.name for row in tables for name in row.names}
        fqns = {placeholder: first[item.name] for placeholder, item in pairs if item.kind != "input"}
        inputs = [source for each in graph.nodes if each.name == node for source in each.all_input_nodes]
        return tuple(fqns[source] for source in inputs if source in fqns)

    def _filled(self, weights: PathLike) -> ExportedProgram:
        """Return the program filled with weights, the initial state, and zeros for variants."""
        program = method_program(self.artifact, self.method)
        values = _values(self.artifact, weights) | initial_state(self.artifact)
        zero = torch.zeros(())
        for spec, item in zip(program.graph_signature.input_specs, self.inputs, strict=True):
            if item.kind in ("weight", "state", "variant") and spec.target is not None:
                table = program.state_dict if spec.target in program.state_dict else program.constants
                with torch.no_grad():
                    table[spec.target].copy_(zero if item.kind == "variant" else values[item.name])
        return program


def _flat(program: ExportedProgram, case: CallCase) -> list[Any]:
    values = iter(case.flat)
    tables = program.state_dict | program.constants
    specs = program.graph_signature.input_specs
    return [next(values) if spec.kind is InputKind.USER_INPUT else tables[spec.target] for spec in specs]


def _values(artifact: Artifact, weights: PathLike) -> dict[str, torch.Tensor]:
    """Return weights by FQN, with tied ones under each of their names."""
    with TemporaryDirectory(prefix="weightswap-") as folder:
        packed = pack_to_compare(weights, artifact, Path(folder) / "weights.safetensors")
        values = read_weights(packed, framework="torch")
    return {name: values[row.name] for row in artifact.manifest.weights for name in row.names}


class _GraphRun(torch.fx.Interpreter):
    """Interpreter that runs a program node by node and knows the current position."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self._node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node. Raises NodeFailed."""
        self._node = n
        try:
            return super().run_node(n)
        except Exception as error:
            raise NodeFailed(self.position(), error) from error

    def position(self) -> Position:
        return _position_of(self._node) if self._node is not None else Position()


class NodeFailed(Exception):
    """Error raised by a node of a graph."""

    def __init__(self, position: Position, error: Exception) -> None:
        where = f"{position.module} ({position.kind})" if position.module else f"the model itself ({position.kind})"
        super().__init__(f"the graph raises in {where}, node {position.node}, {position.operator}: {first_line(error)}")


def _position_of(node: torch.fx.Node) -> Position:
    modules = _modules(node)
    inner = [_modules(each) for graph in _inner_graphs(node) for each in graph.nodes if each.op == "call_function"]
    if not modules and inner:  # an operator with a graph of its own: the modules that all of its nodes share
        depth = 0
        while all(len(path) > depth and path[depth] == inner[0][depth] for path in inner):
            depth += 1
        modules = inner[0][:depth]
    return Position(modules, node.name, str(node.target))


def _modules(node: torch.fx.Node) -> tuple[tuple[str, str], ...]:
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return tuple((fqn.partition("@")[0], _class_name(kind)) for fqn, kind in stack.values())


def _inner_graphs(node: torch.fx.Node) -> Iterator[torch.fx.Graph]:
    owner = node.graph.owning_module
    for each in node.all_input_nodes:
        if each.op == "get_attr" and owner is not None:
            inner = getattr(owner, str(each.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                yield inner.graph


def _class_name(kind: Any) -> str:
    """Return the name of a class, or of a qualified class name, as an archive keeps it."""
    return (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2]


# Engines cannot be stopped in the middle: intermediate results become outputs of a graph that is compiled again.


class Tap(NamedTuple):
    """A node of a graph whose result can be made an output."""

    node: str
    position: Position


def taps_of(program: ExportedProgram) -> list[Tap]:
    """Return every node that computes one tensor, in order."""
    return [Tap(node.name, _position_of(node)) for node in program.graph.nodes if _is_tensor(node)]


def last_of_modules(taps: Sequence[Tap]) -> list[Tap]:
    """Return the last of each run of consecutive nodes in one module."""
    return [list(run)[-1] for _, run in groupby(taps, key=lambda tap: tap.position.modules)]


def tapped(artifact: Artifact, method: str, taps: Sequence[Tap], folder: Path, engines: Sequence[str]) -> Artifact:
    """Write an artifact with one method whose output is (old output, tuple of the taps), compiled for these engines.

    Results are copied where they are computed, as later nodes may overwrite them. Raises the errors of compiling.
    """
    old = artifact.manifest.methods[method]
    program = open_program(artifact, old.graph)
    nodes = {node.name: node for node in program.graph.nodes}
    results = Tuple(tuple(_tap(program, nodes[tap.node]) for tap in taps))
    signature = msgspec.structs.replace(old.signature, output=Tuple((old.signature.output, results)))
    raw = graph_archive(program, signature)
    methods = {method: msgspec.structs.replace(old, signature=signature)}
    kept = [name for name in _KEPT if name in artifact.manifest.files]
    files = {name: artifact.manifest.files[name] for name in kept} | {old.graph: blake3(raw).hexdigest()}
    manifest = with_graph_id(msgspec.structs.replace(artifact.manifest, methods=methods, files=files))
    for name in kept:
        (folder / name).write_bytes(artifact.read(name))
    (folder / old.graph).parent.mkdir(exist_ok=True)
    (folder / old.graph).write_bytes(raw)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return compile_engines(folder, engines, trial=False)


def _tap(program: ExportedProgram, node: Node) -> Tensor:
    """Add a node's result to the outputs. Returns the leaf that describes it."""
    value = node.meta["val"]
    with program.graph.inserting_after(node):
        copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    output = program.graph.output_node()
    output.args = ((*output.args[0], copy),)
    program.graph_signature.output_specs.append(
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=copy.name), target=None)
    )
    shape = tuple(size if isinstance(size, int) else str(size.node.expr) for size in value.shape)
    return Tensor(node.name, DTYPE_NAMES[value.dtype], shape)


def _is_tensor(node: Node) -> bool:
    computed = node.op == "call_function" and isinstance(node.target, OpOverload) and _computes(node.target)
    return computed and isinstance(node.meta.get("val"), torch.Tensor)
