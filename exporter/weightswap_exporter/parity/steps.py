"""Steps of an execution, operator by operator, and their alignment with those of another execution.

Eager code and a captured graph are both observed below composite operators in torch's dispatcher, so that both show the
same operators in the same order if they compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import SequenceMatcher
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_exporter.models.user_errors import first_line
from weightswap_runtime.engines.graphs.effects import is_fresh, is_mutable
from weightswap_runtime.tensors.torch_tensors import tensor_bytes

_BLANK = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class Position(NamedTuple):
    """Position of a computation in the model and in the graph; `node` and `operator` are empty in eager code.

    modules: (FQN, class) from the outermost to the innermost. The outermost, the model itself, has the FQN "".
    """

    modules: tuple[tuple[str, str], ...] = ()
    node: str = ""
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
    """One call of an operator that computes something, with copies of its results.

    inputs: digests of its tensor arguments; None for weights, state and constants.
    """

    operator: str
    values: tuple[torch.Tensor, ...]
    inputs: tuple[int | None, ...]
    position: Position

    @property
    def shape(self) -> tuple[object, ...]:
        """Key that is equal for two steps that compute the same."""
        kinds = ((value.dtype, tuple(value.shape)) for value in self.values)
        return self.position.module, self.operator, *kinds


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
        if not computes(func):
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def computes(operator: OpOverload) -> bool:
    """Return whether the operator computes values, rather than views or uninitialised memory."""
    if operator._schema.name in _BLANK:
        return False
    return is_fresh(operator) or is_mutable(operator) or not operator._schema.name.startswith("aten::")


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


class NodeFailed(Exception):
    """Error raised by a node of a graph."""

    def __init__(self, position: Position, error: Exception) -> None:
        where = f"{position.module} ({position.kind})" if position.module else f"the model itself ({position.kind})"
        super().__init__(f"the graph raises in {where}, node {position.node}, {position.operator}: {first_line(error)}")


class GraphRun(torch.fx.Interpreter):
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
        return position_of_node(self._node) if self._node is not None else Position()


def position_of_node(node: torch.fx.Node) -> Position:
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


class Aligned(NamedTuple):
    """Two steps that correspond, and the steps just before them that only one side has.

    `expected` and `found` are None for the steps after the last pair.
    """

    expected: Step | None
    found: Step | None
    alone: tuple[Step, ...]


def aligned(expected: Sequence[Step], found: Sequence[Step]) -> Iterator[Aligned]:
    """Align two executions, module by module and operator by operator."""
    ours, theirs = ([step.shape for step in steps] for steps in (expected, found))
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    left = right = 0
    for first, second, size in matcher.get_matching_blocks():
        alone = (*expected[left:first], *found[right:second])
        for offset in range(size):
            yield Aligned(expected[first + offset], found[second + offset], alone)
            alone = ()
        if not size and alone:
            yield Aligned(None, None, alone)
        left, right = first + size, second + size
