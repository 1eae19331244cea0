"""The engine `torch`: runs the captured ATen graph as it was captured, so its outputs equal eager bit for bit.

Outputs share no memory with weights, state or constants: a caller may keep one while a swap overwrites the weights, or
write to it.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("the engine `torch`", "torch") from error

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Environment
from weightswap_runtime.format.manifest import Method, NamedTensor
from weightswap_runtime.memory.arena import Arena, HostArena
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.torch_tensors import (
    DTYPE_NAMES,
    copied_tensor,
    default_torch_modes,
    tensor_content,
    torch_dtype,
)

from .engine import Bound, Chosen, State
from .graph import Compiled
from .torch_calls import (
    ChosenTensors,
    GraphCall,
    MethodCall,
    Tensors,
    TorchState,
    check_plain,
    layout_of,
    load_graph,
    overwrite,
    uncompiled,
)


class TorchEngine:
    """The graphs of one artifact on the CPU."""

    name = "torch"
    tensor_type = torch.Tensor
    device = torch.device("cpu")

    @default_torch_modes()
    def __init__(self, artifact: Artifact, *, prologue: bool = True, group: str | None = None) -> None:
        """prologue: compute what depends on weights and constants alone once per staging, not in each call.

        group: the process group of an artifact for several ranks, by the name under which torch knows it.
        """
        self._manifest = artifact.manifest
        self._group = group
        self.dtypes = DTYPE_NAMES
        contents = artifact.constants()
        self._constants, self._initial = (
            {item.name: self._row_tensor(item, contents[item.name]) for item in rows}
            for rows in (self._manifest.constants, self._manifest.state)
        )
        self._zero_variants = {
            row.name: _strided(row, torch.zeros(row.shape, dtype=torch_dtype(row.dtype), device=self.device))
            for row in self._manifest.variable
        }
        self._graphs = self._open(artifact, prologue)

    def _row_tensor(self, item: NamedTensor, content: TensorBytes) -> torch.Tensor:
        if item.zero:  # no file has it; one element stands for all
            return torch.zeros((), dtype=torch_dtype(item.dtype), device=self.device).expand(item.shape)
        return self._to_device(_strided(item, copied_tensor(content)))

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from the CPU to the device of the graphs, if that is another."""
        return value

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        return {name: load_graph(artifact, name, prologue, self.device, self._group) for name in artifact.methods}

    @property
    def runs(self) -> dict[str, str]:
        return {name: "torch" if isinstance(graph, Compiled) else self.name for name, graph in self._graphs.items()}

    @property
    def state_names(self) -> list[str]:
        """The names of the state's rows."""
        return [row.name for row in self._manifest.state]

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        return GraphCall(self._graphs[name], method.inputs, tensors)

    @staticmethod
    def misplaced(value: torch.Tensor) -> str | None:
        if value.device.type != "cpu":
            return f"expected a tensor on the CPU, got one on {value.device}"
        return layout_problem(value)

    @staticmethod
    def kind(value: torch.Tensor) -> Hashable:
        return value.dtype, value.shape, value.device, value.layout

    @default_torch_modes()
    def bind(self, arena: Arena) -> Bound:
        """Bind the graphs to views of the arena's weights; constants are shared by all arenas."""
        tensors = {
            ("constant", name): self._constants[item.name] for item in self._manifest.constants for name in item.names
        }
        for weight in arena.layout.weights.values():
            view = self._view(arena, weight)
            tensors |= {("weight", name): view for name in weight.names}
        for row in self._manifest.variable:
            tensors |= {("variant", name): self._zero_variants[row.name] for name in row.names}
        calls = {name: self._call(name, method, tensors) for name, method in self._manifest.methods.items()}
        return self._bound(calls, arena)

    @default_torch_modes()
    def variant(self, rows: Iterable[NamedTensor], arena: Arena) -> ChosenTensors:
        return ChosenTensors({name: view for row in rows for view in [self._view(arena, row)] for name in row.names})

    @staticmethod
    def joined(chosen: Iterable[ChosenTensors]) -> ChosenTensors:
        groups = list(chosen)
        tensors = {name: tensor for group in groups for name, tensor in group.tensors.items()}
        return ChosenTensors(tensors, [storage for group in groups for storage in group.storages])

    @default_torch_modes()
    def new_state(self, saved: Mapping[str, TensorBytes] | None = None) -> TorchState:
        state = self._new_state()
        for name, content in (saved or {}).items():  # one at a time, in memory that torch has allocated
            state.put({name: self.tensor(content)})
        return state

    def _new_state(self) -> TorchState:
        return TorchState(self._manifest.state, self._initial)

    def _view(self, arena: Arena, weight: NamedTensor) -> torch.Tensor:
        dtype = torch_dtype(weight.dtype)
        offset, size = arena.layout.slots[weight.name]
        if not size:
            return torch.empty(weight.shape, dtype=dtype, device=self.device)
        flat = self._flat(arena, dtype, size // dtype.itemsize, offset)
        # set on the base, which matmul looks at; the result stays a view, because autocast caches no casts of views
        flat.requires_grad_(weight.requires_grad)
        return flat.view(weight.shape) if weight.stride is None else flat.as_strided(weight.shape, weight.stride)

    def _flat(self, arena: Arena, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """Return `count` elements of an arena from a byte offset on, as a tensor that is no view."""
        assert isinstance(arena, HostArena)
        return torch.frombuffer(arena.memory, dtype=dtype, count=count, offset=offset)

    def _bound(self, calls: Mapping[str, MethodCall], arena: Arena) -> BoundTorch:
        return BoundTorch(calls, arena, self._shared(), self.new_state)

    def _shared(self) -> list[torch.Tensor]:
        """Return the tensors that calls on all arenas read."""
        return [*self._constants.values(), *self._zero_variants.values()]

    tensor = staticmethod(copied_tensor)
    content = staticmethod(tensor_content)

    @staticmethod
    def environment() -> Environment | None:
        return environment_here()

    @staticmethod
    def default_torch_modes() -> AbstractContextManager[None]:
        """Return a context without the calling thread's gradients, autocast, inference mode and default device."""
        return default_torch_modes()


def _strided(item: NamedTensor, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it in the row's strides."""
    if item.stride is None:
        return value
    return torch.empty_strided(item.shape, item.stride, dtype=value.dtype, device=value.device).copy_(value)


def layout_problem(value: torch.Tensor) -> str | None:
    """Describe what is wrong with an input's layout. Return None if nothing is."""
    if value.is_nested:
        return "expected a dense tensor, got a nested one"
    return None if value.layout is torch.strided else f"expected a dense tensor, got {value.layout}"


def environment_here() -> Environment:
    """Return what decides the last bits of an output in this process and thread."""
    return Environment(
        torch=str(torch.__version__),
        device="cpu",
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
    )


P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = nullcontext()


def _without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Do the same as torch.no_grad() in a fifth of its time. An interrupt cannot leave the thread in that mode."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return wrapped


def _past_autograd() -> AbstractContextManager[object]:
    """Skip the dispatcher's autograd kernels, which do nothing without gradients but take time.

    Views are still tracked, unlike in inference mode: matmul picks a kernel by whether a view's base needs gradients.
    """
    guard: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    return guard


class BoundTorch:
    """All methods over one arena. Safe to call from any number of threads, if each call has a state of its own."""

    def __init__(
        self,
        calls: Mapping[str, MethodCall],
        arena: Arena,
        owned: list[torch.Tensor],
        new_state: Callable[[], TorchState],
    ) -> None:
        self._calls = calls
        self._new_state = new_state
        self._spare: list[TorchState] = []  # with initial values, for calls without a state
        self._begin = arena.address
        self._end = arena.address + max(1, arena.layout.nbytes)
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}  # what outputs must not view, either

    @_without_gradients
    @uncompiled
    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        """Run a method on flat inputs. Return flat outputs; one that views a weight, state or constant is copied."""
        check_plain(method, inputs)
        call = self._calls[method]
        assert chosen is None or isinstance(chosen, ChosenTensors)
        with _past_autograd() if call.past_autograd else _NOTHING:
            if not call.stateful:
                storages = () if chosen is None else chosen.storages
                return [self._detach(value, storages) for value in call(inputs, None, chosen)]
            if state is not None:
                return self._run_with(call, inputs, state, chosen)
            try:
                spare = self._spare.pop()  # without a look before: another thread may take the last one
            except IndexError:
                spare = self._new_state()
            outputs = self._run_with(call, inputs, spare, chosen)
            spare.reset()
            self._spare.append(spare)  # not after an error, which may leave it half changed
            return outputs

    def _run_with(self, call: MethodCall, inputs: list[Any], state: State, chosen: ChosenTensors | None) -> list[Any]:
        assert isinstance(state, TorchState)
        outputs = call(inputs, state, chosen)
        storages = state.storages()  # after the call, which may have resized them
        storages += () if chosen is None else chosen.storages
        return [self._detach(value, storages) for value in outputs]

    @property
    def has_prologue(self) -> bool:
        return any(call.has_prologue for call in self._calls.values())

    def run_prologue(self) -> None:
        if self.has_prologue:
            self._run_prologue()

    @default_torch_modes()
    def _run_prologue(self) -> None:
        for call in self._calls.values():
            with _past_autograd() if call.past_autograd else _NOTHING:
                call.run_prologue()
            self._owned.update(tensor.untyped_storage().data_ptr() for tensor in call.hoisted)

    def copy_prologue_from(self, other: Bound) -> bool:
        return type(other) is type(self) and (not self.has_prologue or self._copy_prologue_from(other))

    @default_torch_modes()
    def _copy_prologue_from(self, other: BoundTorch) -> bool:
        pairs = [(call.hoisted, other._calls[name].hoisted) for name, call in self._calls.items()]
        if [list(map(layout_of, mine)) for mine, _ in pairs] != [list(map(layout_of, theirs)) for _, theirs in pairs]:
            return False
        if any(call.has_prologue and not call.hoisted for call in self._calls.values()):
            return False  # the other one has no results: it may compute them in its calls
        for old, new in (pair for mine, theirs in pairs for pair in zip(mine, theirs, strict=True)):
            if not self._in_arena(old):
                overwrite(old, new)
        return True

    @default_torch_modes()
    def keep(self) -> Callable[[], None]:
        copies = [
            (value, value.untyped_storage().clone())  # type: ignore[no-untyped-call]
            for call in self._calls.values()
            for value in call.hoisted
            if not self._in_arena(value)
        ]

        def restore() -> None:
            for value, storage in copies:
                value.untyped_storage().copy_(storage)

        return restore

    def _in_arena(self, value: torch.Tensor) -> bool:
        return self._begin <= value.untyped_storage().data_ptr() < self._end

    def _detach(self, value: Any, storages: Collection[int]) -> Any:
        """Return an output that views no memory of ours. storages: those of the call's state and variants."""
        if not isinstance(value, torch.Tensor):
            return value
        pointer = value.untyped_storage().data_ptr()
        if self._begin <= pointer < self._end or pointer in self._owned or pointer in storages:
            return value.clone()
        return value if value.grad_fn is None else value.detach()
