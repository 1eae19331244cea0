"""The engine `torch`: runs the captured ATen graph as it was captured, so its outputs equal eager bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from weightswap_runtime.arena import Arena, HostArena
from weightswap_runtime.artifact import Artifact
from weightswap_runtime.contents import Content
from weightswap_runtime.dtypes import TORCH_NAMES
from weightswap_runtime.errors import MissingExtra
from weightswap_runtime.goldens import Environment
from weightswap_runtime.header import FileTensor
from weightswap_runtime.manifest import Method, NamedTensor

try:
    import torch
except ImportError as error:
    raise MissingExtra("the engine `torch`", "torch") from error

from weightswap_runtime.plainly import plainly
from weightswap_runtime.tensors import as_tensor, tensor_content, torch_dtype

from . import Bound
from .callers import check_plain, uncompiled
from .graph_calls import Call, GraphCall, Tensors, layout_of, load_graph, overwrite
from .stateful import Stateful

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = nullcontext()


def _without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """What torch.no_grad() does, in a fifth of its time; and an interrupt cannot leave the thread in that mode."""

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
    """Without the dispatcher's detour through autograd, which does nothing without gradients but takes its time.

    Views are still tracked, unlike in inference mode: matmul chooses its way by whether a view's base needs gradients.
    """
    guard: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    return guard


def environment_here(device: str = "cpu") -> Environment:
    """What decides the last bits of an output in this process, in this thread."""
    return Environment(
        torch=str(torch.__version__),
        device=device,
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
    )


class TorchEngine:
    """The graphs of one artifact on the CPU."""

    name = "torch"
    tensor_type = torch.Tensor
    device = torch.device("cpu")

    @plainly()
    def __init__(self, artifact: Artifact, *, prologue: bool = True) -> None:
        """prologue: compute what depends on weights and constants alone once for each staging, not in each call."""
        self._manifest = artifact.manifest
        self.dtypes: Mapping[torch.dtype, str] = {
            getattr(torch, attribute): name for attribute, name in TORCH_NAMES.items() if hasattr(torch, attribute)
        }
        header, data = artifact.constants()
        values = (*self._manifest.constants, *self._manifest.state)
        self._constants = {item.name: self._placed(_copy(item, header.tensors[item.name], data)) for item in values}
        self._graphs = self._open(artifact, prologue)

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU, taken to where the graphs run."""
        return value

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        return {
            name: load_graph(artifact, name, method, prologue, self.device)
            for name, method in self._manifest.methods.items()
        }

    def _call(self, name: str, method: Method, tensors: Tensors) -> Call:
        return GraphCall(self._graphs[name], method.inputs, tensors)

    @staticmethod
    def misplaced(value: torch.Tensor) -> str | None:
        """What is wrong with an input beside dtype and shape."""
        if value.device.type != "cpu":
            return f"expected a tensor on the CPU, got one on {value.device}"
        return sparse(value)

    @staticmethod
    def kind(value: torch.Tensor) -> Hashable:
        """Everything about an input that its check looks at."""
        return value.dtype, value.shape, value.device, value.layout

    @plainly()
    def bind(self, arena: Arena) -> Bound:
        """Views on the arena for every weight, fresh state, shared constants."""
        tensors = {
            ("constant", name): self._constants[item.name] for item in self._manifest.constants for name in item.names
        }
        for weight in self._manifest.weights:
            view = self._view(arena, weight)
            tensors |= {("weight", name): view for name in weight.names}
        initial: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item in self._manifest.state:
            value = self._constants[item.name]
            live = value.clone(memory_format=torch.preserve_format)
            initial.append((live, value))
            tensors |= {("state", name): live for name in item.names}
        calls = {name: self._call(name, method, tensors) for name, method in self._manifest.methods.items()}
        owned = [*self._constants.values(), *(live for live, _ in initial)]
        return self._bound(calls, initial, arena, owned)

    def _view(self, arena: Arena, weight: NamedTensor) -> torch.Tensor:
        dtype = torch_dtype(weight.dtype)
        offset, size = arena.layout.slots[weight.name]
        if not size:
            return torch.empty(weight.shape, dtype=dtype, device=self.device)
        flat = self._flat(arena, dtype, size // dtype.itemsize, offset)
        # on the base: matmul asks the base of a view; and the result stays a view, whose casts autocast does not cache
        flat.requires_grad_(weight.requires_grad)
        return flat.view(weight.shape) if weight.stride is None else flat.as_strided(weight.shape, weight.stride)

    def _flat(self, arena: Arena, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """Elements of an arena from a byte on, as a tensor that is no view."""
        assert isinstance(arena, HostArena)
        return torch.frombuffer(arena.memory, dtype=dtype, count=count, offset=offset)

    def _bound(
        self,
        calls: Mapping[str, Call],
        state: list[tuple[torch.Tensor, torch.Tensor]],
        arena: Arena,
        owned: list[torch.Tensor],
    ) -> BoundTorch:
        return BoundTorch(calls, state, arena, owned)

    @staticmethod
    def tensor(content: Content) -> torch.Tensor:
        """A tensor on the CPU, in memory that torch has allocated, as kernels look at alignments."""
        return as_tensor(bytearray(content.data), content.dtype, content.shape).clone()

    @staticmethod
    def content(value: torch.Tensor) -> Content:
        """What is in a tensor, whose memory it shares where that is on the CPU and contiguous."""
        return tensor_content(value)

    @staticmethod
    def environment() -> Environment | None:
        """What decides the last bits of an output in this thread."""
        return environment_here()

    @staticmethod
    def plainly() -> AbstractContextManager[None]:
        """A block without the calling thread's gradients, autocast, inference mode and default device."""
        return plainly()


class BoundTorch(Stateful):
    """All methods over one arena. Safe to call from any number of threads."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        state: list[tuple[torch.Tensor, torch.Tensor]],
        arena: Arena,
        owned: list[torch.Tensor],
    ) -> None:
        self._calls = calls
        self._state = state
        super().__init__(has_state=bool(state))
        self._first = arena.address
        self._last = arena.address + max(1, arena.layout.nbytes)
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}

    @_without_gradients
    @uncompiled
    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs; an output that is a view of a weight, state or constant comes as a copy."""
        check_plain(method, inputs)
        call = self._calls[method]
        with self._state_lock if call.stateful else _NOTHING, _past_autograd() if call.past_autograd else _NOTHING:
            outputs = call(inputs)
            if call.stateful:  # which the call may have resized, and so moved
                self._owned.update(live.untyped_storage().data_ptr() for live, _ in self._state)
            return [self._detach(value) for value in outputs]

    @property
    def has_prologue(self) -> bool:
        """Whether anything depends on weights and constants alone."""
        return any(call.has_prologue for call in self._calls.values())

    def prepare(self) -> None:
        """After new weights came to the arena: compute what depends on them alone."""
        if self.has_prologue:
            self._prepare()

    @plainly()
    def _prepare(self) -> None:
        for call in self._calls.values():
            with _past_autograd() if call.past_autograd else _NOTHING:
                call.prepare()
            self._owned.update(tensor.untyped_storage().data_ptr() for tensor in call.hoisted)

    @plainly()
    def adopt(self, other: Bound) -> bool:
        """Copy what the same engine has computed over another arena with the same weights."""
        if type(other) is not type(self):
            return False
        pairs = [(call.hoisted, other._calls[name].hoisted) for name, call in self._calls.items()]
        if [list(map(layout_of, mine)) for mine, _ in pairs] != [list(map(layout_of, theirs)) for _, theirs in pairs]:
            return False
        for old, new in (pair for mine, theirs in pairs for pair in zip(mine, theirs, strict=True)):
            if not self._first <= old.untyped_storage().data_ptr() < self._last:  # else it views the weights
                overwrite(old, new)
        return True

    @plainly()
    def keep(self) -> Callable[[], None]:
        """Copy what was computed from weights; the function that is returned puts it back."""
        kept = [(value, _copied(value.untyped_storage())) for value in self._computed()]

        def put_back() -> None:
            for value, storage in kept:
                value.untyped_storage().copy_(storage)

        return put_back

    def _computed(self) -> Iterator[torch.Tensor]:
        """What was computed from weights, but for views of them."""
        for call in self._calls.values():
            for value in call.hoisted:
                if not self._first <= value.untyped_storage().data_ptr() < self._last:
                    yield value

    @_without_gradients
    def _reset(self) -> None:
        for live, value in self._state:
            put_state(live, value)

    def _detach(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        pointer = value.untyped_storage().data_ptr()
        if self._first <= pointer < self._last or pointer in self._owned:
            return value.clone()
        return value if value.grad_fn is None else value.detach()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def put_state(live: torch.Tensor, value: torch.Tensor) -> None:
    """Give a state a value, in its memory; in other memory if a call has resized it."""
    if live.shape == value.shape:
        live.copy_(value)
    else:
        live.set_(value.clone(memory_format=torch.preserve_format))  # type: ignore[call-overload]


def sparse(value: torch.Tensor) -> str | None:
    """What is wrong with an input's layout."""
    return None if value.layout is torch.strided else f"expected a dense tensor, got {value.layout}"


def _copy(item: NamedTensor, place: FileTensor, data: memoryview) -> torch.Tensor:
    value = as_tensor(bytearray(data[place.begin : place.end]), item.dtype, item.shape)
    if item.stride is None:
        return value
    return torch.empty_strided(item.shape, item.stride, dtype=value.dtype).copy_(value)
