"""What the engines on torch share: states, chosen variants, calls of a method's graph, and what they need of inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import contains
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.autograd import forward_ad

from weightswap_runtime.errors import ArtifactError, InputMismatch, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import GraphInput, Method, NamedTensor
from weightswap_runtime.format.signature import Integer, Literal, Tensor, input_leaves, leaves
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.torch_tensors import tensor_content

from .graph import Compiled, open_graph

Tensors = Mapping[tuple[str, str], torch.Tensor]  # by kind and FQN
_FIXED = ("weight", "constant")
# the schema's kinds of inputs, by types of a signature's leaves
_KINDS: dict[type, tuple[str, ...]] = {
    Tensor: ("as_tensor",),
    Integer: ("as_sym_int",),
    Literal: ("as_none", "as_bool", "as_int", "as_float", "as_string"),
}
F = TypeVar("F", bound=Callable[..., Any])


class ChosenTensors:
    """Tensors of variants by FQN, with tied ones under each of their names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: list[int] | None = None) -> None:
        """storages: the addresses of the tensors' storages, if they are known."""
        self.tensors = tensors
        if storages is None:
            storages = list({tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
        self.storages = storages

    def lend(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream has done its work so far. All of a variant's tensors share one storage."""
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in self.tensors.values()}.values():
            tensor.record_stream(stream)


class TorchState:
    """One copy of an artifact's state; calls write into its tensors."""

    def __init__(self, rows: Sequence[NamedTensor], initial: Mapping[str, torch.Tensor]) -> None:
        """initial: values by the names of the rows; they are copied."""
        self._initial = initial
        self._by_row = {row.name: _copied(row, initial[row.name]) for row in rows}
        self.tensors = {name: self._by_row[row.name] for row in rows for name in row.names}  # by FQN
        self._by_graph: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}

    def reset(self) -> None:
        """Restore the initial values, in the same memory except for tensors that a call has resized."""
        self.put(self._initial)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set values by the names of the rows."""
        for name, value in values.items():
            _put(self._by_row[name], value)

    def content(self, name: str) -> TensorBytes:
        return tensor_content(self._by_row[name])

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors with the names of their rows."""
        return iter(self._by_row.items())

    def for_inputs(self, graph: Hashable, names: Sequence[tuple[int, str]]) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors for a graph's inputs, with their indices. names: index and FQN of each such input."""
        if (tensors := self._by_graph.get(graph)) is None:
            tensors = self._by_graph[graph] = [(index, self.tensors[name]) for index, name in names]
        return tensors

    def storages(self) -> list[int]:
        """Return the addresses of the tensors' storages, which may change when a call resizes one."""
        return [tensor.untyped_storage().data_ptr() for tensor in self._by_row.values()]


def _copied(row: NamedTensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value in the row's shape and strides. The value may be a single expanded zero."""
    if row.stride is None:
        return torch.empty(row.shape, dtype=value.dtype, device=value.device).copy_(value)
    return torch.empty_strided(row.shape, row.stride, dtype=value.dtype, device=value.device).copy_(value)


@torch.no_grad()
def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.set_(value.clone(memory_format=torch.preserve_format))  # type: ignore[call-overload]


class MethodCall(Protocol):
    """One method with its tensors in place."""

    past_autograd: bool = False  # it may run without the dispatcher's autograd, as in `Compiled`
    stateful: bool  # it takes a state
    has_prologue: bool = False
    hoisted: Sequence[torch.Tensor] = ()  # the results of `run_prologue`

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone."""
        return

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None) -> Any:
        """Run on flat inputs. Return flat outputs. state: None unless stateful. chosen: variants; None: zeros."""
        ...


def load_graph(
    artifact: Artifact, name: str, prologue: bool, device: torch.device, group: str | None = None
) -> Compiled:
    """Open a method's graph as it was captured.

    group: name under which torch knows the process group of an artifact for several ranks. Raises ArtifactError, and
    Unsupported if there is a group and the artifact is for one process, or the other way round.
    """
    _check_group(artifact, group)
    method = artifact.manifest.methods[name]
    fixed = [prologue and item.kind in _FIXED for item in method.inputs]
    graph = open_graph(artifact, method.graph, device, fixed, group)
    if not _fits(graph, method):
        raise ArtifactError(
            f"{artifact.path / method.graph}: its inputs and outputs are not those of the method {name!r} in the "
            "manifest"
        )
    return graph


def _check_group(artifact: Artifact, group: str | None) -> None:
    if artifact.manifest.ranks is not None and group is None:
        raise Unsupported(
            f"{artifact.path}: is for {artifact.manifest.ranks.size} ranks, which call its graphs together. Start as "
            "many processes and give their group: load(ranks=...)"
        )
    if artifact.manifest.ranks is None and group is not None:
        raise Unsupported(
            f"{artifact.path}: is for one process, and not for the ranks of a group. Load it without ranks=, or export "
            "with parallel="
        )


def _fits(graph: Compiled, method: Method) -> bool:
    """Return whether a graph has as many inputs and outputs as a method, and inputs of the same kinds."""
    flat = iter(input_leaves(method.signature))
    kinds = [_KINDS[type(next(flat))] if item.kind == "input" else _KINDS[Tensor] for item in method.inputs]
    if len(graph.kinds) != len(kinds) or not all(map(contains, kinds, graph.kinds)):
        return False
    return graph.outputs == len(leaves(method.signature.output))


class GraphCall(MethodCall):
    """One method's graph with its tensors in place.

    All arguments of the graph's function stand in one list, `_slots`: the results of the prologue, then the inputs as
    the manifest lists them. A call copies the list and fills in what belongs to the call. If nothing but the caller's
    inputs does, and these come last, which is the rule, it passes `_bound`, the part before them, and no list is made.
    """

    def __init__(self, graph: Compiled, inputs: tuple[GraphInput, ...], tensors: Tensors) -> None:
        self._graph = graph.call
        self.past_autograd = graph.past_autograd
        self._prologue = graph.prologue
        self.has_prologue = graph.prologue is not None
        self._hoisted_count = graph.hoisted
        self.hoisted: list[torch.Tensor] = []
        bound = [tensors.get((item.kind, item.name)) for item in inputs]
        self._prologue_inputs = [tensor for item, tensor in zip(inputs, bound, strict=True) if item.kind in _FIXED]
        self._slots: list[Any] = [None] * self._hoisted_count + bound
        slots = list(enumerate(inputs, graph.hoisted))
        self._inputs = [index for index, item in slots if item.kind == "input"]
        self._states = [(index, item.name) for index, item in slots if item.kind == "state"]
        self._variable = [(index, item.name) for index, item in slots if item.kind == "variant"]
        self._with_variants: WeakKeyDictionary[ChosenTensors, list[Any]] = WeakKeyDictionary()
        self.stateful = bool(self._states)
        first = len(slots) + graph.hoisted - len(self._inputs)
        has_inputs_last = bool(self._inputs) and self._inputs[0] == first
        self._bound = self._slots[:first] if has_inputs_last and not self.stateful and not self._variable else None

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone. The addresses of the results stay."""
        if self._prologue is None:
            return
        values = self._prologue(*self._prologue_inputs)
        if self.hoisted:
            for old, new in zip(self.hoisted, values, strict=True):
                overwrite(old, new)
            return
        self._slots[: self._hoisted_count] = values
        self._with_variants.clear()
        if self._bound is not None:
            self._bound[: self._hoisted_count] = values
        self.hoisted = list(values)

    def __call__(self, inputs: list[Any], state: TorchState | None = None, chosen: ChosenTensors | None = None) -> Any:
        if self._bound is not None:
            return self._graph(*self._bound, *inputs)
        slots = (self._slots if chosen is None else self._chosen(chosen)).copy()
        if state is not None:
            for index, tensor in state.for_inputs(self._graph, self._states):
                slots[index] = tensor
        for index, value in zip(self._inputs, inputs, strict=True):
            slots[index] = value
        return self._graph(*slots)

    def _chosen(self, chosen: ChosenTensors) -> list[Any]:
        """Return the slots, filled with the tensors of the chosen variants."""
        if (slots := self._with_variants.get(chosen)) is None:
            slots = self._slots.copy()
            for index, name in self._variable:
                slots[index] = chosen.tensors.get(name, slots[index])
            self._with_variants[chosen] = slots
        return slots


def overwrite(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy `new` into the memory of `old`, also if elements overlap. Raises ValueError for another shape or layout."""
    if layout_of(old) != layout_of(new):
        raise ValueError("a value computed from weights alone has a different shape or layout than before")
    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # else both view the same memory
        old.untyped_storage().copy_(new.untyped_storage())


def layout_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


def as_row_major(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a row-major copy without lazy conjugation or negation: compiled code reads raw memory."""
    if value.is_contiguous() and not value.is_conj() and not value.is_neg():
        return value
    return value.resolve_conj().resolve_neg().contiguous()


def writes_to(value: Any) -> int:
    """Return a counter of writes to a tensor; 0 for other values."""
    return int(value._version) if isinstance(value, torch.Tensor) else 0


_eval_frame = torch._C._dynamo.eval_frame
_innermost_transformation = torch._C._functorch.peek_interpreter_stack
_NO_TRANSFORMATION = (
    "cannot be called within torch.func's transforms: instead of vmap, pass it the whole batch at once; for grad, vjp, "
    "jvp and the like, its outputs have no derivatives"
)
_NO_DUAL = "cannot be called on dual tensors, as its outputs have no tangents; pass it the primal part"


def uncompiled(function: F) -> F:
    """Exclude a function and its callees from torch.compile. (`torch.compiler.disable` takes a second to import.)"""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    if hasattr(_eval_frame, "set_code_exec_strategy"):  # private to torch, and not in every version
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def check_plain(method: str, inputs: Sequence[Any]) -> None:
    """Raise InputMismatch within torch.func's transformations and for dual tensors. Takes 0.1 us.

    The engines skip what torch would do for both, so their outputs would silently lack derivatives.
    """
    if _innermost_transformation() is not None:
        raise InputMismatch(method, [_NO_TRANSFORMATION])
    if forward_ad._current_level >= 0 and any(map(_is_dual, inputs)):
        raise InputMismatch(method, [_NO_DUAL])


def _is_dual(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
