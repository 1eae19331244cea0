"""The engine `aoti`: runs the artifact's machine code, which AOTInductor compiled from the graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from weightswap_runtime.errors import ArtifactError, MissingExtra
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Method
from weightswap_runtime.format.signature import Integer, Leaf, Tensor, input_leaves, leaves, sizes_of
from weightswap_runtime.messages import listed

try:
    import torch
except ImportError as error:
    raise MissingExtra("the engine `aoti`", "torch") from error

from weightswap_runtime.engines.torch.cpu import TorchEngine
from weightswap_runtime.engines.torch.graph_call import GraphCall, MethodCall, Tensors, load_graph
from weightswap_runtime.engines.torch.state import TorchState
from weightswap_runtime.engines.torch.variants import ChosenTensors
from weightswap_runtime.tensors.torch_tensors import torch_dtype

from .library import Container, Library
from .package import Package, find_targets, read_package

_UNIT = torch.empty(1, dtype=torch.uint8)


class AotiEngine(TorchEngine):
    """The packages of one artifact for this machine. Methods without one run as on the engine `torch`."""

    name = "aoti"

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        """Raises ArtifactError and Unsupported."""
        targets = self._targets(artifact)
        methods = artifact.manifest.methods
        beside = [name for name in methods if name not in targets]
        graphs = {name: load_graph(artifact, name, prologue, self.device) for name in beside}
        may_be_empty = [name for name in targets if _may_be_empty(methods[name])]
        self._captured = {name: load_graph(artifact, name, False, self.device) for name in may_be_empty}
        packages = {name: read_package(artifact, target, name) for name, target in targets.items()}
        return graphs | {name: AotiGraph(package, methods[name], self.device) for name, package in packages.items()}

    def _targets(self, artifact: Artifact) -> dict[str, str]:
        return find_targets(artifact)

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        if not isinstance(graph := self._graphs[name], AotiGraph):
            return super()._call(name, method, tensors)
        captured = self._captured.get(name)
        return AotiCall(graph, tensors, GraphCall(captured, method.inputs, tensors) if captured else None)

    def misplaced(self, value: torch.Tensor) -> str | None:  # type: ignore[override]
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"expected a plain tensor, got a {type(value).__qualname__}"
        return super().misplaced(value)

    @staticmethod
    def kind(value: torch.Tensor) -> Hashable:
        return value.dtype, value.shape, value.device, value.layout, type(value)

    @staticmethod
    def environment() -> None:
        """Return None: fused arithmetic need not equal eager bit for bit."""


class AotiGraph:
    """One method's machine code, checked against the manifest."""

    def __init__(self, package: Package, method: Method, device: torch.device) -> None:
        """Raises ArtifactError."""
        self.note = package.note
        signature = method.signature
        self.inputs = input_leaves(signature)
        self.outputs = leaves(signature.output)
        self.library = Library(package.library, package.where, device)
        if problems := list(self._problems()):
            where = f"{package.where}: its machine code is not for {package.note.method!r}"
            raise ArtifactError(f"{where}: {listed(problems, between='; ')}")

    def _problems(self) -> Iterator[str]:
        noted = {tensor.fqn: tensor for tensor in self.note.tensors}
        constants = {constant.fqn: constant for constant in self.library.constants}
        yield from (f"it takes {name!r}, which is not listed" for name in sorted(constants.keys() - noted.keys()))
        yield from (f"it does not take {name!r}" for name in sorted(noted.keys() - constants.keys()))
        for name in noted.keys() & constants.keys():
            if constants[name].dtype != self.library.dtype_code(torch_dtype(noted[name].dtype)):
                yield f"it takes {name!r} with a dtype other than {noted[name].dtype}"
        counts = [len([leaf for leaf in flat if _is_tensor(leaf)]) for flat in (self.inputs, self.outputs)]
        if counts != [self.library.inputs, self.library.outputs]:
            yield f"it has {self.library.inputs} inputs and {self.library.outputs} outputs, expected {counts}"


def _may_be_empty(method: Method) -> bool:
    """Return whether the signature allows an input without elements."""
    fixed = (size for leaf in input_leaves(method.signature) for size in sizes_of(leaf))
    return 0 in fixed or any(limits.min == 0 for limits in method.signature.dims.values())


def _is_tensor(leaf: Leaf) -> bool:
    """Return whether a leaf is a tensor in the machine code; literals are in the manifest only."""
    return isinstance(leaf, Tensor | Integer)


class AotiCall:
    """One method over one arena. A container runs one call at a time, so each call takes one from a pool.

    There is a pool for each choice of variants, and a state has containers of its own. Machine code for sizes from 1
    may divide by a size, which ends the process: a call with an empty input runs the captured graph instead.
    """

    past_autograd = False
    has_prologue = False

    def __init__(self, graph: AotiGraph, tensors: Tensors, captured: GraphCall | None) -> None:
        """captured: the same method without machine code; None if no input can be empty."""
        self._captured = captured
        self._library = graph.library
        bound = graph.note.tensors
        self._tensors = {item.fqn: tensors[item.kind, item.name] for item in bound if item.kind != "state"}
        self._states = {item.fqn: item.name for item in bound if item.kind == "state"}
        self.stateful = bool(self._states)
        self._variable = {item.fqn: item.name for item in bound if item.kind == "variant"}
        self._no_variants = ChosenTensors({})
        self._pools: WeakKeyDictionary[ChosenTensors, list[Container]] = WeakKeyDictionary()
        self._by_state: WeakKeyDictionary[TorchState, WeakKeyDictionary[ChosenTensors, Container]]
        self._by_state = WeakKeyDictionary()
        self._flat = [(index, isinstance(leaf, Tensor)) for index, leaf in enumerate(graph.inputs) if _is_tensor(leaf)]
        self._written = frozenset(graph.note.written)
        self._outputs = graph.outputs
        self._plain = all(isinstance(leaf, Tensor) for leaf in graph.outputs)
        if not self.stateful:
            self._pools[self._no_variants] = [Container(self._library, self._tensors)]
        self.hoisted: list[torch.Tensor] = []

    def run_prologue(self) -> None:
        """Do nothing: constants that AOTInductor folded would be stale after a swap."""

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None = None) -> list[Any]:
        tensors = [
            _row_major(inputs[index]) if is_tensor else _UNIT.expand(inputs[index]) for index, is_tensor in self._flat
        ]
        if self._captured is not None and not all(tensor.numel() for tensor in tensors):
            return list(self._captured(inputs, state, chosen))
        choice = chosen if chosen is not None and self._variable else self._no_variants
        values = self._run(tensors, choice) if state is None else self._container_of(state, choice).run(tensors)
        if self._written:
            self._write_back(inputs, tensors)
        if self._plain:
            return values
        remaining = iter(values)
        return [_output(leaf, remaining) for leaf in self._outputs]

    def _run(self, inputs: list[torch.Tensor], choice: ChosenTensors) -> list[torch.Tensor]:
        if (pool := self._pools.get(choice)) is None:
            pool = self._pools.setdefault(choice, [])
        try:
            container = pool.pop()
        except IndexError:
            container = self._container(choice, {})
        values = container.run(inputs)
        pool.append(container)
        return values

    def _container_of(self, state: TorchState, choice: ChosenTensors) -> Container:
        if (containers := self._by_state.get(state)) is None:  # two calls at once with one state are refused
            containers = self._by_state[state] = WeakKeyDictionary()
        container = containers.get(choice)
        if container is None:
            state_tensors = {fqn: state.tensors[name] for fqn, name in self._states.items()}
            containers[choice] = container = self._container(choice, state_tensors)
        return container

    def _container(self, choice: ChosenTensors, state_tensors: Mapping[str, torch.Tensor]) -> Container:
        """Create a container with the variants of a choice, and zeros for those that it lacks."""
        tensors = choice.tensors
        chosen = {fqn: tensors[name] for fqn, name in self._variable.items() if name in tensors}
        return Container(self._library, {**self._tensors, **state_tensors, **chosen})

    def _write_back(self, inputs: list[Any], tensors: list[torch.Tensor]) -> None:
        """Copy writes of the graph from row-major copies of inputs to the inputs."""
        for (index, _), tensor in zip(self._flat, tensors, strict=True):
            if index in self._written and tensor is not inputs[index]:
                inputs[index].copy_(tensor)


def _row_major(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a row-major copy without lazy conjugation or negation: machine code reads raw memory."""
    if value.is_contiguous() and not value.is_conj() and not value.is_neg():
        return value
    return value.resolve_conj().resolve_neg().contiguous()


def _output(leaf: Leaf, values: Iterator[torch.Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return next(values)
    return int(next(values)) if isinstance(leaf, Integer) else None
