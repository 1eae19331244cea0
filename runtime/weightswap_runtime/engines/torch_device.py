"""The engine `torch` on a device: calls in whatever stream is the thread's current one, without waits of the host.

torch's allocator knows of the stream alone that memory was allocated in. Memory that another stream uses is lent to it
(`record_stream`), or it could be reused while the device still reads it: the arena's by `DeviceArena.use`, that of
constants, of the prologue's results, of states and of variants here. A stream that is not torch's may be destroyed at
any time, so nothing is lent to it: what uses the memory next waits for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Environment
from weightswap_runtime.format.manifest import Manifest, Method, NamedTensor
from weightswap_runtime.format.signature import (
    Integer,
    Leaf,
    Literal,
    Signature,
    Sizes,
    Tensor,
    in_range,
    input_leaves,
    parse_size,
    size_at,
)
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.device_arena import DeviceArena, check_call
from weightswap_runtime.memory.torch_device import Accelerator, open_accelerator
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.torch_tensors import default_torch_modes, torch_dtype

from .cuda_graphs import Captures, CudaRecorder, Shapes
from .engine import AUTO, Bound, Chosen, CudaGraphs, State
from .torch_calls import ChosenTensors, MethodCall, TorchState, check_plain, uncompiled
from .torch_cpu import BoundTorch, TorchEngine, layout_problem

_CPU = torch.device("cpu")
Move = Callable[[torch.Tensor], torch.Tensor]


class AcceleratedEngine(TorchEngine):
    """The graphs of one artifact on an accelerator."""

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        *,
        prologue: bool = True,
        on_host: bool = False,
        cuda_graphs: CudaGraphs | None = None,
        group: str | None = None,
    ) -> None:
        """on_host: weights staged in host memory can be tried there. group: as for `TorchEngine`.

        Raises ArtifactError, and Unsupported for shapes that no method has.
        """
        self._accelerator = open_accelerator(device)
        self.device = self._accelerator.torch
        with self._accelerator.on(self._accelerator.staging):
            super().__init__(artifact, prologue=prologue, group=group)
            named = [] if cuda_graphs is None else list(samples(cuda_graphs, artifact.manifest, self.device))
            self._ready = self._accelerator.mark(self._accelerator.staging)
        self._shapes: Shapes | None = None
        if cuda_graphs is not None:
            self._shapes = Shapes(named, auto=cuda_graphs == AUTO)
            self._new_recorder()  # raises Unsupported now, not at the first capture
        self._host = TorchEngine(artifact, prologue=prologue, group=group) if on_host else None

    def misplaced(self, value: torch.Tensor) -> str | None:  # type: ignore[override]
        if value.device != self.device:
            return (
                f"expected a tensor on {self.device}, got one on {value.device}: move it with .to({str(self.device)!r})"
            )
        return layout_problem(value)

    def bind(self, arena: Arena) -> Bound:
        """Bind the graphs to an arena. One in host memory is for trials, and its graphs run on the CPU."""
        if isinstance(arena, DeviceArena):
            # calls wait for the arena's event, and so for the constants, too
            self._accelerator.wait(self._accelerator.current(), self._ready)
            return super().bind(arena)
        assert self._host is not None
        return OnHost(self._host.bind(arena), self._host, self._to_device, self._to_host)

    def _flat(self, arena: Arena, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        assert isinstance(arena, DeviceArena)
        storage = arena.buffer.tensor.untyped_storage()
        flat = torch.empty(0, dtype=dtype, device=self.device)
        return flat.set_(storage, offset // dtype.itemsize, (count,), (1,))

    def _bound(self, calls: Mapping[str, MethodCall], arena: Arena) -> BoundTorch:
        assert isinstance(arena, DeviceArena)
        bound = BoundAccelerated(calls, arena, self._shared(), self.new_state, self._accelerator)
        if self._shapes is not None and arena.serves:
            bound.capture(self._new_recorder(), self._shapes)
        return bound

    def _new_state(self) -> AcceleratedState:
        """Raises Unsupported while the application captures a CUDA graph."""
        check_call(self._accelerator, "a new state")
        stream = self._accelerator.current()
        self._accelerator.wait(stream, self._ready)
        if not self._accelerator.is_foreign(stream):
            for value in self._initial.values():
                value.record_stream(stream)
        return AcceleratedState(self._manifest.state, self._initial, self._accelerator)

    def _new_recorder(self) -> CudaRecorder:
        return CudaRecorder(self._accelerator)

    def tensor(self, content: TensorBytes) -> torch.Tensor:
        """Create a tensor on the device."""
        return self._to_device(super().tensor(content))

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, through page-locked memory: a copy from other memory stalls the whole device."""
        try:
            value = value.pin_memory()
        except RuntimeError:  # no memory can be locked
            return value.to(self.device)
        return value.to(self.device, non_blocking=True)

    def content(self, value: torch.Tensor) -> TensorBytes:
        """Return a copy of the content of a tensor on the device."""
        return super().content(self._to_host(value))

    def _to_host(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to page-locked memory, or other memory if none can be locked. Wait until the copy is done."""
        plain = value.detach().resolve_conj().resolve_neg()
        try:
            copy = torch.empty_like(plain, device=_CPU, pin_memory=True)
        except RuntimeError:
            return plain.cpu()
        copy.copy_(plain, non_blocking=True)
        self._accelerator.finish(self._accelerator.mark(self._accelerator.current()))
        return copy

    def environment(self) -> Environment | None:  # type: ignore[override]
        return Environment(
            torch=str(torch.__version__),
            device=self.device.type,
            capability=self._accelerator.capability,
            threads=0,
        )

    @contextmanager
    def default_torch_modes(self) -> Iterator[None]:  # type: ignore[override]
        """As on the CPU, and in a stream that no call uses."""
        with default_torch_modes(), self._accelerator.on(self._accelerator.staging):
            yield


class BoundAccelerated(BoundTorch):
    """All methods over one arena of a device. Safe to call from any number of threads, in any stream."""

    def __init__(
        self,
        calls: Mapping[str, MethodCall],
        arena: DeviceArena,
        owned: list[torch.Tensor],
        new_state: Callable[[], TorchState],
        accelerator: Accelerator,
    ) -> None:
        super().__init__(calls, arena, owned, new_state)
        self._arena = arena
        self._accelerator = accelerator
        self._lent: set[int] = set()  # keys of streams
        self._own = owned  # what is neither in the arena nor of a call
        self._captures: Captures | None = None

    def capture(self, recorder: CudaRecorder, shapes: Shapes) -> None:
        """Capture calls without a state from now on, those of named shapes as soon as there are weights."""
        self._captures = Captures(self._accelerator, recorder, shapes, super().run)

    @uncompiled
    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        """Run a method on flat inputs in the thread's current stream. Return flat outputs.

        Raises Unsupported while the application captures a CUDA graph.
        """
        check_plain(method, inputs)  # before a replay or work in another stream
        check_call(self._accelerator)
        if self._arena.use():
            return self._run_in_foreign(method, inputs, state, chosen)
        self._lend()
        if isinstance(chosen, ChosenTensors):
            chosen.lend(self._accelerator.current())
        elif self._captures is not None and self._may_replay(method):
            outputs = self._captures.replay(method, inputs)
            if outputs is not None:
                return outputs
        return super().run(method, inputs, state, chosen)

    def _run_in_foreign(self, method: str, inputs: list[Any], state: State | None, chosen: Chosen | None) -> list[Any]:
        """Run in a stream that is neither torch's nor ours. No memory is lent to it; its next user waits for the call.

        For a state or variants, whose memory belongs to no stream of ours, the host waits.
        """
        try:
            return super().run(method, inputs, state, chosen)
        finally:
            self._arena.leave()
            mark = self._accelerator.mark(self._accelerator.current())
            self._accelerator.wait(self._accelerator.staging, mark)
            if state is not None or chosen is not None or self._calls[method].stateful:
                self._accelerator.finish(mark)

    def _may_replay(self, method: str) -> bool:
        """Return whether calls may be replayed: not with a state, whose address varies, nor in a caller's autocast."""
        return not self._calls[method].stateful and not torch.is_autocast_enabled(self._accelerator.torch.type)

    def _run_with(self, call: MethodCall, inputs: list[Any], state: State, chosen: ChosenTensors | None) -> list[Any]:
        assert isinstance(state, AcceleratedState)
        with state.in_turn():
            return super()._run_with(call, inputs, state, chosen)

    def _lend(self) -> None:
        """Let this stream use what is not in the arena: constants and results of the prologue."""
        key = self._accelerator.current_key()
        if key not in self._lent:
            stream = self._accelerator.current()
            for tensor in (*self._own, *(value for call in self._calls.values() for value in call.hoisted)):
                tensor.record_stream(stream)
            self._lent.add(key)

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone, and capture calls of the named shapes."""
        super().run_prologue()
        self._capture_named()

    def copy_prologue_from(self, other: Bound) -> bool:
        """As on the CPU. The other's memory is kept until the copies are done."""
        if self.has_prologue and isinstance(other, BoundAccelerated):
            other._lend()
        copied = super().copy_prologue_from(other)
        if copied:
            self._capture_named()
        return copied

    def _capture_named(self) -> None:
        if self._captures is None:
            return
        if self._arena.holds_calls:  # they must not wait for captures, too: a later call captures its shape
            self._captures.try_again()
        else:
            self._captures.capture_named()

    def _run_prologue(self) -> None:
        super()._run_prologue()
        self._lent.clear()  # the results of the first run are not lent yet


class AcceleratedState(TorchState):
    """A state on a device. Work on it in one stream waits for earlier work on it in another."""

    def __init__(
        self, rows: Sequence[NamedTensor], initial: Mapping[str, torch.Tensor], accelerator: Accelerator
    ) -> None:
        super().__init__(rows, initial)
        self._accelerator = accelerator
        self._changed = accelerator.mark(accelerator.current())  # after the last work on it
        self._lent: set[int] = set()  # keys of streams

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the block read or write the state in the thread's current stream, after earlier work on it."""
        stream = self._accelerator.current()
        self._accelerator.wait(stream, self._changed)
        key = self._accelerator.current_key()
        if key not in self._lent and not self._accelerator.is_foreign(stream):
            for tensor in self.tensors.values():
                tensor.record_stream(stream)
            self._lent.add(key)
        try:
            yield
        finally:
            self._changed = self._accelerator.mark(stream)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set values by the names of the rows. Raises Unsupported while the application captures a CUDA graph."""
        check_call(self._accelerator, "a state that is put back")
        with self.in_turn():
            super().put(values)

    def content(self, name: str) -> TensorBytes:
        """Copy the content of a row's tensor once the device is done with it. Raises Unsupported as `put` does."""
        check_call(self._accelerator, "a state that is read")
        with self.in_turn():
            return super().content(name)


class OnHost:
    """Trial of weights staged in host memory, on the CPU: inputs come from the device, and outputs go to it."""

    def __init__(self, bound: Bound, engine: TorchEngine, to_device: Move, to_host: Move) -> None:
        self._bound = bound
        self._engine = engine
        self._to_device = to_device
        self._to_host = to_host
        self.run_prologue = bound.run_prologue
        self.copy_prologue_from = bound.copy_prologue_from
        self.keep = bound.keep

    @uncompiled
    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        """Run a method on flat inputs. Return flat outputs; both are on the device, as are the state and variants."""
        if isinstance(chosen, ChosenTensors):
            chosen = ChosenTensors({name: self._to_host(value) for name, value in chosen.tensors.items()})
        here = None
        if isinstance(state, TorchState):
            here = self._engine.new_state({name: state.content(name) for name, _ in state.values()})
        outputs = self._bound.run(method, _moved(self._to_host, inputs), here, chosen)
        if isinstance(state, TorchState) and here is not None:
            state.put({name: self._to_device(value) for name, value in here.values()})
        return _moved(self._to_device, outputs)

    @property
    def has_prologue(self) -> bool:
        return self._bound.has_prologue


def _moved(move: Move, values: list[Any]) -> list[Any]:
    return [move(value) if isinstance(value, torch.Tensor) else value for value in values]


def samples(cuda_graphs: CudaGraphs, manifest: Manifest, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """Yield methods with flat inputs of zeros, for every method without state that can have the sizes.

    cuda_graphs: for each capture the sizes of the named dimensions, or the shape of the input of a method that takes
    one tensor. Raises Unsupported for sizes that no method has, and for those out of range.
    """
    if cuda_graphs == AUTO:
        return
    if isinstance(cuda_graphs, str | Mapping) or not isinstance(cuda_graphs, Iterable):
        raise Unsupported(f'cuda_graphs={cuda_graphs!r}: expected "auto", or a list of sizes such as [{{"batch": 1}}]')
    for request in cuda_graphs:
        _check(request)
        fitting = [
            (name, inputs)
            for name, method in manifest.methods.items()
            if not method.has_state and (inputs := _sample(request, method.signature, device)) is not None
        ]
        if not fitting:
            has = "; ".join(f"{name} has {_described(method)}" for name, method in manifest.methods.items())
            raise Unsupported(f"cuda_graphs: no method can be called with {request!r}: {has}")
        yield from fitting


def _check(request: Any) -> None:
    sizes = request.values() if isinstance(request, Mapping) else request
    if isinstance(request, str) or not isinstance(sizes, Iterable) or not all(type(size) is int for size in sizes):
        raise Unsupported(f'cuda_graphs: {request!r} is neither sizes by name, such as {{"batch": 1}}, nor a shape')


def _sample(request: Any, signature: Signature, device: torch.device) -> list[Any] | None:
    flat = input_leaves(signature)
    sizes = request if isinstance(request, Mapping) else _sizes_of_shape(tuple(request), flat)
    if sizes is None or not in_range(sizes, signature.dims):
        return None
    return [_zeros(leaf, sizes, device) for leaf in flat]


def _sizes_of_shape(shape: tuple[int, ...], flat: list[Leaf]) -> Sizes | None:
    """Return the named sizes of a method's only tensor for a shape; None if it cannot have this shape."""
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or len(tensors[0].shape) != len(shape):
        return None
    dynamic = {text: size for text, size in zip(tensors[0].shape, shape, strict=True) if isinstance(text, str)}
    sizes = {}
    for text, size in dynamic.items():
        factor, dim, offset = parse_size(text)
        sizes[dim] = (size - offset) // factor
    return sizes if tuple(size_at(size, sizes) for size in tensors[0].shape) == shape else None


def _zeros(leaf: Leaf, sizes: Sizes, device: torch.device) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    return torch.zeros([size_at(size, sizes) for size in leaf.shape], dtype=torch_dtype(leaf.dtype), device=device)


def _described(method: Method) -> str:
    if method.has_state:
        return "state, and calls with state are never captured"
    signature = method.signature
    if not signature.dims:
        return "no named dimensions"
    return ", ".join(f"{name} ({dim.min} to {dim.max or 'any'})" for name, dim in signature.dims.items())
